"""Image files: which files are images, which lie in a folder, and what is in one."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from trust_tta.errors import DataError

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".ppm", ".pgm", ".gif")


def is_image(name: str) -> bool:
    """Whether a file of this name is read as an image; hidden ones are not."""
    return name.lower().endswith(IMAGE_SUFFIXES) and not name.startswith(".")


def list_images(folder: Path) -> list[str]:
    """The image files directly in `folder`, by name."""
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if is_image(entry.name))


def read_image(path: Path | str) -> NDArray[np.uint8]:
    """Decode one image file to RGB, uint8 (h, w, 3)."""
    try:
        with Image.open(path) as image:
            return np.array(image.convert("RGB"), dtype=np.uint8)
    except Exception as error:  # decoders raise whatever they stumble over
        raise DataError(
            f"the image {os.fspath(path)} cannot be read: {error}; replace it or run `trust-tta data check`"
        ) from error
