"""The files CIFAR comes in: the official Python batches, and the PNG sheets of the npm package."""

from __future__ import annotations

import io
import json
import pickle
import tarfile
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from trust_tta.errors import DataError

TRAIN_BATCHES = tuple(f"data_batch_{i}" for i in range(1, 6))
TEST_BATCH = "test_batch"

Labelled = tuple[NDArray[np.uint8], NDArray[np.int64]]
"""Images (n, 32, 32, 3) and their labels (n,)."""

_PICKLED_TYPES = {
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),
}


class _ArrayUnpickler(pickle.Unpickler):
    """Reads arrays and plain containers only, so that a foreign file cannot run code."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _PICKLED_TYPES:
            raise pickle.UnpicklingError(f"the file asks for {module}.{name}, which no CIFAR batch holds")
        return super().find_class(module, name)


def read_batch(file: IO[bytes], *, name: str) -> Labelled:
    """One official Python batch of CIFAR-10 or CIFAR-100 (fine labels)."""
    try:
        content = _ArrayUnpickler(file, encoding="bytes").load()
        pixels = np.asarray(content[b"data"], dtype=np.uint8).reshape(-1, 3, 32, 32)
        labels = np.asarray(content[b"labels"] if b"labels" in content else content[b"fine_labels"], dtype=np.int64)
    except Exception as error:  # a broken pickle raises whatever it stumbles over
        raise DataError(f"{name} is not a CIFAR batch: {error}; fetch it again") from error
    if len(labels) != len(pixels):
        raise DataError(f"{name} holds {len(pixels)} images but {len(labels)} labels; fetch it again")
    return np.ascontiguousarray(pixels.transpose(0, 2, 3, 1)), labels


def read_batches(folder: Path, names: tuple[str, ...]) -> Labelled:
    """The official Python batches `names` of a folder, one after the other."""
    parts = []
    for name in names:
        with (folder / name).open("rb") as file:
            parts.append(read_batch(file, name=str(folder / name)))
    return _join(parts)


def read_official_archive(path: Path) -> tuple[Labelled, Labelled]:
    """Train and test part of `cifar-10-python.tar.gz`."""
    members = _members(path, {*TRAIN_BATCHES, TEST_BATCH})
    parts = {name: read_batch(io.BytesIO(content), name=f"{path.name}:{name}") for name, content in members.items()}
    return _join([parts[name] for name in TRAIN_BATCHES]), parts[TEST_BATCH]


def read_sheet_archive(path: Path) -> tuple[Labelled, Labelled]:
    """Train and test part of the npm package: PNG sheets with one image a row, labels in JSON beside them."""
    labels = ("train_lables.json", "test_lables.json")  # spelt so in the package
    members = _members(path, {*labels, *(f"{name}.png" for name in (*TRAIN_BATCHES, TEST_BATCH))})
    train = np.concatenate([_sheet(members[f"{name}.png"]) for name in TRAIN_BATCHES])
    train_labels, test_labels = (np.asarray(json.loads(members[name]), dtype=np.int64) for name in labels)
    return (train, train_labels), (_sheet(members[f"{TEST_BATCH}.png"]), test_labels)


def _members(path: Path, names: set[str]) -> dict[str, bytes]:
    """The contents of the named files, wherever in the archive they lie."""
    found = {}
    with tarfile.open(path, "r:gz") as archive:
        for member in archive:
            name = member.name.rsplit("/", 1)[-1]
            file = archive.extractfile(member) if name in names else None
            if file is not None:
                found[name] = file.read()
    if missing := sorted(names - set(found)):
        raise DataError(f"the archive {path.name} lacks {', '.join(missing)}; fetch it again")
    return found


def _sheet(content: bytes) -> NDArray[np.uint8]:
    with Image.open(io.BytesIO(content)) as image:
        return np.asarray(image.convert("RGB"), dtype=np.uint8).reshape(-1, 32, 32, 3)


def _join(parts: list[Labelled]) -> Labelled:
    return np.concatenate([images for images, _ in parts]), np.concatenate([labels for _, labels in parts])
