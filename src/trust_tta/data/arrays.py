"""CIFAR and its corrupted versions: arrays on disk, memory-mapped."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trust_tta.data.cifar_files import read_batches
from trust_tta.data.corruptions.record import RECORD_NAME
from trust_tta.data.corruptions.table import SEVERITIES
from trust_tta.data.dataset import Dataset, array_dataset
from trust_tta.data.locate import OFFICIAL_PARTS
from trust_tta.data.specs import DatasetSpec
from trust_tta.errors import DataError


@dataclass(frozen=True)
class Blocks:
    """How a corrupted array is divided: `size` images for each of `severities` in turn; none known: one block."""

    size: int
    severities: tuple[int, ...]

    def find(self, severity: int, *, path: Path) -> slice:
        """Where the images of `severity` lie."""
        if not self.severities:
            return slice(0, self.size)
        if severity not in self.severities:
            have = ", ".join(map(str, self.severities))
            raise DataError(f"{path} has no severity {severity}; it holds {have}")
        start = self.severities.index(severity) * self.size
        return slice(start, start + self.size)


def open_array(path: Path) -> NDArray[Any]:
    """Memory-map a `.npy` file; a broken or missing one is named."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing; put it there or fetch the data set again") from error
    except Exception as error:  # a broken header raises whatever its parser stumbles over
        raise DataError(f"{path} is not a whole .npy file: {error}; make or fetch it again") from error
    if not isinstance(array, np.ndarray):
        raise DataError(f"{path} is an archive of arrays; it must be a .npy file with one array")
    return array


def open_images(path: Path) -> NDArray[np.uint8]:
    """Memory-map an array of images, uint8 (n, h, w, 3)."""
    array = open_array(path)
    if array.dtype != np.uint8 or array.ndim != 4 or array.shape[-1] != 3:
        raise DataError(f"{path} is {array.dtype} {array.shape}; images must be uint8 (n, height, width, 3)")
    return array


def open_labels(path: Path) -> NDArray[np.int64]:
    """Read an array of labels (n,), of any integer type."""
    array = open_array(path)
    if array.dtype.kind not in "iu" or array.ndim != 1:
        raise DataError(f"{path} is {array.dtype} {array.shape}; labels must be integers (n,)")
    return array.astype(np.int64)


def find_blocks(folder: Path, images: int, labels: NDArray[np.int64]) -> Blocks:
    """How many severities an array of so many `images` holds: by our own record, else by the labels' repetition."""
    recorded = recorded_severities(folder)
    if recorded and images % len(recorded) == 0:
        return Blocks(images // len(recorded), recorded)
    size = images // len(SEVERITIES)
    five = images % len(SEVERITIES) == 0 and size > 0
    if five and len(labels) == size:
        return Blocks(size, SEVERITIES)
    if five and len(labels) == images and (labels.reshape(len(SEVERITIES), size) == labels[:size]).all():
        return Blocks(size, SEVERITIES)
    return Blocks(images, ())


def recorded_severities(folder: Path) -> tuple[int, ...]:
    """The severities that `trust-tta corrupt` says it wrote into `folder`; empty where there is no such record."""
    try:
        record = json.loads((folder / RECORD_NAME).read_text(encoding="utf-8"))
        return tuple(int(severity) for severity in record["severities"])
    except (OSError, ValueError, KeyError, TypeError):
        return ()


def open_corrupted(spec: DatasetSpec, folder: Path, domain: str, *, severity: int, limit: int | None) -> Dataset:
    """One severity of `<domain>.npy`, with the labels of `labels.npy`; `limit` takes the first images."""
    path = folder / f"{domain}.npy"
    images, labels = open_images(path), open_labels(folder / "labels.npy")
    blocks = find_blocks(folder, len(images), labels)
    if len(labels) not in (len(images), blocks.size):
        raise DataError(
            f"{folder / 'labels.npy'} has {len(labels)} labels for the {len(images)} images of {path.name}; "
            f"it must have {len(images)} or {blocks.size}"
        )
    place = blocks.find(severity, path=path)
    chosen = labels[place] if len(labels) == len(images) else labels
    names = spec.class_names or tuple(map(str, range(int(labels.max()) + 1)))
    return array_dataset(images[place][:limit], chosen[:limit], names, name=spec.name, domain=domain, severity=severity)


def open_cifar(spec: DatasetSpec, folder: Path, domain: str, *, limit: int | None) -> Dataset:
    """The clean train or test part, from our `.npy` files or the official Python batches."""
    arrays = folder / f"{domain}_images.npy", folder / f"{domain}_labels.npy"
    if arrays[0].exists():
        images, labels = open_images(arrays[0]), open_labels(arrays[1])
    else:
        names = OFFICIAL_PARTS[spec.name][domain]
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise DataError(f"{folder} lacks {arrays[0].name} and the official {', '.join(missing)}; fetch it again")
        images, labels = read_batches(folder, names)
    if len(images) != len(labels):
        raise DataError(f"{folder} has {len(images)} {domain} images but {len(labels)} labels; fetch it again")
    return array_dataset(images[:limit], labels[:limit], spec.class_names, name=spec.name, domain=domain)
