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


def load_sample() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """The first 200 test images of each class: uint8 (2000, 32, 32, 3) and labels (2000,), in the test set's order."""
    images, labels, _ = read_sheets(resources.files("trust_tta").joinpath(SAMPLE_FOLDER))
    if hash_array(images) != SAMPLE_SHA256:
        raise DataError("the images that ship with trust-tta have changed (sha256 differs); install the package again")
    return images, labels


def read_sheets(folder: Traversable) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]]:
    """The images (n, h, w, 3), labels (n,) and indices (n,) of a folder of sheets, by index."""
    index = json.loads(folder.joinpath("sample.json").read_text(encoding="utf-8"))
    height, width = int(index["height"]), int(index["width"])
    images, labels, indices = [], [], []
    for sheet in index["sheets"]:
        count = len(sheet["indices"])
        pixels = read_image(folder.joinpath(sheet["file"]).read_bytes(), name=sheet["file"])
        grid = pixels.reshape(pixels.shape[0] // height, height, pixels.shape[1] // width, width, 3).swapaxes(1, 2)
        images.append(grid.reshape(-1, height, width, 3)[:count])  # the last row is padded
        labels += [sheet["label"]] * count
        indices += sheet["indices"]
    order = np.argsort(indices)
    return np.concatenate(images)[order], np.array(labels)[order], np.array(indices)[order]
