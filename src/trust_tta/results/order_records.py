"""Analyses of scan orders (entropy, loss, norms, memory), one per JSON file."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from trust_tta.atomic import write_whole
from trust_tta.config_io import parse_json, read_text
from trust_tta.errors import DataError
from trust_tta.results.codec import from_json, to_json


@dataclass(frozen=True, kw_only=True)
class EntropyByOrder:
    """Mean prediction entropy in nats of each traversal order on one data set."""

    title: str
    orders: tuple[str, ...]  # letters
    entropy: tuple[float, ...]
    k: int = 6  # number of orders used: those of lowest entropy

    def __post_init__(self) -> None:
        _same_length(self.title, orders=self.orders, entropy=self.entropy)


@dataclass(frozen=True, kw_only=True)
class SurfacePoint:
    """A network on a loss surface and its loss."""

    name: str
    x: float
    y: float
    loss: float = math.nan


@dataclass(frozen=True, kw_only=True)
class LossSurface:
    """The loss on the plane through three networks: `loss[i][j]` is at (x[j], y[i])."""

    title: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    loss: tuple[tuple[float, ...], ...]
    adapted: tuple[SurfacePoint, ...]
    mean: SurfacePoint

    def __post_init__(self) -> None:
        if len(self.loss) != len(self.y) or any(len(line) != len(self.x) for line in self.loss):
            raise DataError(f"the loss surface {self.title!r} is not {len(self.y)} by {len(self.x)}; give loss[y][x]")


@dataclass(frozen=True, kw_only=True)
class WeightNorms:
    """For each adapted tensor: L2 norm averaged over orders, and mean deviation of its elements over orders."""

    title: str
    names: tuple[str, ...]
    mean: tuple[float, ...]
    deviation: tuple[float, ...]

    def __post_init__(self) -> None:
        _same_length(self.title, names=self.names, mean=self.mean, deviation=self.deviation)


@dataclass(frozen=True, kw_only=True)
class MemoryByK:
    """Peak memory in bytes by number of orders, and of the network alone."""

    title: str
    k: tuple[int, ...]
    peak: tuple[int, ...]
    baseline: int

    def __post_init__(self) -> None:
        _same_length(self.title, k=self.k, peak=self.peak)


OrderRecord: TypeAlias = EntropyByOrder | LossSurface | WeightNorms | MemoryByK
KINDS: tuple[type[OrderRecord], ...] = (EntropyByOrder, LossSurface, WeightNorms, MemoryByK)


def write_record(record: OrderRecord, path: Path) -> None:
    """Write one record atomically; missing folders are created."""
    write_whole(path, to_json(record) + "\n")


def read_records(paths: Iterable[str | os.PathLike[str]]) -> list[OrderRecord]:
    """The records in the given files, and in the `.json` files of the given folders."""
    files: list[Path] = []
    for path in map(Path, paths):
        files += sorted(path.glob("*.json")) if path.is_dir() else [path]
    return [_read(file) for file in files]


def _read(file: Path) -> OrderRecord:
    text = read_text(file, error=DataError)
    envelope = parse_json(text, where=f"'{file}'", error=DataError)
    named = envelope.get("kind") if isinstance(envelope, dict) else None
    kind = next((kind for kind in KINDS if kind.__name__ == named), None)
    if kind is None:
        known = ", ".join(k.__name__ for k in KINDS)
        raise DataError(f"'{file}' holds a record of kind {named!r}; `trust-tta analyse` writes {known}")
    record: OrderRecord = from_json(kind, text)
    return record


def _same_length(title: str, **columns: tuple[object, ...]) -> None:
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise DataError(f"the columns of the record {title!r} have lengths {lengths}; give one entry each")
