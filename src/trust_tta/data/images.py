"""Read image files; format, size and mode are checked before decoding."""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from trust_tta.errors import DataError, reason_of

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".ppm", ".pgm", ".gif")
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "PPM", "GIF")  # the only decoders that are tried
MAX_PIXELS = 89_478_485  # as Pillow's limit without a warning; 256 MiB of RGB

ImageFile: TypeAlias = Path | str | bytes
"""A path, or the bytes of a file."""


def is_image(name: str) -> bool:
    """Whether a file of this name is read as an image; hidden ones are not."""
    return name.lower().endswith(SUFFIXES) and not name.startswith(".")


def list_images(folder: Path) -> list[str]:
    """The image files directly in `folder`, by name."""
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if is_image(entry.name))


def subfolders(folder: Path) -> list[Path]:
    """The folders in `folder` by name, without hidden ones and `__MACOSX`."""
    try:
        with os.scandir(folder) as entries:
            names = [e.name for e in entries if e.is_dir() and not e.name.startswith(".") and e.name != "__MACOSX"]
    except OSError:
        return []
    return [folder / name for name in sorted(names)]


def find_images(root: Path) -> list[Path]:
    """The image files below `root`, sorted by path; a folder that several links lead to is read once."""
    if not root.is_dir():
        raise DataError(f"{root} is not a folder; give a folder with images")
    files, waiting, seen = list[Path](), [root], set[Path]()
    for folder in waiting:  # grows; breadth first, so that a folder is read under its own name and not by a link to it
        if (place := folder.resolve()) not in seen:
            seen.add(place)
            files += [folder / name for name in list_images(folder)]
            waiting += subfolders(folder)
    if not files:
        raise DataError(f"{root} holds no images; images end in {' '.join(SUFFIXES)}")
    return sorted(files, key=Path.as_posix)


def read_image(file: ImageFile, *, name: str | None = None) -> NDArray[np.uint8]:
    """Decode an image to RGB, uint8 (h, w, 3); `name` stands for it in messages.

    Gray values of 16 bits are scaled to 8. Orientation tags are not followed.
    """
    with open_checked(file, name=name) as image:
        if image.mode == "I" or image.mode.startswith("I;16"):  # PPM scales all above 8 bits to 16
            gray = np.rint(np.asarray(image).astype(np.float32) / 257)
            return np.repeat(np.clip(gray, 0, 255).astype(np.uint8)[..., None], 3, axis=-1)
        return np.array(image.convert("RGB"), dtype=np.uint8)


def check_image(file: ImageFile) -> tuple[int, int]:
    """Check the header of an image as `read_image` does; returns height and width."""
    with open_checked(file) as image:
        return image.height, image.width


@contextmanager
def open_checked(file: ImageFile, *, name: str | None = None) -> Iterator[Image.Image]:
    """Open an image and check its header, without decoding; errors inside the block become one line."""
    try:
        if not isinstance(file, bytes) and not stat.S_ISREG(os.stat(file).st_mode):  # a pipe would block
            raise DataError("it is not a regular file")
        with Image.open(io.BytesIO(file) if isinstance(file, bytes) else file, formats=FORMATS) as image:
            check_size(image.height, image.width)
            if image.mode == "F" or (image.mode == "I" and image.format != "PPM"):
                kind = "floating point" if image.mode == "F" else "32-bit integer"
                raise DataError(f"its pixels are {kind} numbers, whose range nothing states; save it with 8 or 16 bits")
            yield image
    except Exception as error:  # decoders raise many types
        shown = name or ("in memory" if isinstance(file, bytes) else os.fspath(file))
        raise DataError(
            f"the image {shown} cannot be read: {reason_of(error)}; replace it or run `trust-tta data check`"
        ) from error


def check_size(height: int, width: int) -> None:
    """Refuse a size that would not fit in memory, before anything is made that large."""
    if height * width > MAX_PIXELS:
        raise DataError(f"an image of {height}x{width} pixels is too large; at most {MAX_PIXELS} pixels are handled")


def check_pixels(array: Any, what: str) -> NDArray[np.uint8]:
    """The array, if it is uint8 (n, h, w, 3); `what` begins the message, as "images are"."""
    if not isinstance(array, np.ndarray):
        raise DataError(f"{what} a {type(array).__name__}; give an array, uint8 (n, h, w, 3)")
    if array.dtype != np.uint8 or array.ndim != 4 or array.shape[-1] != 3 or 0 in array.shape[1:3]:
        raise DataError(f"{what} {array.dtype} {array.shape}; images must be uint8 (n, h, w, 3), values 0 to 255")
    return array


def check_labels(labels: NDArray[Any], what: str, *, count: int | None = None) -> NDArray[np.int64]:
    """The labels (n,) as int64, if they are integers, one for each of `count` images; `what` begins the message."""
    if labels.dtype.kind not in "iu" or labels.ndim != 1 or count not in (None, len(labels)):
        wanted = "integers (n,)" if count is None else f"{count} integers, one per image"
        raise DataError(f"{what} {labels.dtype} {labels.shape}; give {wanted}")
    return labels.astype(np.int64)
