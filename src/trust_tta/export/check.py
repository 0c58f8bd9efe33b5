"""Comparing an exported network with PyTorch on real images."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

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

TOLERANCE, INT8_TOLERANCE = 1e-3, 0.1  # relative to the largest logit
ALIKE = 0.95  # fraction of the images, or of an image's pixels, that must have the same class
ROUNDING = 1e-6  # absolute tolerance
POINT = 1.0  # percentage point of accuracy that int8 may cost
SMALL, LARGE = 64, 16  # images to compare: of up to 64 pixels, and larger ones
BATCHES = (1, 3, 16)  # batch sizes, repeated, to show that any number of images works


@dataclass(frozen=True)
class Agreement:
    """Agreement of the exported network with PyTorch: the largest error of a logit, and the number of equal classes."""

    images: int
    largest_error: float
    largest_logit: float
    equal_classes: int

    def as_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def require(self, path: Path, *, tolerance: float) -> None:
        """Refuse a network that computes something else; a few classes may change where two were equally likely."""
        alike = self.equal_classes >= ALIKE * self.images
        if not (self.largest_error <= tolerance * self.largest_logit + ROUNDING and alike):
            raise TrustError(
                f"what was written to '{path}' differs from the network by {self.largest_error:.3g} and gives "
                f"{self.equal_classes} of {self.images} images the same class; nothing was kept, please report it"
            )


def comparison_images(folder: Path | None, preprocessing: Preprocessing) -> NDArray[np.uint8]:
    """Real images (n, size, size, 3): those of a folder, or of the sample that ships with the package."""
    count = SMALL if preprocessing.size <= 64 else LARGE
    if folder is None:
        images, _ = load_sample()
        picked = images[:: len(images) // count][:count]
        return preprocessing.changed(resize=None, crop=False).fit(picked)
    return preprocessing.changed(keep_ratio=False).fit(read_image(file) for file in find_images(folder)[:count])


def batches(pictures: NDArray[np.uint8], given: InputSpec) -> Iterator[Tensor]:
    """The pictures (n, size, size, 3) in batches of several sizes, and in three shapes if any are accepted."""
    size, first = pictures.shape[1], 0
    shapes = [(size, size), (3 * size // 4 + 1, size), (size, 3 * size // 2 + 1)][: 3 if given.size is None else 1]
    for i in range(len(pictures)):
        batch, (height, width) = pictures[first : first + BATCHES[i % len(BATCHES)]], shapes[i % len(shapes)]
        if not len(batch):
            return
        first += len(batch)
        yield given.from_images(np.concatenate([batch, batch], axis=2)[:, :height, :width])


def compare(run: Run, network: torch.nn.Module, images: Iterable[Tensor]) -> Agreement:
    """Run both over batches of images; logits (n, classes, ..)."""
    found = []
    with torch.inference_mode():
        for batch in images:
            ours, theirs = network(batch), run(batch)
            equal = (ours.argmax(1) == theirs.argmax(1)).view(len(batch), -1).float().mean(1)  # the fraction of pixels
            error, largest = (float(t.abs().max()) for t in (ours - theirs, ours))
            found.append((len(batch), error, largest, int((equal >= ALIKE).sum())))
    counts, errors, logits, alike = zip(*found, strict=True)
    error, largest = (float(np.max(values)) for values in (errors, logits))  # NaN if one of them is
    return Agreement(sum(counts), error, largest, sum(alike))


def accuracy(run: Run, given: InputSpec) -> float:
    """The percentage of the shipped CIFAR-10 images, of 32 pixels, that are classified correctly."""
    images, labels = load_sample()
    with torch.inference_mode():
        predicted = torch.cat([run(batch).argmax(1) for batch in given.from_images(images).split(100)])
    return 100 * (predicted == torch.from_numpy(labels)).double().mean().item()


def open_onnx(path: Path, *, threads: int = 0) -> Run:
    """A function that runs an ONNX file in onnxruntime, on its CPU provider alone."""
    runtime = require("onnxruntime", extra="export")
    options = runtime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # on a busy machine it takes all cores
    session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(["logits"], {"images": images.numpy()})[0])
