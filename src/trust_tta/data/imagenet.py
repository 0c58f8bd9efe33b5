"""ImageNet's 1000 classes: WordNet ids in label order, names, and the 200 of ImageNet-R."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import resources

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class ImageNetClass:
    """One class; `rendition` says whether ImageNet-R has it."""

    wnid: str
    name: str
    rendition: bool


@cache
def imagenet_classes() -> tuple[ImageNetClass, ...]:
    """The 1000 classes, in label order (the sorted WordNet ids)."""
    text = resources.files("trust_tta").joinpath("assets/imagenet_classes.tsv").read_text(encoding="utf-8")
    rows = (line.split("\t") for line in text.splitlines() if not line.startswith("#"))
    return tuple(ImageNetClass(wnid, name, flag == "1") for wnid, name, flag in rows)


@cache
def label_of_wnid() -> dict[str, int]:
    """From WordNet id to label 0..999."""
    return {c.wnid: label for label, c in enumerate(imagenet_classes())}


def rendition_mask() -> NDArray[np.int64]:
    """The sorted labels of ImageNet-R's 200 classes within the 1000."""
    return np.array([label for label, c in enumerate(imagenet_classes()) if c.rendition], dtype=np.int64)
