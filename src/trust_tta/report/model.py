"""The content of a report, computed once from a store that is read once: groups, labels, means, costs.

A group holds the cells that may share one table: the same experiment, data, setting, severity and batch size.
"""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from trust_tta.errors import ConfigError, DataError
from trust_tta.report.text import safe_line, short_name
from trust_tta.report.theme import Style, style_of
from trust_tta.results import Aggregate, Cell, CellKey, Counts, Failure, ResultStore, Table, table
from trust_tta.results.display import BASELINES, rank
from trust_tta.results.order_records import OrderRecord

Place: TypeAlias = tuple[str, str]  # the label of a line and a domain

_TITLE_FIELDS = ("experiment", "dataset", "setting", "severity", "batch_size", "limit")
# What distinguishes cells that agree in all of the above and yet cannot share an entry.
_LAST_RESORTS = ("checkpoint", "fingerprint", "severity", "method", "options")


@dataclass(frozen=True)
class Variant:
    """One line of a group: a method with the options that set it apart from the group's other lines."""

    index: int  # among the lines of its group
    label: str
    method: str
    number: int = 0  # among the lines of its method
    options: str = "{}"

    @property
    def name(self) -> str:
        """The label as it is shown."""
        return safe_line(self.label)

    @property
    def style(self) -> Style:
        return style_of(self.method)

    def short(self, most: int = 18) -> str:
        """The name for a chart."""
        return short_name(self.label, most)


@dataclass(frozen=True)
class Cost:
    """Accuracy and cost of a line: passes and updates per batch, milliseconds per image (None: unknown)."""

    variant: Variant
    accuracy: float
    updates: float
    forwards: float
    backwards: float
    milliseconds: float | None

    @property
    def passes(self) -> float:
        return self.forwards + self.backwards


@dataclass(frozen=True)
class Planned:
    """A cell that is still to be run, or being run."""

    key: CellKey
    label: str


Item: TypeAlias = Cell | Failure | Planned


@dataclass(frozen=True)
class Group:
    """Cells that differ only in method, options, domain and seed; `apart` names what else distinguishes the group."""

    experiment: str
    dataset: str
    setting: str
    severity: int | None
    batch_size: int
    limit: int | None
    items: tuple[Item, ...]
    apart: str = ""

    @cached_property
    def cells(self) -> tuple[Cell, ...]:
        return tuple(item for item in self.items if isinstance(item, Cell))

    @cached_property
    def failures(self) -> tuple[Failure, ...]:
        return tuple(item for item in self.items if isinstance(item, Failure))

    @cached_property
    def absent(self) -> tuple[Planned, ...]:
        return tuple(item for item in self.items if isinstance(item, Planned))

    @property
    def title(self) -> str:
        """ "cifar10-c, online, severity 5, batch 128"."""
        words = [self.dataset, self.setting]
        words += [f"severity {self.severity}"] if self.severity is not None else []
        words += [f"batch {self.batch_size}"]
        words += [f"at most {self.limit} images"] if self.limit is not None else []
        return safe_line(", ".join([*words, *([self.apart] if self.apart else [])]))

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
        """Whether the network goes back to its source at each domain or batch."""
        return bool({"online", "standard"} & set(self.setting.split("+")))

    @property
    def is_segmentation(self) -> bool:
        """Whether pixels are labeled: accuracies are then means of the IoU over classes."""
        return any(cell.result.pixels is not None for cell in self.cells)

    @property
    def seeds(self) -> list[int]:
        return sorted({cell.key.seed for cell in self.cells})

    @cached_property
    def variants(self) -> tuple[Variant, ...]:
        """The lines in display order, also those without a finished cell."""
        first = {item.label: item.key for item in reversed(self.items)}
        found: list[Variant] = []
        for label in sorted(first, key=lambda name: (_label_rank(first[name], name), name)):
            method = first[label].method
            number = sum(variant.method == method for variant in found)
            found.append(Variant(len(found), label, method, number, first[label].options))
        return tuple(found)

    @cached_property
    def domains(self) -> tuple[str, ...]:
        """The columns in display order, also those without a finished cell."""
        return tuple(sorted({item.key.domain for item in self.items}, key=lambda name: (rank("domain", name), name)))

    @cached_property
    def at(self) -> dict[Place, list[Cell]]:
        """The finished cells of each (label, domain)."""
        found: dict[Place, list[Cell]] = defaultdict(list)
        for cell in self.cells:
            found[cell.label, cell.key.domain].append(cell)
        return dict(found)

    def cells_of(self, label: str) -> list[Cell]:
        """The finished cells of one line."""
        return [cell for domain in self.domains for cell in self.at.get((label, domain), [])]

    def table(self, value: str = "accuracy") -> Table:
        """Lines by domains, seeds gathered; has only what is finished."""
        if value not in self._tables:
            self._tables[value] = table(self.cells, value=value)
        return self._tables[value]

    @cached_property
    def _tables(self) -> dict[str, Table]:
        return {}

    def entry(self, label: str, domain: str) -> Aggregate:
        """A line on a domain; empty where nothing is finished."""
        pivot = self.table()
        return pivot.cell(label, domain) if label in pivot.rows and domain in pivot.columns else Aggregate()

    def mean(self, label: str, value: str = "accuracy") -> Aggregate:
        """A line over all domains of the group; empty where one is missing."""
        pivot = self.table(value)
        if label not in pivot.rows or set(pivot.columns) != set(self.domains):
            return Aggregate()
        return pivot.means[pivot.rows.index(label)]

    def means(self, value: str = "accuracy") -> dict[str, float]:
        """The mean over all domains of each complete line, by its label."""
        found = {variant.label: self.mean(variant.label, value).mean for variant in self.variants}
        return {label: mean for label, mean in found.items() if mean is not None}

    def variant(self, method: str) -> Variant | None:
        """The first line of a method, or None."""
        return next((variant for variant in self.variants if variant.method == method), None)

    @cached_property
    def baselines(self) -> tuple[Variant, ...]:
        """The lines that gains are measured against."""
        return tuple(variant for method in BASELINES if (variant := self.variant(method)) is not None)

    @cached_property
    def costs(self) -> tuple[Cost, ...]:
        """Accuracy and cost of each complete line."""
        reached = self.means()
        return tuple(
            _cost(variant, reached[variant.label], self.cells_of(variant.label))
            for variant in self.variants
            if variant.label in reached
        )


@dataclass(frozen=True)
class Report:
    """Everything that is shown of a store, and the records about scan orders given with it."""

    groups: tuple[Group, ...]
    counts: Counts
    pictures: Mapping[tuple[str, int], bytes] = field(default_factory=dict)  # by fingerprint and index
    class_names: Mapping[str, Sequence[str]] = field(default_factory=dict)  # by data set
    order_records: tuple[OrderRecord, ...] = ()

    @cached_property
    def cells(self) -> tuple[Cell, ...]:
        """Every finished cell once."""
        return tuple({cell.key: cell for group in self.groups for cell in group.cells}.values())

    @property
    def dates(self) -> tuple[str, str] | None:
        """When the first run began and the last ended: UTC, ISO 8601."""
        if not self.cells:
            return None
        return min(cell.provenance.started for cell in self.cells), max(cell.provenance.finished for cell in self.cells)

    @property
    def seconds(self) -> float:
        """The total time that all runs spent in their methods."""
        times = [cell.result.seconds_total for cell in self.cells]
        return math.fsum(t for t in times if math.isfinite(t))


def read_report(path: str | os.PathLike[str], *, order_records: Iterable[OrderRecord] = ()) -> Report:
    """Read a store once; the store is not changed."""
    if Path(path).exists() and not Path(path).is_file():  # opening a pipe would wait for a writer
        raise DataError(f"'{path}' is not a file; give the results store that a benchmark wrote")
    with ResultStore(path, create=False) as store:
        items: list[Item] = [*store.results(), *store.failures()]
        absent, labels = [*store.keys("pending"), *store.keys("running")], store.labels()
        counts, pictures, class_names = store.counts(), store.pictures(), store.class_names()
    groups = make_groups([*items, *(Planned(key, labels.get(key.digest, key.method)) for key in absent)])
    return Report(tuple(groups), counts, pictures, class_names, tuple(order_records))


def make_groups(items: Sequence[Item]) -> list[Group]:
    """Cut cells into groups whose tables mix nothing, in display order."""
    corrupted: dict[tuple[Any, ...], set[tuple[Any, ...]]] = defaultdict(set)
    for item in items:
        if item.key.severity is not None:
            corrupted[_without_severity(item.key)].add(_group_values(item.key))
    bins: dict[tuple[Any, ...], list[Item]] = defaultdict(list)
    for item in items:
        # Clean images have no severity: they belong to the stream of each severity that was run.
        streams = corrupted.get(_without_severity(item.key)) if item.key.severity is None else None
        for values in streams or {_group_values(item.key)}:
            bins[values].append(item)
    order = sorted(bins, key=lambda values: [rank(n, v) for n, v in zip(_TITLE_FIELDS, values, strict=True)])
    groups = [
        Group(**dict(zip(_TITLE_FIELDS, values, strict=True)), items=tuple(_name_apart(bins[values])))
        for values in order
    ]
    return [part for group in groups for part in _separate(group, _LAST_RESORTS)]


def _name_apart(items: Sequence[Item]) -> list[Item]:
    """The items with labels that differ where the options do: a store may be older than a method's new option."""
    options: dict[str, set[str]] = defaultdict(set)
    for item in items:
        options[item.label].add(item.key.options)
    named: list[Item] = []
    for item in items:
        values, others = item.key.option_values, [json.loads(text) for text in options[item.label]]
        varied = sorted({n for other in others for n in {*other, *values} if other.get(n, ...) != values.get(n, ...)})
        said = ", ".join(f"{n}={values[n]}" if n in values else f"no {n}" for n in varied)
        named.append(replace(item, label=f"{item.label} ({said})") if said else item)
    return named


def _separate(group: Group, fields: Sequence[str]) -> list[Group]:
    """The group itself, or its parts by the first fields that make each fit one table."""
    try:
        group.table()
    except ConfigError:
        if not fields:
            raise
    else:
        return [group]
    name, *rest = fields
    parts: dict[str, list[Item]] = defaultdict(list)
    for item in group.items:
        parts[str(getattr(item.key, name))].append(item)
    if len(parts) == 1:
        return _separate(group, rest)
    found = []
    for value in sorted(parts):
        apart = f"{group.apart}, {name} {value[:12]}".removeprefix(", ")
        found += _separate(replace(group, apart=apart, items=tuple(parts[value])), rest)
    return found


def _group_values(key: CellKey) -> tuple[Any, ...]:
    graded = not {"gradual", "sequence"}.isdisjoint(key.setting.split("+"))  # there the severity is part of the stream
    return tuple(None if name == "severity" and graded else getattr(key, name) for name in _TITLE_FIELDS)


def _without_severity(key: CellKey) -> tuple[Any, ...]:
    return tuple(getattr(key, name) for name in _TITLE_FIELDS if name != "severity")


def _label_rank(key: CellKey, label: str) -> tuple[object, ...]:
    """By method; a line with the plain name of its method comes first, then by options."""
    options = [rank(name, value) for name, value in sorted(key.option_values.items())]
    return rank("method", key.method), label != key.method, options


def _cost(variant: Variant, accuracy: float, cells: Sequence[Cell]) -> Cost:
    batches = sum(cell.batches for cell in cells)
    updates, forwards, backwards = (
        sum(getattr(cell.result, name) for cell in cells) / batches for name in ("updates", "forwards", "backwards")
    )
    return Cost(variant, accuracy, updates, forwards, backwards, _milliseconds(cells))


def _milliseconds(cells: Sequence[Cell]) -> float | None:
    """Median time of a batch spread over its images: a slow first batch does not count."""
    timed = [c for c in cells if math.isfinite(c.result.seconds_median) and c.result.samples]
    images = sum(c.result.samples for c in timed)
    seconds = sum(c.result.seconds_median * c.batches for c in timed)
    return 1000 * seconds / images if images and seconds > 0 else None
