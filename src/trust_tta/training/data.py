"""Training data: images to train on, held-out images, and both as arrays."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trust_tta.data.dataset import ArrayImages, Dataset, join_datasets
from trust_tta.data.loading import available_domains, locate, open_dataset
from trust_tta.data.masks import resize_mask
from trust_tta.data.parallel import map_in_order
from trust_tta.data.registry import DatasetSpec, find_domain, find_spec
from trust_tta.data.segmentation import SegmentationDataset, list_splits
from trust_tta.errors import ConfigError, DataError
from trust_tta.preprocessing import Preprocessing
from trust_tta.progress import SILENT, Progress

TRAINABLE = ("cifar10", "cifar100", "pacs", "folder")
HELD_OUT_SPLITS = ("val", "validation")


@dataclass(frozen=True, eq=False)
class TrainingData:
    """Images to train on and held-out ones; `measured_on` names the held-out split."""

    spec: DatasetSpec
    train: Dataset
    held_out: Dataset
    measured_on: str

    @property
    def description(self) -> str:
        return f"{self.train.name} ({self.train.domain})"


def open_training_data(
    name: str, root: Path | str, *, target: str | None = None, share: float = 0.1, seed: int = 0
) -> TrainingData:
    """CIFAR with its test set held out, segmentation images with their validation split.

    Otherwise every domain but `target`, or the only split, with a random fraction `share` held out.
    """
    spec, root = find_spec(name), Path(root)
    if spec.name not in TRAINABLE and spec.layout != "segmentation":
        raise ConfigError(
            f"data set {name!r} cannot be trained on; choose one of {', '.join(TRAINABLE)}, or one with masks"
        )
    if not 0 < share < 1:
        raise ConfigError(f"the held-out fraction is {share}; it must lie between 0 and 1")
    if spec.layout in ("cifar", "segmentation") and target is not None:
        raise ConfigError(f"target is {target!r}, but {spec.name} has no domains to leave out; omit it")
    if spec.layout == "cifar":
        train, test = (open_dataset(name, root, domain=part) for part in ("train", "test"))
        return TrainingData(spec, train, test, "test")
    if spec.layout == "segmentation":
        parts = _segmentation_splits(spec, root)
        if len(parts) == 2:
            return TrainingData(spec, parts[0], parts[1], "validation")
        whole = parts[0]
    else:
        whole = _without(spec, root, target)
    order, count = np.random.default_rng(seed).permutation(len(whole)), max(1, round(share * len(whole)))
    if len(whole) - count < 2:
        raise DataError(f"{root} has {len(whole)} images to train on; give more, at least 2 besides those held out")
    chosen, held_out = np.sort(order[count:]), np.sort(order[:count])
    return TrainingData(spec, whole.pick(chosen), whole.pick(held_out), "validation")


def _segmentation_splits(spec: DatasetSpec, root: Path) -> list[Dataset]:
    """The split "train" and the validation split; without these, the first."""
    splits = [split.name for split in list_splits(spec, locate(spec, root))]
    held_out = [split for split in splits if split in HELD_OUT_SPLITS][:1]
    if spec.domains and "train" not in splits:
        raise DataError(f"{root} has no training images of {spec.name}/train; it wants {spec.wanted}")
    names = ["train", *held_out] if "train" in splits else splits[:1]
    return [open_dataset(spec.name, root, domain=split, options={"protocol": "native"}) for split in names]


def _without(spec: DatasetSpec, root: Path, target: str | None) -> Dataset:
    """Every domain on disk but the target, joined."""
    left_out = find_domain(spec, target).name if spec.domains and target is not None else target
    domains = available_domains(spec.name, root)
    if left_out is not None and left_out not in domains:
        raise ConfigError(f"{root} has no domain {target!r} to leave out; it has {', '.join(domains)}")
    kept = [domain for domain in domains if domain != left_out]
    if not kept:
        raise ConfigError(f"without {target!r} nothing is left of {root} to train on; omit the target")
    label = "all domains" if left_out is None else f"all domains but {left_out}"
    return join_datasets([open_dataset(spec.name, root, domain=d) for d in kept], domain=label)


def read_arrays(
    dataset: Dataset, preprocessing: Preprocessing, progress: Progress = SILENT
) -> tuple[NDArray[np.uint8], NDArray[Any]]:
    """Images at the size of the network's input, uint8 (n, h, w, 3), with labels (n,) or masks uint8 (n, h, w)."""
    shape = preprocessing.fit_image(dataset.image(0)).shape
    images = np.empty((len(dataset), *shape), dtype=np.uint8)
    masks = np.empty(images.shape[:3], dtype=np.uint8) if isinstance(dataset, SegmentationDataset) else None

    def read(index: int) -> None:
        image = preprocessing.fit_image(dataset.image(index))
        if image.shape != shape:
            sizes = " and ".join(f"{width}x{height}" for height, width, _ in (shape, image.shape))
            raise ConfigError(f"the images of {dataset.name} have several sizes, as {sizes}; give a size for all")
        images[index] = image
        if masks is not None and isinstance(dataset, SegmentationDataset):
            masks[index] = resize_mask(dataset.mask(index), *shape[:2])

    with ThreadPoolExecutor(decoding_threads(dataset)) as pool:
        for _ in map_in_order(pool, read, range(len(dataset))):
            progress.advance()
    return images, dataset.labels if masks is None else masks


def decoding_threads(dataset: Dataset) -> int:
    """Number of threads that decode images; one for arrays, which are not encoded."""
    return 1 if isinstance(dataset.images, ArrayImages) else min(16, os.cpu_count() or 1)
