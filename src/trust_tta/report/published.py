"""The numbers printed in the paper, under our names for data sets, domains and methods."""

from __future__ import annotations

import math
import tomllib
from functools import cache
from importlib import resources
from typing import Any, Literal

from pydantic import model_validator

from trust_tta.errors import ConfigError, DataError
from trust_tta.schema import Schema, parse

PERCENT = ("accuracy", "miou")


class PublishedRow(Schema):
    """One row of a published table: its label in the paper, our method and options, and the numbers as printed."""

    label: str
    method: str
    values: tuple[float, ...]
    mean: float | None = None
    options: dict[str, Any] = {}


class PublishedTable(Schema):
    """A published table, or the numbers of a figure; `columns` is the kind of its columns, `names` are their names."""

    place: str
    about: str
    columns: Literal["domain", "dataset", "batch_size", "k", "steps", "evaluate_order", "order", "value"]
    names: tuple[str | int, ...]
    rows: tuple[PublishedRow, ...]
    measure: Literal["accuracy", "miou", "entropy", "relative_time", "relative_memory", "milliseconds"] = "accuracy"
    dataset: str | None = None
    setting: str = "online"
    experiment: str | None = None  # the only one of ours that it is compared with; None: any
    note: str = ""

    def below_source(self) -> frozenset[str]:
        """The columns in which the paper's TRUST is below its source."""
        rows = {row.method: row.values for row in self.rows if not row.options}
        pairs = zip(self.names, rows.get("trust", ()), rows.get("bn", ()), strict=False)
        return frozenset(str(name) for name, trust, source in pairs if trust < source)

    @model_validator(mode="after")
    def _is_whole(self) -> PublishedTable:
        where, most = f"{self.place} ({self.dataset or 'all data sets'})", 100 if self.measure in PERCENT else math.inf
        labels = {row.label for row in self.rows}
        if len(set(self.names)) != len(self.names) or len(labels) != len(self.rows) or not self.rows:
            raise ValueError(f"{where} names a column or a row twice, or has no row; name each once")
        for row in self.rows:
            if len(row.values) != len(self.names):
                counts = f"{len(row.values)} values for {len(self.names)} columns"
                raise ValueError(f"{where}, row {row.label!r}, has {counts}; give one each")
            if not all(0 <= v <= most for v in (*row.values, row.mean or 0.0)):
                raise ValueError(f"{where}, row {row.label!r}, has a value outside 0 to {most:g}; check the paper")
        return self


class Published(Schema):
    """All numbers of the paper, the domain of each single-domain data set, and the default options of its rows."""

    paper: str
    network: str
    targets: dict[str, str]
    settings: dict[str, dict[str, Any]]
    tables: tuple[PublishedTable, ...]

    def find(self, place: str, dataset: str | None = None) -> PublishedTable:
        """The table at a place, of one data set where there are several."""
        for table in self.tables:
            if table.place == place and dataset in (None, table.dataset):
                return table
        raise DataError(f"nothing is published at {place!r} for {dataset!r}; see the places in published.toml")


@cache
def load_published() -> Published:
    """The shipped data file."""
    text = resources.files("trust_tta.report").joinpath("published.toml").read_text(encoding="utf-8")
    return parse_published(text)


def parse_published(text: str) -> Published:
    """Published numbers from TOML; anything that does not fit is refused with its place."""
    try:
        content = tomllib.loads(text)
        names = content.pop("corruptions")  # of the columns where none are given
        tables = [{"names": names, **table} for table in content.pop("item")]
        return parse(Published, {**content, "tables": tables})
    except (tomllib.TOMLDecodeError, KeyError, TypeError, ConfigError) as error:
        raise DataError(f"the file of published numbers cannot be read ({error}); restore published.toml") from error
