"""Data sets that are arrays on disk: CIFAR as its authors release it, and arrays of corrupted images."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from trust_tta.config_io import read_json
from trust_tta.data.class_matching import numeric_class_names
from trust_tta.data.corruptions.table import SEVERITIES
from trust_tta.data.dataset import Dataset, array_dataset
from trust_tta.data.images import check_labels, check_pixels
from trust_tta.data.registry import DatasetSpec
from trust_tta.errors import DataError, reason_of

LABELS = "labels.npy"
RECORD_NAME = "corrupt.json"  # written by `trust-tta corrupt` beside its arrays
TRAIN_BATCHES = tuple(f"data_batch_{i}" for i in range(1, 6))
TEST_BATCH = "test_batch"
CIFAR_ARRAYS = ("test_images.npy", "train_images.npy")
OFFICIAL_BATCHES: dict[str, dict[str, tuple[str, ...]]] = {
    "cifar10": {"train": TRAIN_BATCHES, "test": (TEST_BATCH,)},
    "cifar100": {"train": ("train",), "test": ("test",)},
}

LabeledImages: TypeAlias = tuple[NDArray[np.uint8], NDArray[np.int64]]
"""Images (n, 32, 32, 3) and their labels (n,)."""

MAX_BATCH_BYTES = 1 << 28  # CIFAR-100's training set has 155 MB


def open_array(path: Path) -> NDArray[Any]:
    """Memory-map a `.npy` file; a broken or missing one is named."""
    if not os.path.exists(path):
        raise DataError(f"{path} is missing; put it there or download the data set again")
    if not os.path.isfile(path):  # a pipe would block
        raise DataError(f"{path} is not a file; give a .npy file")
    try:
        array: NDArray[Any] = np.lib.format.open_memmap(path, mode="r")
    except Exception as error:  # a broken header raises many types
        raise DataError(f"{path} is not a whole .npy file: {reason_of(error)}; make or download it again") from error
    return array


def open_images(path: Path) -> NDArray[np.uint8]:
    """Memory-map an array of images, uint8 (n, h, w, 3)."""
    return check_pixels(open_array(path), f"{path} is")


def open_labels(path: Path) -> NDArray[np.int64]:
    """Read an array of labels (n,), of any integer type."""
    return check_labels(open_array(path), f"{path} is")


def severities_of(path: Path, images: int, labels: NDArray[np.int64], *, one: int = 0) -> tuple[int, ...]:
    """The severities of the equal blocks of an array, from `corrupt.json`, else 1 to 5 if the labels repeat five times.

    Empty for one block of unknown severity. `one`: the number of images at one severity, 0 if unknown. Labels that
    repeat with a few exceptions are refused.
    """
    recorded = recorded_severities(path.parent)
    severities = recorded or SEVERITIES
    size, rest = divmod(images, len(severities))
    if size and not rest and len(labels) in (size, images) and (recorded or images != one):
        blocks = labels.reshape(-1, size)
        differing = (blocks != blocks[0]).any(axis=0).mean()
        if not differing:
            return severities
        if recorded or images == len(severities) * one or differing < 0.5:
            raise DataError(
                f"{path.parent / LABELS} is not {len(blocks)} equal blocks, one for each severity; download it again"
            )
    if recorded or len(labels) != images:
        raise DataError(
            f"{path.parent / LABELS} has {len(labels)} labels for the {images} images of {path.name}; it must have "
            f"{images}" + (f" or {size}" if size and not rest else "")
        )
    return ()


def recorded_severities(folder: Path) -> tuple[int, ...]:
    """The severities in the record that `trust-tta corrupt` wrote into `folder`; empty without one."""
    try:
        record = read_json(folder / RECORD_NAME, error=DataError)
        return tuple(int(severity) for severity in record["severities"] if severity in SEVERITIES)
    except (DataError, KeyError, TypeError):
        return ()


def open_corrupted(spec: DatasetSpec, folder: Path, domain: str, *, severity: int) -> Dataset:
    """One severity of `<domain>.npy`, with the labels of `labels.npy`; a single block serves every severity."""
    path = folder / f"{domain}.npy"
    images, labels = open_images(path), open_labels(folder / LABELS)
    one = next(known.images for known in spec.domains if known.name == domain)
    severities = severities_of(path, len(images), labels, one=one)
    if severities and severity not in severities:
        raise DataError(f"{path} has no severity {severity}; it holds {', '.join(map(str, severities))}")
    size = len(images) // max(1, len(severities))
    start = severities.index(severity) * size if severities else 0
    chosen = labels[start : start + size] if len(labels) == len(images) else labels
    names = spec.class_names or numeric_class_names(labels, where=folder / LABELS)
    known = severity if severities else None
    return array_dataset(images[start : start + size], chosen, names, name=spec.name, domain=domain, severity=known)


def open_cifar(spec: DatasetSpec, folder: Path, domain: str) -> Dataset:
    """The clean training or test set, from our `.npy` files or the official Python batches."""
    arrays = folder / f"{domain}_images.npy", folder / f"{domain}_labels.npy"
    if arrays[0].exists():
        images, labels = open_images(arrays[0]), open_labels(arrays[1])
    else:
        names = OFFICIAL_BATCHES[spec.name][domain]
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise DataError(f"{folder} lacks {arrays[0].name} and the official {', '.join(missing)}; download it again")
        images, labels = join_labeled(
            [read_batch((folder / name).read_bytes(), name=str(folder / name)) for name in names]
        )
    if len(images) != len(labels):
        raise DataError(f"{folder} has {len(images)} {domain} images but {len(labels)} labels; download it again")
    return array_dataset(images, labels, spec.class_names, name=spec.name, domain=domain)


def join_labeled(batches: list[LabeledImages]) -> LabeledImages:
    """Concatenate several sets of images and labels."""
    return np.concatenate([images for images, _ in batches]), np.concatenate([labels for _, labels in batches])


def read_batch(file: bytes, *, name: str) -> LabeledImages:
    """One official Python batch of CIFAR-10 or CIFAR-100 (fine labels)."""
    try:
        if len(file) > MAX_BATCH_BYTES:
            raise pickle.UnpicklingError(f"it is larger than {MAX_BATCH_BYTES} bytes")
        content = _BatchUnpickler(io.BytesIO(file), encoding="bytes").load()
        pixels = content[b"data"].pixels().reshape(-1, 3, 32, 32)
        labels = content[b"labels"] if b"labels" in content else content[b"fine_labels"]
        if not isinstance(labels, list) or not all(type(label) is int and 0 <= label < 100 for label in labels):
            raise pickle.UnpicklingError("its labels are not a list of integers from 0 to 99")
    except Exception as error:  # a broken pickle raises many types
        raise DataError(f"{name} is not a CIFAR batch: {reason_of(error)}; download it again") from error
    if len(labels) != len(pixels):
        raise DataError(f"{name} holds {len(pixels)} images but {len(labels)} labels; download it again")
    return np.ascontiguousarray(pixels.transpose(0, 2, 3, 1)), np.array(labels, dtype=np.int64)


class _BatchUnpickler(pickle._Unpickler):  # the one in C makes room for as many objects as a file claims
    """Unpickles plain containers and arrays as `_Stored`; nothing in the file is called."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("_codecs", "encode"):  # by which old protocols write bytes
            return lambda text, encoding="latin1": text.encode("latin1")
        if module.partition(".")[0] == "numpy" and name in ("_reconstruct", "ndarray", "dtype"):
            return _Stored
        raise pickle.UnpicklingError(f"the file asks for {module}.{name}, which no CIFAR batch holds")


class _Stored:
    """The arguments and the state of a NumPy array or type, as they are in the file."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def pixels(self) -> NDArray[np.uint8]:
        """The array, which must be of bytes."""
        _, shape, kind, fortran, content = self.state
        if kind.arguments[0] not in ("u1", b"u1"):
            raise pickle.UnpicklingError(f"the file has an array of {kind.arguments[0]!r}; CIFAR batches are bytes")
        return np.frombuffer(content, dtype=np.uint8).reshape(shape, order="F" if fortran else "C")
