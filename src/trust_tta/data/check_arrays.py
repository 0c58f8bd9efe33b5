"""Checking data sets that are arrays."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trust_tta.data.arrays import find_blocks, open_cifar, open_images, open_labels, recorded_severities
from trust_tta.data.dataset import ArrayImages, Dataset
from trust_tta.data.download import Progress
from trust_tta.data.fetch import CIFAR10_PINS
from trust_tta.data.files import hash_pixels
from trust_tta.data.findings import Finding
from trust_tta.data.specs import DatasetSpec, DomainSpec
from trust_tta.errors import DataError

_CIFAR_SHAPE = (32, 32, 3)
_LABELS = "labels.npy"


def check_cifar(spec: DatasetSpec, folder: Path) -> Iterator[Finding]:
    """The clean test and train parts; CIFAR-10's pixels are compared with their known hash."""
    for part in spec.parts:
        place = folder / part.name
        try:
            dataset = open_cifar(spec, folder, part.name, limit=None)
        except DataError as error:
            yield Finding("error" if part.target else "warning", spec.name, place, str(error))
            continue
        problems = list(_cifar_problems(spec, part, dataset))
        for problem in problems:
            yield Finding("error", spec.name, place, problem)
        if not problems:
            yield Finding("ok", spec.name, place, f"{len(dataset)} images in {spec.classes} classes")


def _cifar_problems(spec: DatasetSpec, part: DomainSpec, dataset: Dataset) -> Iterator[str]:
    if not isinstance(dataset.images, ArrayImages):
        return
    images = dataset.images.array
    if images.shape[1:] != _CIFAR_SHAPE:
        yield f"images have the shape {images.shape[1:]}; they must have {_CIFAR_SHAPE}"
    elif len(images) != part.images:
        yield f"holds {len(images)} images; there must be {part.images}"
    elif spec.name == "cifar10" and hash_pixels(images) != vars(CIFAR10_PINS)[f"{part.name}_images"]:
        yield "the pixels are not CIFAR-10's (sha256 differs); fetch it again"
    elif spec.name == "cifar10" and hash_pixels(dataset.labels) != vars(CIFAR10_PINS)[f"{part.name}_labels"]:
        yield "the labels are not CIFAR-10's (sha256 differs); fetch it again"
    yield from _empty_classes(spec, dataset.labels)


def check_corrupted(spec: DatasetSpec, folder: Path, *, thorough: bool, progress: Progress | None) -> Iterator[Finding]:
    """The labels and each `<corruption>.npy`."""
    labels: NDArray[np.int64] | None = None
    try:
        labels = open_labels(folder / _LABELS)
        for problem in _label_problems(spec, labels):
            yield Finding("error", spec.name, folder / _LABELS, problem)
    except DataError as error:
        yield Finding("error", spec.name, folder / _LABELS, str(error))
    for done, part in enumerate(spec.parts):
        path = folder / f"{part.name}.npy"
        if progress is not None:
            progress(f"checking {spec.name}", done + 1, len(spec.parts))
        if path.exists():
            yield from _check_corruption(spec, part, path, labels, thorough=thorough)
        elif part.target and spec.folders:
            yield Finding("warning", spec.name, path, "this corruption is missing")


def _check_corruption(
    spec: DatasetSpec, part: DomainSpec, path: Path, labels: NDArray[np.int64] | None, *, thorough: bool
) -> Iterator[Finding]:
    try:
        images = open_images(path)
        problems = list(_corruption_problems(spec, part, path, images, labels))
    except DataError as error:
        yield Finding("error", spec.name, path, str(error))
        return
    if thorough:
        problems += _black_images(images)
    for problem in problems:
        yield Finding("error", spec.name, path, problem)
    if not problems:
        blocks = find_blocks(path.parent, len(images), labels if labels is not None else np.empty(0, np.int64))
        held = ", ".join(map(str, blocks.severities)) or "not recorded"
        yield Finding("ok", spec.name, path, f"{blocks.size} images for each severity ({held})")


def _corruption_problems(
    spec: DatasetSpec, part: DomainSpec, path: Path, images: NDArray[np.uint8], labels: NDArray[np.int64] | None
) -> Iterator[str]:
    if spec.folders and images.shape[1:] != _CIFAR_SHAPE:
        yield f"images have the shape {images.shape[1:]}; they must have {_CIFAR_SHAPE}"
    whole = (part.images, 5 * part.images)
    if part.images and len(images) not in whole and not recorded_severities(path.parent):
        yield f"holds {len(images)} images; there must be {whole[1]} (five severities) or {whole[0]} (one)"
    if labels is not None:
        size = find_blocks(path.parent, len(images), labels).size
        if len(labels) not in (len(images), size):
            yield f"holds {len(images)} images but {_LABELS} has {len(labels)} labels"


def _label_problems(spec: DatasetSpec, labels: NDArray[np.int64]) -> Iterator[str]:
    high = spec.classes or np.iinfo(np.int64).max
    wrong = np.flatnonzero((labels < 0) | (labels >= high))
    if len(wrong):
        first = int(wrong[0])
        yield f"{len(wrong)} labels are not in 0..{high - 1}, the first is number {first} with {labels[first]}"
    else:
        yield from _empty_classes(spec, labels)


def _empty_classes(spec: DatasetSpec, labels: NDArray[np.int64]) -> Iterator[str]:
    present = set(np.unique(labels).tolist())
    if empty := [name for label, name in enumerate(spec.class_names) if label not in present]:
        yield f"{len(empty)} classes have no images, as {', '.join(empty[:5])}"


def _black_images(images: NDArray[np.uint8]) -> list[str]:
    """Read every pixel; images that are zero throughout are the mark of a file that was never written to its end."""
    try:
        black = [i for i in range(len(images)) if not images[i].any()]
    except OSError as error:
        return [f"cannot be read to its end: {error}"]
    return [f"{len(black)} images are black throughout, the first is number {black[0]}"] if black else []
