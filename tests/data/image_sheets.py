"""The writer of the shipped sheets of images, which only the tests need now."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

_COLUMNS = 20


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
    (out / "sample.json").write_text(json.dumps(index) + "\n", encoding="utf-8")


def _tile(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Images (n, h, w, 3) as one picture with 20 columns; the last row is filled up with black."""
    count, height, width, _ = images.shape
    rows = -(-count // _COLUMNS)
    grid = np.zeros((rows * _COLUMNS, height, width, 3), dtype=np.uint8)
    grid[:count] = images
    grid = grid.reshape(rows, _COLUMNS, height, width, 3).swapaxes(1, 2)
    return grid.reshape(rows * height, _COLUMNS * width, 3)
