"""Atomic writes with one-line errors, and sha256 fingerprints of arrays and file lists."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from trust_tta.atomic import replacing
from trust_tta.errors import DataError


@contextmanager
def writing(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces `path` when the block succeeds; OSErrors become one line."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary, temporary.open("wb") as file:
            yield file
    except OSError as error:
        raise DataError(f"cannot write {path}: {error}; free some space or choose a folder you may write to") from error


def write_npy(path: Path, array: NDArray[Any]) -> None:
    """Write `array` to `path`, whole or not at all."""
    with writing(path) as file:
        np.save(file, array)


def hash_array(array: NDArray[Any]) -> str:
    """The sha256 of the array's little-endian bytes in C order."""
    little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    return hashlib.sha256(little.reshape(-1).view(np.uint8).data).hexdigest()


def hash_file_sizes(files: Iterable[tuple[str, int]]) -> str:
    """The sha256 over the names and sizes of files."""
    digest = hashlib.sha256()
    for name, size in files:
        digest.update(f"{name}\0{size}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


def hash_strings(texts: Iterable[str]) -> str:
    """The sha256 over several texts, in order."""
    return hash_file_sizes((text, len(text)) for text in texts)
