"""The order in which methods, corruptions and data sets are always shown."""

from __future__ import annotations

from typing import TypeAlias

from trust_tta.results.record import CellKey

METHODS = (
    "source", "bn", "tent", "eta", "sar", "shot", "lame", "foa",
    "trust_naive", "trust", "ensemble", "repetition", "augmentation",
)  # fmt: skip
CORRUPTIONS = (
    "gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur", "glass_blur", "motion_blur", "zoom_blur",
    "snow", "frost", "fog", "brightness", "contrast", "elastic_transform", "pixelate", "jpeg_compression",
)  # fmt: skip
HELD_OUT = ("speckle_noise", "gaussian_blur", "spatter", "saturate")
DATASETS = ("cifar10-c", "cifar100-c", "imagenet-c", "imagenet-sketch", "imagenet-v2", "imagenet-r", "pacs")

_KNOWN = {"method": METHODS, "domain": ("clean", *CORRUPTIONS, *HELD_OUT), "dataset": DATASETS}

Rank: TypeAlias = tuple[int, float, str]


def rank(field: str, value: object) -> Rank:
    """A sort key: known names first in their fixed order, then numbers by size, then words by alphabet, None last."""
    known = _KNOWN.get(field, ())
    if value in known:
        return 0, known.index(str(value)), ""
    if isinstance(value, int | float):
        return 1, float(value), ""
    return (3, 0.0, "") if value is None else (2, 0.0, str(value))


def key_rank(key: CellKey) -> tuple[Rank | str, ...]:
    """A total order on cells that does not depend on when they ran."""
    names = ("experiment", "dataset", "setting", "severity", "domain", "method", "options", "batch_size", "seed")
    return (*(rank(name, getattr(key, name)) for name in names), key.digest)
