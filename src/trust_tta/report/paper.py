"""The numbers printed in the paper, under our names for data sets, domains and methods, and ours next to them."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from statistics import fmean
from typing import Any, Literal

from trust_tta.errors import DataError
from trust_tta.report.model import ResultGroup, Variant
from trust_tta.report.sweeps import batch_sizes, effective_options, option_sweeps
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
    """One published row and ours; `mean` is over the shared columns."""

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


@dataclass(frozen=True)
class SweepComparison:
    """A published curve and ours at the shared values of the option."""

    table: PublishedTable
    dataset: str
    method: str
    domains: int  # averaged in ours
    pairs: tuple[Pair, ...]


def compare(group: ResultGroup) -> list[PaperComparison]:
    """The published tables that this group can be compared with."""
    kept: list[PaperComparison] = []
    seen = {"bn"}  # the baseline alone is no comparison
    for table in load_published().tables:
        whole = table.columns in ("domain", "dataset", "value")
        found = _compare(group, table) if whole and _fits(group, table) else None
        if found is not None and any(_identity(row) not in seen for row in found.rows):
            kept.append(found)
            seen |= {_identity(row) for row in found.rows}
    return kept


def compare_sweeps(groups: Sequence[ResultGroup]) -> list[SweepComparison]:
    """Published curves over an option or the batch size, and ours."""
    found = []
    for table in load_published().tables:
        fitting = [group for group in groups if _fits(group, table)]
        for dataset, domains, variant, points in _curves(fitting, table.columns):
            for wanted in table.rows:
                both = [(n, v) for n, v in zip(table.names, wanted.values, strict=True) if n in points]
                if both and _matches(variant, wanted, free=table.columns):
                    pairs = tuple(Pair(str(n), v / 100, points[n]) for n, v in both)
                    found.append(SweepComparison(table, dataset, variant.method, domains, pairs))
    return found


def published_name(dataset: str) -> str:
    """The published data set that ours is compared with."""
    return STAND_INS.get(dataset, dataset)


def match_variant(group: ResultGroup, wanted: PublishedRow) -> Variant | None:
    """Our variant with the method and options of a published row; options that the paper does not name may differ."""
    fits = [variant for variant in group.variants if _matches(variant, wanted)]
    doubtful = wanted.options.get("orders") == HIGHEST and len(fits) > 1
    return fits[0] if fits and not doubtful else None


def published_times(group: ResultGroup) -> Mapping[str, float]:
    """The paper's times relative to Tent, by the label of our variant."""
    rows = [row for table in load_published().tables if table.measure == "relative_time" for row in table.rows]
    matched = [(match_variant(group, row), row.values[0]) for row in rows]
    return {v.label: value for v, value in matched if v is not None and v.method != "tent"}


def _identity(row: ComparedRow) -> str:
    return "bn" if row.variant.method == "bn" else row.variant.label


def _fits(group: ResultGroup, table: PublishedTable) -> bool:
    """Whether a published table has the data, experiment, severity and setting of a group."""
    name = published_name(group.dataset)
    data = name in table.names if table.columns == "dataset" else name == table.dataset
    experiment = table.experiment in (None, group.experiment, group.experiment.removesuffix("-small"))
    severity = group.severity in (None, 5)
    return data and experiment and severity and table.setting == group.setting and table.measure in PERCENT


def _curves(groups: Sequence[ResultGroup], option: str) -> Iterator[tuple[str, int, Variant, Mapping[Any, float]]]:
    """Data set, number of domains, variant and points of each curve over the batch size or an option."""
    if option == "batch_size":
        for family in batch_sizes(groups):
            for series in family.series:
                yield family.dataset, family.domains, series.variant, {p.x: p.y for p in series.points}
        return
    for group in groups:
        for sweep in option_sweeps(group):
            if sweep.option == option and all(isinstance(x, str | int | float) for x in sweep.values):
                points = {x: point.y for x, point in zip(sweep.values, sweep.series.points, strict=True)}
                yield group.dataset, len(group.domains), sweep.variants[0], points


def _compare(group: ResultGroup, table: PublishedTable) -> PaperComparison | None:
    rows = []
    for wanted in table.rows:
        variant = match_variant(group, wanted)
        if variant is None:
            continue
        means = {domain: group.entry(variant.label, domain).mean for domain in group.domains}
        ours = {domain: mean for domain, mean in means.items() if mean is not None}
        pairs = _pairs(table, wanted, ours, group)
        if pairs:
            rows.append(ComparedRow(wanted.label, variant, pairs, _mean(table, wanted, pairs)))
    if not rows:
        return None
    shown = {pair.name for row in rows for pair in row.pairs}
    left_out = tuple(str(n) for n in table.names if n not in shown) if table.columns == "domain" else ()
    return PaperComparison(table, tuple(rows), left_out)


def _pairs(
    table: PublishedTable, wanted: PublishedRow, ours: Mapping[str, float], group: ResultGroup
) -> tuple[Pair, ...]:
    printed = dict(zip(map(str, table.names), wanted.values, strict=True))
    if table.columns == "domain":
        return tuple(Pair(n, v / 100, ours[n]) for n, v in printed.items() if n in ours)
    name = published_name(group.dataset)
    number = printed["accuracy" if table.columns == "value" else name] / 100
    target = load_published().targets.get(name)
    if target is not None:
        return (Pair(target, number, ours[target]),) if target in ours else ()
    # The printed value is the mean over all 15 corruptions, so fewer are not comparable.
    whole = CORRUPTIONS if name.endswith("-c") else group.domains
    if not set(whole) <= set(ours):
        return ()
    return (Pair(name, number, fmean(ours[domain] for domain in whole)),)


def _mean(table: PublishedTable, wanted: PublishedRow, pairs: Sequence[Pair]) -> Pair:
    """The printed mean if all columns are shared, else the mean of the shared ones."""
    whole = len(pairs) == len(table.names) and wanted.mean is not None
    published = wanted.mean / 100 if whole and wanted.mean is not None else fmean(p.published for p in pairs)
    return Pair("mean", published, fmean(p.ours for p in pairs))


def _matches(variant: Variant, wanted: PublishedRow, *, free: str = "") -> bool:
    """Whether a line of ours has the method and options of a published one; the option `free` may be any.

    What the published row names must be ours; what it leaves at its usual value may not be another here.
    """
    ours = {n: v for n, v in effective_options(json.loads(variant.options)).items() if n != free}
    usual, named = load_published().settings.get(wanted.method, {}), wanted.options
    if variant.method != wanted.method or ("orders" not in named and ours.get("orders") is not None):
        return False
    if any(not (isinstance(ours.get(n), list) if v == HIGHEST else ours.get(n) == v) for n, v in named.items()):
        return False
    return all(name in named or ours.get(name, value) == value for name, value in usual.items())
