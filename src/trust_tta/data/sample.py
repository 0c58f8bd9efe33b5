"""The sample that ships with the package: 2,000 test images of CIFAR-10 as lossless WebP sheets, one for each class."""

from __future__ import annotations

import json
from importlib import resources
from importlib.resources.abc import Traversable

import numpy as np
from numpy.typing import NDArray

from trust_tta.data.file_io import hash_array
from trust_tta.data.images import read_image
from trust_tta.errors import DataError

SAMPLE_FOLDER = "assets/cifar10_sample"
SAMPLE_SHA256 = "2604dccd3d4c3aa0e6504b43cdf8a5f3f5e37f783ec0922625192b99368b2a9d"
"""Of the 2,000 images, uint8 NHWC, in the order of CIFAR-10's test set."""

_INDEX = "sample.json"


def load_sample() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """The first 200 test images of each class: uint8 (2000, 32, 32, 3) and labels (2000,), in the test set's order."""
    images, labels, _ = read_sheets(resources.files("trust_tta").joinpath(SAMPLE_FOLDER))
    if hash_array(images) != SAMPLE_SHA256:
        raise DataError("the images that ship with trust-tta have changed (sha256 differs); install the package again")
    return images, labels


def read_sheets(folder: Traversable) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]]:
    """The images (n, h, w, 3), labels (n,) and indices (n,) of a folder of sheets, by index."""
    try:
        index = json.loads(folder.joinpath(_INDEX).read_text(encoding="utf-8"))
        height, width = int(index["height"]), int(index["width"])
        sheets = [read_image(folder.joinpath(sheet["file"]).read_bytes()) for sheet in index["sheets"]]
        counts = [len(sheet["indices"]) for sheet in index["sheets"]]
        tiles = []
        for sheet, count in zip(sheets, counts, strict=True):  # whose last row is padded
            grid = sheet.reshape(sheet.shape[0] // height, height, sheet.shape[1] // width, width, 3).swapaxes(1, 2)
            tiles.append(grid.reshape(-1, height, width, 3)[:count])
        indices = np.concatenate([np.array(sheet["indices"], dtype=np.int64) for sheet in index["sheets"]])
        labels = np.repeat(np.array([sheet["label"] for sheet in index["sheets"]], dtype=np.int64), counts)
    except Exception as error:  # decoders raise many types
        raise DataError(f"the sheets in {folder} cannot be read: {error}; install the package again") from error
    images = np.concatenate(tiles)
    if len(images) != len(labels):
        raise DataError(f"the sheets in {folder} hold {len(images)} images for {len(labels)} labels; install it again")
    order = np.argsort(indices)
    return images[order], labels[order], indices[order]
