"""The numbers printed in the paper, under our names for data sets, domains and methods."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import resources
from typing import Any, Literal

from trust_tta.errors import DataError
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
    content = tomllib.loads(resources.files("trust_tta.report").joinpath("published.toml").read_text(encoding="utf-8"))
    names = content.pop("corruptions")  # of the columns where none are given
    tables = [{"names": names, **table} for table in content.pop("item")]
    return parse(Published, {**content, "tables": tables})
