"""The entropy of scan orders as JSON files, which `trust-tta rank` writes and `trust-tta report` shows."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from trust_tta.atomic import write_whole
from trust_tta.config_io import read_text
from trust_tta.errors import DataError
from trust_tta.results.codec import from_json, to_json


@dataclass(frozen=True, kw_only=True)
class EntropyByOrder:
    """Mean prediction entropy in nats of each traversal order on one data set."""

    title: str
    orders: tuple[str, ...]  # letters
    entropy: tuple[float, ...]
    k: int = 6  # number of orders used: those of lowest entropy

    @property
    def by_order(self) -> dict[str, float]:
        return dict(zip(self.orders, self.entropy, strict=True))

    def __post_init__(self) -> None:
        if len(self.orders) != len(self.entropy):
            lengths = f"{len(self.orders)} orders and {len(self.entropy)} entropies"
            raise DataError(f"the record {self.title!r} has {lengths}; give one entropy per order")


def write_record(record: EntropyByOrder, path: Path) -> None:
    """Write one record atomically; missing folders are created."""
    write_whole(path, to_json(record) + "\n")


def read_records(paths: Iterable[str | os.PathLike[str]]) -> list[EntropyByOrder]:
    """The records in the given files, and in the `.json` files of the given folders."""
    files: list[Path] = []
    for path in map(Path, paths):
        files += sorted(path.glob("*.json")) if path.is_dir() else [path]
    records = []
    for file in files:
        text = read_text(file, error=DataError)
        try:
            records.append(from_json(EntropyByOrder, text))
        except DataError as error:
            raise DataError(f"'{file}' was not written by `trust-tta rank`: {error}") from error
    return records
