"""The sample that ships with the package: 2,000 test images of CIFAR-10 as lossless WebP sheets, one for each class."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from trust_tta.data.files import hash_pixels
from trust_tta.data.images import read_image
from trust_tta.errors import DataError

SAMPLE_FOLDER = "assets/cifar10_sample"
SAMPLE_SHA256 = "2604dccd3d4c3aa0e6504b43cdf8a5f3f5e37f783ec0922625192b99368b2a9d"
"""Of the 2,000 images, uint8 NHWC, in the order of CIFAR-10's test set."""

_INDEX = "sample.json"
_COLUMNS = 20


def load_sample() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """The first 200 test images of each class: uint8 (2000, 32, 32, 3) and labels (2000,), in the test set's order."""
    images, labels, _ = read_sheets(resources.files("trust_tta").joinpath(SAMPLE_FOLDER))
    if hash_pixels(images) != SAMPLE_SHA256:
        raise DataError("the images that ship with trust-tta are not what they were; install the package again")
    return images, labels


def write_sheets(
    images: NDArray[np.uint8],
    labels: NDArray[np.int64],
    out: Path,
    *,
    indices: NDArray[np.int64],
    class_names: Sequence[str],
) -> None:
    """Write images (n, h, w, 3) as one lossless sheet for each class, and an index of where each came from."""
    out.mkdir(parents=True, exist_ok=True)
    sheets = []
    for label in np.unique(labels).tolist():
        members = np.flatnonzero(labels == label)
        file = f"{class_names[label]}.webp"
        sheet = Image.fromarray(_tile(images[members]))
        sheet.save(out / file, "WEBP", lossless=True, quality=100, method=6, exact=True)
        sheets.append({"file": file, "label": label, "indices": indices[members].tolist()})
    index = {"height": images.shape[1], "width": images.shape[2], "sheets": sheets}
    (out / _INDEX).write_text(json.dumps(index) + "\n", encoding="utf-8")


def read_sheets(folder: Traversable) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]]:
    """The images (n, h, w, 3), labels (n,) and indices (n,) of a folder that `write_sheets` wrote, by index."""
    try:
        index = json.loads(folder.joinpath(_INDEX).read_text(encoding="utf-8"))
        height, width = int(index["height"]), int(index["width"])
        sheets = [read_image(folder.joinpath(sheet["file"]).read_bytes()) for sheet in index["sheets"]]
        counts = [len(sheet["indices"]) for sheet in index["sheets"]]
        tiles = [_cut(sheet, height, width)[:count] for sheet, count in zip(sheets, counts, strict=True)]
        indices = np.concatenate([np.array(sheet["indices"], dtype=np.int64) for sheet in index["sheets"]])
        labels = np.repeat(np.array([sheet["label"] for sheet in index["sheets"]], dtype=np.int64), counts)
    except Exception as error:  # decoders raise whatever they stumble over
        raise DataError(f"the sheets in {folder} cannot be read: {error}; install the package again") from error
    images = np.concatenate(tiles)
    if len(images) != len(labels):
        raise DataError(f"the sheets in {folder} hold {len(images)} images for {len(labels)} labels; install it again")
    order = np.argsort(indices)
    return images[order], labels[order], indices[order]


def _tile(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Images (n, h, w, 3) as one picture with 20 columns; the last row is filled up with black."""
    count, height, width, _ = images.shape
    rows = -(-count // _COLUMNS)
    grid = np.zeros((rows * _COLUMNS, height, width, 3), dtype=np.uint8)
    grid[:count] = images
    grid = grid.reshape(rows, _COLUMNS, height, width, 3).swapaxes(1, 2)
    return grid.reshape(rows * height, _COLUMNS * width, 3)


def _cut(sheet: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8]:
    """The inverse of `_tile`, with the filling."""
    rows, columns = sheet.shape[0] // height, sheet.shape[1] // width
    grid = sheet.reshape(rows, height, columns, width, 3).swapaxes(1, 2)
    return grid.reshape(rows * columns, height, width, 3)
