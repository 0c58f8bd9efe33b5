"""What was written, run beside PyTorch on real images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trust_tta.data.embedded import load_sample
from trust_tta.data.images import is_image, read_image
from trust_tta.errors import DataError, TrustError
from trust_tta.optional import require
from trust_tta.preprocessing import Preprocessing

TOLERANCE, INT8_TOLERANCE = 1e-3, 0.1  # of the largest logit
ALIKE = 0.95  # of the images, or of an image's pixels, must have the same class
SMALL, LARGE = 64, 16  # images to compare on: of up to 64 pixels, and above
BATCHES = (1, 3, 16)  # repeated, so that every number of images is seen to work


@dataclass(frozen=True)
class Agreement:
    """Of the written network with the one in PyTorch: the largest error of a logit, and equal classes."""

    images: int
    largest_error: float
    largest_logit: float
    equal_classes: int

    def as_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def require(self, path: Path, *, tolerance: float) -> None:
        """Refuse what does not compute the same; a few classes may change where two were equally likely."""
        if (
            not self.largest_error <= tolerance * max(1.0, self.largest_logit)
            or self.equal_classes < ALIKE * self.images
        ):
            raise TrustError(
                f"what was written to '{path}' differs from the network by {self.largest_error:.3g} and gives "
                f"{self.equal_classes} of {self.images} images the same class; nothing was kept, please report it"
            )


def find_pictures(folder: Path | None, preprocessing: Preprocessing) -> NDArray[np.uint8]:
    """Real images (n, size, size, 3): those of a folder, or of the sample that ships with the package."""
    count = SMALL if preprocessing.size <= 64 else LARGE
    if folder is None:
        images, _ = load_sample()
        picked = images[:: len(images) // count][:count]
        return preprocessing.changed(resize=None, crop=False).fit(picked)
    files = sorted(path for path in folder.rglob("*") if is_image(path.name))[:count]
    if not files:
        raise DataError(f"there are no images in '{folder}'; give a folder of JPEG, PNG or WebP files")
    return preprocessing.fit(read_image(file) for file in files)


def compare(run: Callable[[Tensor], Tensor], network: torch.nn.Module, images: Tensor) -> Agreement:
    """Run both over the images, in batches of several sizes; logits (n, classes, ..)."""
    written: list[Tensor] = []
    expected: list[Tensor] = []
    first = 0
    with torch.inference_mode():
        while first < len(images):
            batch = images[first : first + BATCHES[len(written) % len(BATCHES)]]
            expected.append(network(batch))
            written.append(run(batch))
            first += len(batch)
    ours, theirs = torch.cat(expected), torch.cat(written)
    equal = (ours.argmax(1) == theirs.argmax(1)).view(len(images), -1).float().mean(1)  # of pixels, the share
    error, largest = (float(t.abs().max()) for t in (ours - theirs, ours))
    return Agreement(len(images), error, largest, int((equal >= ALIKE).sum()))


def open_onnx(path: Path, *, threads: int = 0) -> Callable[[Tensor], Tensor]:
    """A function that runs an ONNX file in onnxruntime, on its CPU provider alone."""
    runtime = require("onnxruntime", extra="export")
    options = runtime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # on a busy machine it takes all cores
    session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(["logits"], {"images": images.numpy()})[0])
