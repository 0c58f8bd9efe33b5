"""The numbers that the paper prints, each with its place, under our names for data sets, domains and methods."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

from trust_tta.errors import DataError

COLUMNS = ("domain", "dataset", "batch_size", "k", "steps", "evaluate_order", "order", "value")
PERCENT = ("accuracy", "miou")
MEASURES = (*PERCENT, "entropy", "relative_time", "relative_memory", "milliseconds")


@dataclass(frozen=True)
class PublishedRow:
    """One line of a published table: the paper's words for it, our method and options, and its numbers as printed."""

    label: str
    method: str
    values: tuple[float, ...]
    mean: float | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Item:
    """A published table, or the numbers of a figure: `names` are those of its columns, which are of kind `columns`."""

    place: str
    about: str
    columns: str
    names: tuple[str | int, ...]
    rows: tuple[PublishedRow, ...]
    measure: str = "accuracy"
    dataset: str | None = None
    setting: str = "online"
    experiment: str | None = None  # the only one of ours that it is compared with; None: any
    note: str = ""

    def below_source(self) -> frozenset[str]:
        """The columns in which the paper's TRUST does worse than its source."""
        rows = {row.method: row.values for row in self.rows if not row.options}
        pairs = zip(self.names, rows.get("trust", ()), rows.get("bn", ()), strict=False)
        return frozenset(str(name) for name, trust, source in pairs if trust < source)


@dataclass(frozen=True)
class Published:
    """All that the paper gives, with the domains that stand for whole data sets and the options behind plain rows."""

    paper: str
    network: str
    targets: Mapping[str, str]
    settings: Mapping[str, Mapping[str, Any]]
    items: tuple[Item, ...]

    def find(self, place: str, dataset: str | None = None) -> Item:
        """The item at a place, of one data set where there are several."""
        for item in self.items:
            if item.place == place and dataset in (None, item.dataset):
                return item
        raise DataError(f"nothing is published at {place!r} for {dataset!r}; see the items' places")


@cache
def load_published() -> Published:
    """The shipped data file."""
    text = resources.files("trust_tta.report").joinpath("published.toml").read_text(encoding="utf-8")
    return parse_published(text)


def parse_published(text: str) -> Published:
    """Published numbers from TOML; anything that does not fit is refused with its place."""
    try:
        content = tomllib.loads(text)
        corruptions = tuple(content["corruptions"])
        items = tuple(_item(entry, corruptions) for entry in content["item"])
        return Published(content["paper"], content["network"], content["targets"], content["settings"], items)
    except (tomllib.TOMLDecodeError, KeyError, TypeError) as error:
        raise DataError(f"the file of published numbers cannot be read ({error!r}); restore published.toml") from error


def _item(entry: Mapping[str, Any], corruptions: tuple[str, ...]) -> Item:
    values = dict(entry)
    names = tuple(values.pop("names", corruptions))
    rows = tuple(_row(row) for row in values.pop("rows"))
    item = Item(names=names, rows=rows, **values)
    where = f"published {item.place} ({item.dataset or 'all data sets'})"
    if item.columns not in COLUMNS or item.measure not in MEASURES:
        raise DataError(f"{where} has columns {item.columns!r}, measure {item.measure!r}; see COLUMNS and MEASURES")
    if len(set(names)) != len(names) or len({row.label for row in rows}) != len(rows) or not rows:
        raise DataError(f"{where} names a column or a row twice, or has no row; name each once")
    for row in rows:
        if len(row.values) != len(names):
            raise DataError(f"{where}, row {row.label!r}, has {len(row.values)} values for {len(names)} columns")
        most = 100.0 if item.measure in PERCENT else math.inf
        if not all(0 <= v <= most for v in (*row.values, row.mean or 0.0)):
            raise DataError(f"{where}, row {row.label!r}, has a value outside 0 to {most:g}; check the paper")
    return item


def _row(entry: Mapping[str, Any]) -> PublishedRow:
    values = dict(entry)
    numbers = tuple(float(v) for v in values.pop("values"))
    return PublishedRow(values=numbers, **values)
