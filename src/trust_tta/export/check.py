"""Comparing an exported network with PyTorch on real images."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trust_tta.data.images import find_images, read_image
from trust_tta.data.sample import load_sample
from trust_tta.errors import TrustError
from trust_tta.export.network import InputSpec
from trust_tta.optional import require
from trust_tta.preprocessing import Preprocessing

Run: TypeAlias = Callable[[Tensor], Tensor]

TOLERANCE, INT8_TOLERANCE = 1e-3, 0.1  # of logits, relative to the largest
ABSOLUTE_TOLERANCE = 1e-6
MIN_EQUAL = 0.95  # fraction of the images, or of an image's pixels, that must have the same class
BATCH_SIZES = (1, 3, 16)  # repeated, to show that any number of images works


@dataclass(frozen=True)
class Agreement:
    """Agreement of an exported network with PyTorch."""

    images: int
    largest_error: float
    largest_logit: float
    equal_classes: int

    def require(self, path: Path, *, tolerance: float) -> None:
        """Raise if logits or classes differ too much; near ties may change the class of a few images."""
        same = self.equal_classes >= MIN_EQUAL * self.images
        if not (self.largest_error <= tolerance * self.largest_logit + ABSOLUTE_TOLERANCE and same):
            raise TrustError(
                f"what was written to '{path}' differs from the network by {self.largest_error:.3g} and gives "
                f"{self.equal_classes} of {self.images} images the same class; nothing was kept, please report it"
            )


def comparison_images(folder: Path | None, preprocessing: Preprocessing) -> NDArray[np.uint8]:
    """Images (n, size, size, 3) of a folder, or of the shipped sample."""
    count = 64 if preprocessing.size <= 64 else 16
    if folder is None:
        images, _ = load_sample()
        return preprocessing.changed(resize=None, crop=False).fit(images[:: len(images) // count][:count])
    return preprocessing.changed(keep_ratio=False).fit(read_image(file) for file in find_images(folder)[:count])


def batches(images: NDArray[np.uint8], spec: InputSpec) -> Iterator[Tensor]:
    """Batches of several sizes from images (n, size, size, 3), in three shapes if the input accepts any."""
    size = images.shape[1]
    shapes = [(size, size), (3 * size // 4 + 1, size), (size, 3 * size // 2 + 1)][: 3 if spec.size is None else 1]
    for count, (height, width) in zip(cycle(BATCH_SIZES), cycle(shapes), strict=False):
        if not len(images):
            return
        batch, images = images[:count], images[count:]
        yield spec.from_images(np.concatenate([batch, batch], axis=2)[:, :height, :width])


def compare(run: Run, network: torch.nn.Module, images: Iterable[Tensor]) -> Agreement:
    """Run an exported file and the network on batches of images and compare their logits (n, classes, ..)."""
    errors, logits, equal = [], [], []
    with torch.inference_mode():
        for batch in images:
            ours, theirs = network(batch), run(batch)
            errors.append((ours - theirs).abs().max())
            logits.append(ours.abs().max())
            same = ours.argmax(1) == theirs.argmax(1)
            equal.append(same.view(len(batch), -1).float().mean(1))  # over the pixels of an image
    shares = torch.cat(equal)
    error, logit = (float(torch.stack(values).max()) for values in (errors, logits))  # NaN if one of them is
    return Agreement(len(shares), error, logit, equal_classes=int((shares >= MIN_EQUAL).sum()))


def open_onnx(path: Path, *, threads: int = 0) -> Run:
    """A function that runs an ONNX file in onnxruntime on the CPU."""
    runtime = require("onnxruntime", extra="export")
    options = runtime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # on a busy machine it takes all cores
    session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(["logits"], {"images": images.numpy()})[0])
