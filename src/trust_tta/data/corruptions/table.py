"""The 19 corruptions and their severities, as CIFAR-10-C and ImageNet-C were made (Hendrycks & Dietterich, 2019)."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

from trust_tta.config_io import read_asset
from trust_tta.errors import ConfigError

Level: TypeAlias = tuple[float, ...]
Levels: TypeAlias = tuple[Level, Level, Level, Level, Level]

SEVERITIES = (1, 2, 3, 4, 5)
TABLES = ("cifar", "imagenet")
SMALL_SIDE = 32  # the largest side for which the CIFAR table is the default

_ELASTIC_SIDE = 244 / 224  # ImageNet-C was made with a side of 244 for its 224-pixel images


def _read_levels(table: str, *, elastic_side: float = 1) -> Mapping[str, Levels]:
    stored = tomllib.loads(read_asset("corruptions.toml"))[table]
    levels: dict[str, Any] = {name: tuple(map(tuple, rows)) for name, rows in stored.items()}
    levels["elastic_transform"] = tuple(tuple(elastic_side * f for f in row) for row in levels["elastic_transform"])
    return MappingProxyType(levels)


CIFAR_LEVELS = _read_levels("cifar")
IMAGENET_LEVELS = _read_levels("imagenet", elastic_side=_ELASTIC_SIDE)
ALL_CORRUPTIONS = tuple(CIFAR_LEVELS)
CORRUPTIONS, EXTRA_CORRUPTIONS = ALL_CORRUPTIONS[:15], ALL_CORRUPTIONS[15:]  # those of benchmarks, and those held out


def choose_table(table: str | None, *, height: int, width: int) -> str:
    """The named table, or without a name the one that fits the image size."""
    if table is None:
        return "cifar" if max(height, width) <= SMALL_SIDE else "imagenet"
    if table not in TABLES:
        raise ConfigError(f"unknown severity table {table!r}; give 'cifar', 'imagenet' or None to go by the image size")
    return table


def level_of(corruption: str, severity: int, table: str) -> Level:
    """The parameters of one corruption at one severity."""
    levels = CIFAR_LEVELS if table == "cifar" else IMAGENET_LEVELS
    return levels[corruption][severity - 1]
