"""The network to export, from pixels to logits, with the scan in operators that every runtime has."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trust_tta.errors import ConfigError
from trust_tta.methods.forward import take_logits
from trust_tta.models.base import ScanNetwork
from trust_tta.models.localvmamba import LocalVMamba
from trust_tta.models.vim import Vim
from trust_tta.models.vssd import VSSD
from trust_tta.preprocessing import Preprocessing

Pixels: TypeAlias = Literal["float", "uint8"]

MAX_BATCH = 1 << 16  # in a batch of an exported network


@dataclass(frozen=True)
class InputSpec:
    """The input `images` of the exported network.

    "float": float32 (n, 3, height, width) from 0 to 1. "uint8": (n, height, width, 3) as decoded.
    `size` None: any height and width.
    """

    pixels: Pixels
    size: int | None

    def as_dict(self) -> dict[str, Any]:
        side = self.size or "any"
        if self.pixels == "float":
            return {"name": "images", "dtype": "float32", "shape": ["n", 3, side, side], "range": [0, 1]}
        return {"name": "images", "dtype": "uint8", "shape": ["n", side, side, 3], "range": [0, 255]}

    def from_images(self, pixels: NDArray[np.uint8]) -> Tensor:
        """Convert resized images, uint8 (n, h, w, 3), to this input."""
        images = torch.from_numpy(np.require(pixels, requirements=["C", "W"]))
        return images if self.pixels == "uint8" else images.permute(0, 3, 1, 2).contiguous() / 255


class PixelInputNetwork(nn.Module):
    """A copy of a network that normalizes its input."""

    mean: Tensor
    std: Tensor

    def __init__(self, network: nn.Module, preprocessing: Preprocessing, pixels: Pixels, *, backend: str) -> None:
        super().__init__()
        self.network = copy.deepcopy(network).eval().requires_grad_(False).to("cpu", torch.float32)
        self.bytes = pixels == "uint8"
        scale = 255.0 if self.bytes else 1.0
        for name in ("mean", "std"):
            value = torch.tensor(getattr(preprocessing, name)).view(1, 3, 1, 1) * scale
            self.register_buffer(name, value, persistent=False)
        for module in list(self.network.modules()):
            if isinstance(module, ScanNetwork):
                module.set_scan_backend(backend)
            for name, inner in module.named_children():
                if backend == "portable" and isinstance(inner, nn.AdaptiveAvgPool2d):
                    setattr(module, name, CellMeans(inner.output_size))

    def forward(self, images: Tensor) -> Tensor:
        if self.bytes:
            images = images.permute(0, 3, 1, 2).to(torch.float32)
        return take_logits(self.network, self.network((images - self.mean) / self.std))


class CellMeans(nn.Module):
    """nn.AdaptiveAvgPool2d as two matrix products, which ONNX supports for maps of any size."""

    def __init__(self, cells: Any) -> None:
        super().__init__()
        self.cells: tuple[int, int] = (cells, cells) if isinstance(cells, int) else tuple(cells)

    def forward(self, x: Tensor) -> Tensor:
        shares = []  # (cells, length) for each axis: the weight of each position in the mean of each cell
        for cells, length in zip(self.cells, x.shape[2:], strict=True):
            cell, place = torch.arange(cells, device=x.device)[:, None], torch.arange(length, device=x.device)
            first, end = cell * length // cells, ((cell + 1) * length + cells - 1) // cells
            shares.append(((place >= first) & (place < end)).to(x.dtype) / (end - first))
        return shares[0] @ x @ shares[1].mT


def trace(network: PixelInputNetwork, spec: InputSpec) -> torch.export.ExportedProgram:
    """The network as PyTorch's graph, for any number of images."""
    if spec.size:
        sides = spec.size, spec.size
    else:  # more than one window on every map: one alone would make the number of windows a constant
        windows = getattr(getattr(network.network, "config", None), "windows", ())
        largest = max((window << (i + 2) for i, window in enumerate(windows)), default=0)  # pixels, strides 4, 8, ...
        sides = max(96, largest + 32), max(128, 3 * largest // 2)
    images = spec.from_images(np.zeros((2, *sides, 3), dtype=np.uint8))
    free: dict[int, Any] = {0: torch.export.Dim("n", min=1, max=MAX_BATCH)}
    if spec.size is None:
        free |= {axis + (spec.pixels == "float"): torch.export.Dim.AUTO for axis in (1, 2)}
    with quiet(), torch.no_grad():
        return torch.export.export(network, (images,), dynamic_shapes=(free,))


def require_any_size(network: nn.Module) -> None:
    """Refuse networks that have parameters for each position of a map of fixed size."""
    if isinstance(network, Vim | LocalVMamba | VSSD):
        raise ConfigError(f"a {type(network).__name__} is exported for images of one size; omit size, or give one")


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the warnings of PyTorch's exporters about missing packages and about themselves."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", None)]  # the quantizer's is the root
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
