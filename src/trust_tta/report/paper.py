"""Comparison of a group with the paper's tables, whose numbers are in published.toml under our names."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from statistics import fmean
from typing import Any, Literal

from trust_tta.report.model import ResultGroup, Variant, effective_options
from trust_tta.results.display import CORRUPTIONS
from trust_tta.schema import Schema, parse

# The shipped sample is CIFAR-10 corrupted as CIFAR-10-C is; CamVid replaces VOC at small scale (Table 7).
STAND_INS = {"sample": "cifar10-c", "camvid": "voc21"}
# Stands for the orders of highest entropy, which differ between networks: any explicit list matches.
HIGHEST = "highest"
PERCENT = ("accuracy", "miou")


class PublishedRow(Schema):
    """One row of a published table: its label in the paper, our method and options, and the numbers as printed."""

    label: str
    method: str
    values: tuple[float, ...]
    mean: float | None = None
    options: dict[str, Any] = {}


class PublishedTable(Schema):
    """A published table, or the bars of a figure."""

    place: str
    about: str
    columns: Literal["domain", "dataset", "value"]
    names: tuple[str, ...]
    rows: tuple[PublishedRow, ...]
    measure: Literal["accuracy", "miou", "relative_time"] = "accuracy"
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
    """The paper's tables, the domain of each single-domain data set, and the default options of their rows."""

    paper: str
    network: str
    targets: dict[str, str]
    settings: dict[str, dict[str, Any]]
    tables: tuple[PublishedTable, ...]


@cache
def load_published() -> Published:
    """The numbers of published.toml."""
    content = tomllib.loads(resources.files("trust_tta.report").joinpath("published.toml").read_text(encoding="utf-8"))
    names = content.pop("corruptions")  # of the columns where none are given
    tables = [{"names": names, **table} for table in content.pop("item")]
    return parse(Published, {**content, "tables": tables})


@dataclass(frozen=True)
class Pair:
    """One number of the paper, as a fraction, and ours."""

    name: str
    published: float
    ours: float

    @property
    def difference(self) -> float:
        return self.ours - self.published


@dataclass(frozen=True)
class ComparedRow:
    """A published row and ours; `mean` is over the shared columns."""

    label: str  # the paper's
    variant: Variant
    pairs: tuple[Pair, ...]
    mean: Pair


@dataclass(frozen=True)
class PaperComparison:
    """A published table and one of our groups."""

    table: PublishedTable
    rows: tuple[ComparedRow, ...]
    left_out: tuple[str, ...]  # columns of the paper that we did not run


def compare(group: ResultGroup) -> list[PaperComparison]:
    """The published tables comparable with a group; each adds a row to those before it."""
    kept: list[PaperComparison] = []
    seen = {"bn"}  # the baseline alone is no comparison
    dataset, experiment = STAND_INS.get(group.dataset, group.dataset), group.experiment.removesuffix("-small")
    for table in load_published().tables:
        data = dataset in table.names if table.columns == "dataset" else dataset == table.dataset
        same = table.setting == group.setting and table.experiment in (None, group.experiment, experiment)
        if not (data and same and group.severity in (None, 5) and table.measure in PERCENT):
            continue
        rows = [row for wanted in table.rows if (row := _compare_row(group, table, wanted, dataset)) is not None]
        found = {"bn" if row.variant.method == "bn" else row.variant.label for row in rows}
        if not found <= seen:
            shown = {pair.name for row in rows for pair in row.pairs}
            left_out = tuple(n for n in table.names if n not in shown) if table.columns == "domain" else ()
            kept.append(PaperComparison(table, tuple(rows), left_out))
            seen |= found
    return kept


def match_variant(group: ResultGroup, wanted: PublishedRow) -> Variant | None:
    """Our variant with the options of a published row, and the paper's defaults for the others, or None."""
    usual, named = load_published().settings.get(wanted.method, {}), wanted.options
    fits = []
    for variant in [variant for variant in group.variants if variant.method == wanted.method]:
        ours = effective_options(json.loads(variant.options))
        same = all(isinstance(ours.get(n), list) if v == HIGHEST else ours.get(n) == v for n, v in named.items())
        default = all(name in named or ours.get(name, value) == value for name, value in usual.items())
        if same and default and ("orders" in named or ours.get("orders") is None):
            fits.append(variant)
    doubtful = wanted.options.get("orders") == HIGHEST and len(fits) > 1
    return fits[0] if fits and not doubtful else None


def published_times(group: ResultGroup) -> Mapping[str, float]:
    """The paper's times relative to Tent, by the label of our variant."""
    rows = [row for table in load_published().tables if table.measure == "relative_time" for row in table.rows]
    matched = [(match_variant(group, row), row.values[0]) for row in rows]
    return {v.label: value for v, value in matched if v is not None and v.method != "tent"}


def _compare_row(group: ResultGroup, table: PublishedTable, wanted: PublishedRow, dataset: str) -> ComparedRow | None:
    """A published row and ours; the mean is the printed one if all columns are shared, else that of the shared ones."""
    variant = match_variant(group, wanted)
    if variant is None:
        return None
    means = {domain: group.entry(variant.label, domain).mean for domain in group.domains}
    ours = {domain: mean for domain, mean in means.items() if mean is not None}
    printed = {name: value / 100 for name, value in zip(table.names, wanted.values, strict=True)}
    if table.columns != "domain":  # one number stands for the whole data set
        number = printed["accuracy" if table.columns == "value" else dataset]
        target = load_published().targets.get(dataset)
        # The printed value is the mean over all 15 corruptions, so fewer are not comparable.
        whole = [target] if target else CORRUPTIONS if dataset.endswith("-c") else group.domains
        printed, ours = (
            {target or dataset: number},
            ({target or dataset: fmean(ours[domain] for domain in whole)} if set(whole) <= set(ours) else {}),
        )
    pairs = tuple(Pair(name, value, ours[name]) for name, value in printed.items() if name in ours)
    if not pairs:
        return None
    whole_row = len(pairs) == len(table.names) and wanted.mean is not None
    published = wanted.mean / 100 if whole_row and wanted.mean is not None else fmean(p.published for p in pairs)
    return ComparedRow(wanted.label, variant, pairs, Pair("mean", published, fmean(p.ours for p in pairs)))
