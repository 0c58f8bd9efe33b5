"""Class names of known data sets, and of networks trained on them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from trust_tta.config_io import read_asset


def _rows(name: str) -> list[list[str]]:
    """The rows of a packaged table, without comments."""
    return [line.split("\t") for line in read_asset(name).splitlines() if not line.startswith("#")]


CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CIFAR100_CLASSES = tuple(read_asset("cifar100_classes.txt").split())
PACS_CLASSES = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")


@dataclass(frozen=True)
class ImageNetClass:
    """One class; `rendition` says whether ImageNet-R has it."""

    wnid: str
    name: str
    rendition: bool


@cache
def imagenet_classes() -> tuple[ImageNetClass, ...]:
    """The 1000 classes, in label order (the sorted WordNet ids)."""
    return tuple(ImageNetClass(wnid, name, flag == "1") for wnid, name, flag in _rows("imagenet_classes.tsv"))


@cache
def label_of_wnid() -> dict[str, int]:
    """From WordNet id to label 0..999."""
    return {c.wnid: label for label, c in enumerate(imagenet_classes())}


def segmentation_classes(dataset: str) -> dict[str, str]:
    """The classes and colors of voc and context (with the background first), ade20k, cityscapes or camvid.

    Names are in label order; colors are written RRGGBB.
    """
    return {name: color for owner, color, name in _rows("segmentation_classes.tsv") if owner == dataset}
