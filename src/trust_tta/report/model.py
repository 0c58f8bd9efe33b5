"""The content of a report: groups of runs with the same experiment, data set, setting, severity and batch size."""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, TypeAlias

from trust_tta.errors import ConfigError
from trust_tta.orders import PAPER_ORDERS, ScanOrder
from trust_tta.report.text import safe_line
from trust_tta.results import Cell, CellKey, Counts, Failure, PlannedCell, ResultStore
from trust_tta.results.display import BASELINES, sort_key
from trust_tta.results.order_records import EntropyByOrder
from trust_tta.schema import did_you_mean

Place: TypeAlias = tuple[str, str]  # the label of a variant and a domain

_TITLE_FIELDS = ("experiment", "dataset", "setting", "severity", "batch_size", "limit")
# Fields by which a group is split if its runs cannot share one table.
_SPLIT_FIELDS = ("checkpoint", "fingerprint", "severity", "method", "options")


@dataclass(frozen=True)
class Aggregate:
    """Mean over `n` seeds; None if a value is missing."""

    mean: float | None = None
    std: float | None = None  # over seeds, None below two
    half_width: float | None = None  # of the 95 % t-interval of the mean
    n: int = 0


def aggregate(values: Sequence[float]) -> Aggregate:
    """Mean, standard deviation and 95 % t-interval over seeds."""
    n = len(values)
    if n == 0:
        return Aggregate()
    mean = math.fsum(values) / n
    if n == 1:
        return Aggregate(mean, n=1)
    from scipy import special

    std = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1))
    return Aggregate(mean, std, float(special.stdtrit(n - 1, 0.975)) * std / math.sqrt(n), n)


def finite_mean(values: Iterable[float]) -> float:
    """The mean of the finite values; NaN without any."""
    finite = [v for v in values if math.isfinite(v)]
    return math.fsum(finite) / len(finite) if finite else math.nan


@dataclass(frozen=True)
class Variant:
    """A method with its options, as distinguished in a group: one row of a table."""

    index: int  # in its group
    label: str
    method: str
    number: int = 0  # among the variants of its method
    options: str = "{}"

    @property
    def name(self) -> str:
        return safe_line(self.label)


@dataclass(frozen=True)
class Cost:
    """Accuracy and cost of a variant: passes and updates per batch, milliseconds per image (None: unknown)."""

    variant: Variant
    accuracy: float
    updates: float
    forwards: float
    backwards: float
    milliseconds: float | None

    @property
    def passes(self) -> float:
        return self.forwards + self.backwards


AnyCell: TypeAlias = Cell | Failure | PlannedCell


@dataclass(frozen=True)
class ResultGroup:
    """Runs that differ only in method, options, domain and seed; `distinction` separates groups of equal title."""

    experiment: str
    dataset: str
    setting: str
    severity: int | None
    batch_size: int
    limit: int | None
    cells: tuple[Cell, ...]
    failures: tuple[Failure, ...] = ()
    pending: tuple[PlannedCell, ...] = ()
    distinction: str = ""
    _means: dict[tuple[str, str], Aggregate] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def title(self) -> str:
        """ "cifar10-c, online, severity 5, batch 128"."""
        words = [self.dataset, self.setting]
        words += [f"severity {self.severity}"] if self.severity is not None else []
        words += [f"batch {self.batch_size}"]
        words += [f"at most {self.limit} images"] if self.limit is not None else []
        return safe_line(", ".join([*words, *([self.distinction] if self.distinction else [])]))

    @property
    def heading(self) -> str:
        return f"{safe_line(self.experiment)}: {self.title}"

    @property
    def scope(self) -> str:
        """ "mean over all 4 domains"."""
        n = len(self.domains)
        return f"mean over all {n} domains" if n > 1 else "on the only domain"

    @property
    def resets(self) -> bool:
        return bool({"online", "standard"} & set(self.setting.split("+")))

    @property
    def is_segmentation(self) -> bool:
        return any(cell.result.pixels is not None for cell in self.cells)

    @property
    def measure(self) -> str:
        return "mean IoU" if self.is_segmentation else "accuracy"

    @property
    def seeds(self) -> list[int]:
        return sorted({cell.key.seed for cell in self.cells})

    @cached_property
    def variants(self) -> tuple[Variant, ...]:
        """The variants in display order, also those without a finished run."""
        items: list[AnyCell] = [*self.cells, *self.failures, *self.pending]
        first = {item.label: item.key for item in reversed(items)}
        found: list[Variant] = []

        def order(label: str) -> tuple[object, ...]:
            """By method, a variant without options in its label first, then by options."""
            options = [sort_key(name, value) for name, value in sorted(first[label].option_values.items())]
            return sort_key("method", first[label].method), label != first[label].method, options, label

        for label in sorted(first, key=order):
            method = first[label].method
            number = sum(variant.method == method for variant in found)
            found.append(Variant(len(found), label, method, number, first[label].options))
        return tuple(found)

    @cached_property
    def domains(self) -> tuple[str, ...]:
        items: list[AnyCell] = [*self.cells, *self.failures, *self.pending]
        return tuple(sorted({item.key.domain for item in items}, key=lambda name: (sort_key("domain", name), name)))

    @cached_property
    def at(self) -> dict[Place, list[Cell]]:
        """The finished runs by label and domain."""
        found: dict[Place, list[Cell]] = defaultdict(list)
        for cell in self.cells:
            found[cell.label, cell.key.domain].append(cell)
        return dict(found)

    def cells_of(self, label: str) -> list[Cell]:
        return [cell for domain in self.domains for cell in self.at.get((label, domain), [])]

    def seeds_of(self, label: str, domain: str, value: str = "accuracy") -> dict[int, float]:
        """A value of a variant on one domain by seed; NaN is left out."""
        found = {cell.key.seed: getattr(cell.result, value) for cell in self.at.get((label, domain), [])}
        return {seed: float(x) for seed, x in sorted(found.items()) if x is not None and not math.isnan(x)}

    def seed_means(self, label: str, value: str = "accuracy") -> dict[int, float]:
        """The mean over domains by seed, for seeds that have all domains."""
        found = [self.seeds_of(label, domain, value) for domain in self.domains]
        shared = sorted(set.intersection(*map(set, found))) if found else []
        return {seed: math.fsum(numbers[seed] for numbers in found) / len(found) for seed in shared}

    def entry(self, label: str, domain: str) -> Aggregate:
        """The accuracy of a variant on a domain; empty if no run has finished."""
        return aggregate([*self.seeds_of(label, domain).values()])

    def mean(self, label: str, value: str = "accuracy") -> Aggregate:
        """The mean of a variant over all domains; empty if one is missing, no interval if seeds differ."""
        if (label, value) not in self._means:
            seeds = [self.seeds_of(label, domain, value) for domain in self.domains]
            found = Aggregate()
            if seeds and all(seeds) and all(numbers.keys() == seeds[0].keys() for numbers in seeds):
                found = aggregate([*self.seed_means(label, value).values()])
            elif seeds and all(seeds):
                means = [math.fsum(numbers.values()) / len(numbers) for numbers in seeds]
                found = Aggregate(math.fsum(means) / len(means), n=min(map(len, seeds)))
            self._means[label, value] = found
        return self._means[label, value]

    def means(self, value: str = "accuracy") -> dict[str, float]:
        """The means over all domains by label, for variants that have finished all."""
        found = {variant.label: self.mean(variant.label, value).mean for variant in self.variants}
        return {label: mean for label, mean in found.items() if mean is not None}

    def variant(self, method: str) -> Variant | None:
        """The first variant of a method, or None."""
        return next((variant for variant in self.variants if variant.method == method), None)

    @cached_property
    def baselines(self) -> tuple[Variant, ...]:
        return tuple(variant for method in BASELINES if (variant := self.variant(method)) is not None)

    @cached_property
    def costs(self) -> tuple[Cost, ...]:
        """Accuracy and cost of each variant that has finished all domains."""
        found = []
        for variant in self.variants:
            accuracy, cells = self.mean(variant.label).mean, self.cells_of(variant.label)
            if accuracy is None:
                continue
            batches = sum(cell.batches for cell in cells)
            updates, forwards, backwards = (
                sum(getattr(cell.result, name) for cell in cells) / batches
                for name in ("updates", "forwards", "backwards")
            )
            timed = [c for c in cells if math.isfinite(c.result.seconds_median) and c.result.samples]
            images = sum(c.result.samples for c in timed)
            seconds = sum(c.result.seconds_median * c.batches for c in timed)  # not slowed by a first batch
            milliseconds = 1000 * seconds / images if images and seconds > 0 else None
            found.append(Cost(variant, accuracy, updates, forwards, backwards, milliseconds))
        return tuple(found)


@dataclass(frozen=True)
class Report:
    """The content of a store, and rankings of scan orders."""

    groups: tuple[ResultGroup, ...]
    counts: Counts
    pictures: Mapping[tuple[str, int], bytes] = field(default_factory=dict)  # by fingerprint and index
    class_names: Mapping[str, Sequence[str]] = field(default_factory=dict)  # by data set
    order_records: tuple[EntropyByOrder, ...] = ()

    @cached_property
    def cells(self) -> tuple[Cell, ...]:
        """Every finished run once; a clean domain may be in several groups."""
        return tuple({cell.key: cell for group in self.groups for cell in group.cells}.values())

    @property
    def dates(self) -> tuple[str, str] | None:
        """Start of the first run and end of the last, in UTC as ISO 8601."""
        if not self.cells:
            return None
        return min(cell.provenance.started for cell in self.cells), max(cell.provenance.finished for cell in self.cells)

    @property
    def seconds(self) -> float:
        times = [cell.result.seconds_total for cell in self.cells]
        return math.fsum(t for t in times if math.isfinite(t))


def read_report(
    path: str | os.PathLike[str],
    *,
    order_records: Iterable[EntropyByOrder] = (),
    only: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> Report:
    """Read a store without changing it.

    `only` selects runs: values allowed for fields of their key; a method may also be selected by its label.
    """
    with ResultStore(path, create=False) as store:
        items: list[AnyCell] = [*store.results(), *store.failures(), *store.planned()]
        pictures, class_names = store.pictures(), store.class_names()
    selected = _select(items, only)
    planned = [item.running for item in selected if isinstance(item, PlannedCell)]
    counts = Counts(
        done=sum(isinstance(item, Cell) for item in selected),
        failed=sum(isinstance(item, Failure) for item in selected),
        running=sum(planned),
        pending=len(planned) - sum(planned),
    )
    return Report(tuple(make_groups(selected)), counts, pictures, class_names, tuple(order_records))


def _select(items: Sequence[AnyCell], only: Mapping[str, Sequence[str]]) -> list[AnyCell]:
    """The items with the given values of their fields; unknown values are refused."""
    selected = list(items)
    for field_name, wanted in only.items():
        values = {id(item): {str(getattr(item.key, field_name))} for item in items}
        if field_name == "method":
            values = {id(item): {item.key.method, item.label} for item in items}
        known = sorted(set().union(*values.values()))
        for value in wanted:
            if value not in known:
                raise ConfigError(f"the store has no {field_name} '{value}'; {did_you_mean(value, known)}")
        selected = [item for item in selected if not values[id(item)].isdisjoint(wanted)]
    if items and not selected:
        chosen = "; ".join(f"{name} {', '.join(wanted)}" for name, wanted in only.items())
        raise ConfigError(f"the store has no run with {chosen}; drop a filter")
    return selected


def make_groups(items: Sequence[AnyCell]) -> list[ResultGroup]:
    """Groups of runs that fit into one table each, in display order."""
    bins: dict[tuple[Any, ...], list[AnyCell]] = defaultdict(list)
    for item in items:
        graded = not {"gradual", "sequence"}.isdisjoint(item.key.setting.split("+"))  # severities along the stream
        values = [None if n == "severity" and graded else getattr(item.key, n) for n in _TITLE_FIELDS]
        bins[tuple(values)].append(item)
    at = _TITLE_FIELDS.index("severity")
    for clean in [values for values in bins if values[at] is None]:
        same = [v for v in bins if v[at] is not None and v[:at] + v[at + 1 :] == clean[:at] + clean[at + 1 :]]
        for corrupted in same:  # clean images have no severity: they belong to the stream of each
            bins[corrupted] += bins[clean]
        if same:
            del bins[clean]
    order = sorted(bins, key=lambda values: [sort_key(n, v) for n, v in zip(_TITLE_FIELDS, values, strict=True)])
    return [
        ResultGroup(
            **dict(zip(_TITLE_FIELDS, values, strict=True)),
            cells=tuple(item for item in part if isinstance(item, Cell)),
            failures=tuple(item for item in part if isinstance(item, Failure)),
            pending=tuple(item for item in part if isinstance(item, PlannedCell)),
            distinction=distinction,
        )
        for values in order
        for distinction, part in _split(_distinguish_labels(bins[values]), _SPLIT_FIELDS)
    ]


def effective_options(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Options with the number of `orders` as `k`, and without `orders` if they continue the paper's list."""
    listed = values.get("orders")
    if not isinstance(listed, list):
        return values
    try:
        orders = [ScanOrder(order) for order in listed]
    except ConfigError:  # a store of another program
        return values
    continues = orders[: len(PAPER_ORDERS)] == list(PAPER_ORDERS[: len(orders)])
    return {**values, "k": len(orders), "orders": None if continues else [str(order) for order in orders]}


def _distinguish_labels(items: Sequence[AnyCell]) -> list[AnyCell]:
    """Add the differing options to a label that stands for several sets of options."""
    options: dict[str, set[str]] = defaultdict(set)
    for item in items:
        options[item.label].add(item.key.options)
    named: list[AnyCell] = []
    for item in items:
        values, others = item.key.option_values, [json.loads(text) for text in options[item.label]]
        varied = sorted({n for other in others for n in {*other, *values} if other.get(n, ...) != values.get(n, ...)})
        shown = ", ".join(f"{n}={values[n]}" if n in values else f"no {n}" for n in varied)
        named.append(replace(item, label=f"{item.label} ({shown})") if shown else item)
    return named


def _split(
    items: Sequence[AnyCell], fields: Sequence[str], distinction: str = ""
) -> list[tuple[str, Sequence[AnyCell]]]:
    """Split runs by `fields` until each table entry has one run per seed; returns distinctions and runs."""
    entries: dict[Place, list[CellKey]] = defaultdict(list)
    for item in items:
        if isinstance(item, Cell):
            entries[item.label, item.key.domain].append(item.key)
    fits = all(
        len({key.seed for key in same}) == len(same)
        and all(len({getattr(key, name) for key in same}) == 1 for name in _SPLIT_FIELDS if name != "fingerprint")
        for same in entries.values()
    )
    if fits or not fields:
        return [(distinction, items)]
    name, *rest = fields
    parts: dict[str, list[AnyCell]] = defaultdict(list)
    for item in items:
        parts[str(getattr(item.key, name))].append(item)
    if len(parts) == 1:
        return _split(items, rest, distinction)
    return [
        part
        for value in sorted(parts)
        for part in _split(parts[value], rest, f"{distinction}, {name} {value[:12]}".removeprefix(", "))
    ]
