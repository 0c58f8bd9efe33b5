"""Small data sets on disk in the layouts that people have, made of real pictures where these are at hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from trust_tta.progress import Progress

PACS_ROOT = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "PACS"
WNIDS = ("n01443537", "n02099601", "n07753592")  # goldfish 1, golden retriever 207, banana 954; all in ImageNet-R
WNID_LABELS = (1, 207, 954)


@cache
def pictures(count: int) -> tuple[NDArray[np.uint8], ...]:
    """`count` pictures of different shapes: PACS photographs cut to size, or smooth generated ones."""
    generator = np.random.default_rng(7)
    files = sorted((PACS_ROOT / "photo" / "dog").glob("*.jpg"))[:count] if PACS_ROOT.is_dir() else []
    found = []
    for k in range(count):
        height, width = 40 + 3 * (k % 5), 48 - 2 * (k % 7)
        small = Image.fromarray(generator.integers(0, 256, (5, 6, 3), dtype=np.uint8))
        picture = Image.open(files[k]).convert("RGB") if k < len(files) else small
        found.append(np.asarray(picture.resize((width, height), Image.Resampling.BICUBIC)))
    return tuple(found)


def thumbnails(count: int, *, side: int = 32, seed: int = 0) -> NDArray[np.uint8]:
    """Random images (count, side, side, 3)."""
    return np.random.default_rng(seed).integers(0, 256, (count, side, side, 3), dtype=np.uint8)


def save(path: Path, picture: NDArray[np.uint8]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(picture).save(path)


def class_tree(folder: Path, classes: Sequence[str], *, per_class: int = 2, suffix: str = ".jpg") -> Path:
    """`<class>/<image>`: `per_class` pictures of each class."""
    images = pictures(len(classes) * per_class)
    for k, name in enumerate(classes):
        for i in range(per_class):
            save(folder / name / f"pic_{i:03d}{suffix}", images[k * per_class + i])
    return folder


def corrupted_arrays(folder: Path, corruptions: Sequence[str], *, images: int, classes: int = 10) -> NDArray[np.int64]:
    """`<corruption>.npy` with five blocks and `labels.npy`; pixel [0, 0] of an image tells severity and index."""
    folder.mkdir(parents=True, exist_ok=True)
    labels = np.random.default_rng(3).permutation(np.arange(images) % classes)
    for seed, corruption in enumerate(corruptions):
        array = thumbnails(5 * images, seed=seed)
        array[:, 0, 0, 0] = np.repeat(np.arange(1, 6), images)
        array[:, 0, 0, 1] = np.tile(np.arange(images) % 256, 5)
        np.save(folder / f"{corruption}.npy", array)
    np.save(folder / "labels.npy", np.tile(labels, 5))
    return labels.astype(np.int64)


@dataclass
class Seen(Progress):
    """A progress that remembers: each stage with its total, and how far each came."""

    stages: list[tuple[str, int | None]] = field(default_factory=list)
    steps: list[list[int]] = field(default_factory=list)
    finished: int = 0

    def start(self, total: int | None, what: str) -> None:
        self.stages.append((what, total))
        self.steps.append([])

    def advance(self, n: int = 1) -> None:
        self.steps[-1].append(n)

    def note(self, text: str) -> None:
        pass

    def finish(self) -> None:
        self.finished += 1
