"""Segmentation masks: reading, remapping and resizing them, and resizing images with them.

Masks are uint8 (h, w): classes from 0 on, 255 for ignored pixels. Sizes and pixels equal those of MMSegmentation
(OpenCV's resizing, without antialiasing).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from trust_tta.data.images import ImageFile, open_checked
from trust_tta.data.segmentation_metrics import IGNORED
from trust_tta.errors import DataError

Mask: TypeAlias = NDArray[np.uint8]

_COEFFICIENT_BITS = 11  # of OpenCV's fixed-point weights


def read_mask(file: ImageFile) -> Mask:
    """Read a mask (h, w): gray values or palette indices, never colors."""
    with open_checked(file) as image:
        if image.mode in ("L", "P", "1"):
            return np.array(image, dtype=np.uint8)
        if image.mode != "I" and not image.mode.startswith("I;16"):
            raise DataError(f"it has the mode {image.mode}; labels are gray values or palette indices, one per pixel")
        values = np.asarray(image)
        if values.min() < 0 or values.max() > 255:
            raise DataError(f"its labels run from {values.min()} to {values.max()}; they must lie in 0..255")
        return values.astype(np.uint8)


def lookup_table(changes: Mapping[int, int] | None = None, *, reduce_zero: bool = False, only: bool = False) -> Mask:
    """A lookup table (256,) from stored labels to class labels.

    `reduce_zero`: 0 is ignored and every other label decreases by one. `changes` apply after that, all at once; with
    `only`, all other labels are ignored.
    """
    table = np.arange(256, dtype=np.uint8)
    if reduce_zero:
        table = np.where((table == 0) | (table == IGNORED), IGNORED, table - 1).astype(np.uint8)
    after = np.full(256, IGNORED, dtype=np.uint8) if only else np.arange(256, dtype=np.uint8)
    for old, new in (changes or {}).items():
        after[old] = new
    return after[table]


def rescale_size(height: int, width: int, scale: tuple[int, int]) -> tuple[int, int]:
    """The largest height and width of the same aspect ratio that fit into `scale`, in either orientation.

    >>> rescale_size(375, 500, (2048, 512))
    (512, 683)
    """
    factor = min(max(scale) / max(height, width), min(scale) / min(height, width))
    return int(height * factor + 0.5), int(width * factor + 0.5)


def resize_mask(mask: Mask, height: int, width: int) -> Mask:
    """Resize a mask to (height, width) by the nearest label, at floor(i * old / new)."""
    rows, columns = (
        np.minimum((np.arange(new) * (old / new)).astype(np.int64), old - 1)
        for new, old in ((height, mask.shape[0]), (width, mask.shape[1]))
    )
    resized: Mask = mask[rows[:, None], columns]
    return resized


def resize_image(image: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8]:
    """Resize uint8 (h, w, 3) to (height, width, 3): bilinear, no antialiasing, OpenCV's fixed-point arithmetic."""
    if image.shape[:2] == (height, width):
        return image
    top, bottom, down = _taps(image.shape[0], height, across=False)
    left, right, across = _taps(image.shape[1], width, across=True)
    pixels = image.astype(np.int32)
    rows = [pixels[r][:, left] * across[0][:, None] + pixels[r][:, right] * across[1][:, None] for r in (top, bottom)]
    parts = [(weight[:, None, None] * (row >> 4)) >> 16 for weight, row in zip(down, rows, strict=True)]
    resized: NDArray[np.uint8] = np.clip((parts[0] + parts[1] + 2) >> 2, 0, 255).astype(np.uint8)
    return resized


def _taps(
    old: int, new: int, *, across: bool
) -> tuple[NDArray[np.int64], NDArray[np.int64], tuple[NDArray[np.int32], ...]]:
    """The two source pixels of each target pixel along one side, and their weights in 2048ths."""
    place = ((np.arange(new) + 0.5) * (old / new) - 0.5).astype(np.float32)
    first = np.floor(place).astype(np.int64)
    fraction = (place - first).astype(np.float32)
    if across:  # rows keep both weights at the border, columns do not: it shows in the rounding
        fraction[(first < 0) | (first >= old - 1)] = 0
    whole = tuple(np.rint(w * (1 << _COEFFICIENT_BITS)).astype(np.int32) for w in (1 - fraction, fraction))
    return np.clip(first, 0, old - 1), np.clip(first + 1, 0, old - 1), whole


@dataclass(frozen=True)
class ResizeProtocol:
    """The size of images and masks, and the size at which predictions are scored.

    "squash": image and mask are resized to `scale` without keeping the aspect ratio, and scored there (as MLMP does).
    "native": the image is scaled to fit into `scale`, and scored at the size of its mask (as MMSegmentation does).
    """

    name: Literal["squash", "native"]
    scale: tuple[int, int]  # width and height

    def size_of(self, height: int, width: int) -> tuple[int, int]:
        """The height and width to which an image of this size is resized."""
        if self.name == "native":
            return rescale_size(height, width, self.scale)
        short, long = min(self.scale), max(self.scale)
        return (short, long) if width > height else (long, short)

    def resize_image(self, image: NDArray[np.uint8]) -> NDArray[np.uint8]:
        return resize_image(image, *self.size_of(*image.shape[:2]))

    def resize_mask(self, mask: Mask) -> Mask:
        return mask if self.name == "native" else resize_mask(mask, *self.size_of(*mask.shape))
