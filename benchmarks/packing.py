"""A lossless, compact form of small images that needs NumPy and the standard library alone.

Green, red - green and blue - green are predicted from their left, upper and upper-left neighbors (the median
predictor of JPEG-LS); what is left goes through LZMA's adaptive coder, which sees neighboring errors of one plane.
CIFAR takes 4.2 bits a value, less than lossless WebP. `<name>.json` lists the parts and holds the sha256 of each.
"""

from __future__ import annotations

import hashlib
import json
import lzma
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trust_tta.atomic import replacing
from trust_tta.data.files import hash_pixels
from trust_tta.errors import DataError

# A small window, for pictures do not repeat; all context bits on the byte before.
_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 4096, "lc": 4, "lp": 0, "pb": 0}]

Planes = NDArray[np.int16]
"""(h, w, 3, n): one step of the decoder touches one contiguous row."""


def pack(images: NDArray[np.uint8], labels: NDArray[Any], folder: Path, *, name: str, parts: int = 4) -> list[Path]:
    """Write images uint8 (n, h, w, 3) and their labels as `<name>-<i>.xz` and `<name>.json`; return the files."""
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[-1] != 3 or labels.shape != (len(images),):
        raise DataError(
            f"images {images.dtype} {images.shape}, labels {labels.shape}; give uint8 (n, h, w, 3) and (n,)"
        )
    folder.mkdir(parents=True, exist_ok=True)
    encoded = _in_threads(encode, np.array_split(images, parts))
    files = [folder / f"{name}-{i}.xz" for i in range(parts)]
    for path, content in zip(files, encoded, strict=True):
        _write(path, content)
    index = {
        "shape": images.shape,
        "sha256": hash_pixels(images),
        "labels": labels.tolist(),
        "parts": [
            {"file": p.name, "sha256": hashlib.sha256(c).hexdigest()} for p, c in zip(files, encoded, strict=True)
        ],
    }
    _write(folder / f"{name}.json", json.dumps(index).encode())
    return [*files, folder / f"{name}.json"]


def unpack(folder: Path, name: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Images (n, h, w, 3) and labels (n,) that `pack` wrote, checked against their hashes."""
    index = json.loads(_read(folder / f"{name}.json"))
    contents = []
    for part in index["parts"]:
        content = _read(folder / part["file"])
        if hashlib.sha256(content).hexdigest() != part["sha256"]:
            raise DataError(f"{folder / part['file']} is not what its index lists (sha256 differs); copy it again")
        contents.append(content)
    height, width = index["shape"][1:3]
    images = np.concatenate(_in_threads(lambda content: decode(content, height, width), contents))
    if list(images.shape) != index["shape"] or hash_pixels(images) != index["sha256"]:
        raise DataError(f"the images in {folder} are not those of {name}.json (sha256 differs); pack them again")
    return images, np.asarray(index["labels"], dtype=np.int64)


def encode(images: NDArray[np.uint8]) -> bytes:
    """Images (n, h, w, 3) as one LZMA stream of prediction errors, plane by plane."""
    planes = images.transpose(1, 2, 3, 0).astype(np.int16)[:, :, [1, 0, 2]]
    planes[:, :, 1:] -= planes[:, :, :1]
    errors = np.empty_like(planes)
    for y in range(planes.shape[0]):
        for x in range(planes.shape[1]):
            errors[y, x] = planes[y, x] - _predict(planes, y, x)
    signed = (errors + 128) % 256 - 128
    folded = np.where(signed >= 0, 2 * signed, -2 * signed - 1).astype(np.uint8)  # small errors, small bytes
    return lzma.compress(folded.transpose(2, 3, 0, 1).tobytes(), filters=_FILTERS)


def decode(content: bytes, height: int, width: int) -> NDArray[np.uint8]:
    """The images (n, height, width, 3) that `encode` took."""
    folded = np.frombuffer(lzma.decompress(content), np.uint8).reshape(3, -1, height, width)
    values = np.ascontiguousarray(folded.transpose(2, 3, 0, 1)).astype(np.int16)
    errors = np.where(values % 2 == 0, values // 2, -(values + 1) // 2)
    planes = np.empty_like(errors)
    for y in range(height):
        for x in range(width):
            values = (_predict(planes, y, x) + errors[y, x]) % 256
            planes[y, x, 0] = values[0]
            planes[y, x, 1:] = (values[1:] + values[0]) % 256 - values[0]
    planes[:, :, 1:] += planes[:, :, :1]
    return np.ascontiguousarray(planes[:, :, [1, 0, 2]].transpose(3, 0, 1, 2).astype(np.uint8))


def _predict(planes: Planes, y: int, x: int) -> NDArray[np.int16]:
    """The values (3, n) at (y, x) that the decoded neighbors suggest."""
    if y == 0 or x == 0:
        nothing = np.zeros(planes.shape[2:], np.int16)
        return planes[0, x - 1] if x else planes[y - 1, 0] if y else nothing
    up, left, corner = planes[y - 1, x], planes[y, x - 1], planes[y - 1, x - 1]
    low, high = np.minimum(up, left), np.maximum(up, left)
    median: NDArray[np.int16] = np.clip(up + left - corner, low, high)
    return median


def _in_threads(work: Callable[[Any], Any], items: list[Any]) -> list[Any]:
    with ThreadPoolExecutor() as pool:
        return list(pool.map(work, items))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(
            f"cannot read {path} ({error.strerror}); pack the images again or copy the missing file"
        ) from error


def _write(path: Path, content: bytes) -> None:
    with replacing(path) as temporary:
        temporary.write_bytes(content)
