"""Training data: training and held-out images, and images as one array."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trust_tta.data.dataset import ArrayImages, Dataset, join_datasets
from trust_tta.data.loading import available_domains, open_dataset
from trust_tta.data.registry import DatasetSpec, find_domain, find_spec
from trust_tta.errors import ConfigError, DataError
from trust_tta.preprocessing import Preprocessing
from trust_tta.progress import SILENT, Progress

TRAINABLE = ("cifar10", "cifar100", "pacs", "folder")

_AHEAD = 256  # images decoded between two reports of progress


@dataclass(frozen=True, eq=False)
class TrainingData:
    """`chosen` and `held_out`: indices int64 (n,) into `dataset`; `measured_on` names the held-out split."""

    spec: DatasetSpec
    dataset: Dataset
    chosen: NDArray[np.int64]
    held_out: NDArray[np.int64]
    measured_on: str

    @property
    def description(self) -> str:
        return f"{self.dataset.name} ({self.dataset.domain})"

    def split(self) -> tuple[LazyImages, LazyImages]:
        """The images to learn from, and those held out."""
        return LazyImages(self.dataset, self.chosen), LazyImages(self.dataset, self.held_out)


def open_training_data(
    name: str, root: Path | str, *, target: str | None = None, share: float = 0.1, seed: int = 0
) -> TrainingData:
    """CIFAR with its test set held out; otherwise every domain but `target`, with a fraction `share` held out."""
    spec = find_spec(name)
    if spec.name not in TRAINABLE:
        other = "; for segmentation use open_segmentation_data" if spec.layout == "segmentation" else ""
        raise ConfigError(f"data set {name!r} cannot be trained on; choose one of {', '.join(TRAINABLE)}{other}")
    if not 0 < share < 1:
        raise ConfigError(f"the held-out fraction is {share}; it must lie between 0 and 1")
    if spec.layout == "cifar":
        if target is not None:
            raise ConfigError(f"target is {target!r}, but {spec.name} has no domains to leave out; omit it")
        parts = [open_dataset(name, root, domain=part) for part in ("train", "test")]
        chosen, held_out = np.split(np.arange(sum(map(len, parts)), dtype=np.int64), [len(parts[0])])
        return TrainingData(spec, join_datasets(parts, domain="train"), chosen, held_out, "test")
    dataset = _without(spec, Path(root), target)
    return TrainingData(spec, dataset, *hold_out(len(dataset), share, seed=seed, root=root), "validation")


def hold_out(images: int, share: float, *, seed: int, root: Path | str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Split indices at random into training and held-out ones; both sorted."""
    order = np.random.default_rng(seed).permutation(images)
    count = max(1, round(share * images))
    if images - count < 2:
        raise DataError(f"{root} has {images} images to train on; give more, at least 2 beside those held out")
    return np.sort(order[count:]), np.sort(order[:count])


def _without(spec: DatasetSpec, root: Path, target: str | None) -> Dataset:
    """Every domain on disk but the target, joined."""
    domains = available_domains(spec.name, root)
    left_out = find_domain(spec, target).name if spec.domains and target is not None else target
    if left_out is not None and left_out not in domains:
        raise ConfigError(f"{root} has no domain {target!r} to leave out; it has {', '.join(domains)}")
    kept = [domain for domain in domains if domain != left_out]
    if not kept:
        raise ConfigError(f"without {target!r} nothing is left of {root} to train on; omit the target")
    label = "all domains" if left_out is None else f"all domains but {left_out}"
    return join_datasets([open_dataset(spec.name, root, domain=d) for d in kept], domain=label)


@dataclass(frozen=True, eq=False)
class LazyImages(Sequence[NDArray[np.uint8]]):
    """The images at `indices` of a data set, uint8 (h, w, 3) each, decoded on demand."""

    dataset: Dataset
    indices: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int | slice) -> NDArray[np.uint8] | list[NDArray[np.uint8]]:  # type: ignore[override]
        if isinstance(index, slice):
            with ThreadPoolExecutor(_workers(self.dataset)) as pool:
                return list(pool.map(self.dataset.image, self.indices[index].tolist()))
        return self.dataset.image(int(self.indices[index]))

    @property
    def labels(self) -> NDArray[np.int64]:
        return self.dataset.labels[self.indices]


def read_arrays(source: LazyImages, preprocessing: Preprocessing, progress: Progress = SILENT) -> NDArray[np.uint8]:
    """The images at the size of the network's input, uint8 (n, size, size, 3)."""
    size = preprocessing.size
    images = np.empty((len(source), size, size, 3), dtype=np.uint8)

    def read(index: int) -> NDArray[np.uint8]:
        return preprocessing.fit_image(source.dataset.image(index))

    with ThreadPoolExecutor(_workers(source.dataset)) as pool:
        for start in range(0, len(source), _AHEAD):
            indices = source.indices[start : start + _AHEAD].tolist()
            images[start : start + len(indices)] = list(pool.map(read, indices))
            progress.advance(len(indices))
    return images


def _workers(dataset: Dataset) -> int:
    """Threads that decode; an array needs none."""
    return 1 if isinstance(dataset.images, ArrayImages) else min(16, os.cpu_count() or 1)
