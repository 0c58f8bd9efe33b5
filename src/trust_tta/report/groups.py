"""A store cut into groups that may share one table: the same experiment, data, setting, severity and batch size."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TypeAlias, cast

from trust_tta.errors import ConfigError, DataError
from trust_tta.report.labels import Labelling, row_labels, stated_methods
from trust_tta.results import Cell, CellKey, Counts, Failure, ResultStore, Table, table
from trust_tta.results.display import rank

Place: TypeAlias = tuple[str, str]

_TITLE_FIELDS = ("experiment", "dataset", "setting", "severity", "batch_size", "limit")
# What sets apart cells that agree in all of the above and yet cannot share an entry.
_LAST_RESORTS = ("checkpoint", "fingerprint", "severity", "method", "options")


@dataclass(frozen=True)
class Row:
    """One line of a group: a method, with the options that tell it from the group's other lines of that method."""

    label: str
    method: str
    variant: int  # 0 for the first line of its method
    options: str


@dataclass(frozen=True)
class Group:
    """Cells that differ only in method, options, domain and seed; `part` tells apart groups alike in the rest."""

    experiment: str
    dataset: str
    setting: str
    severity: int | None
    batch_size: int
    limit: int | None
    part: str
    cells: tuple[Cell, ...]
    failures: tuple[Failure, ...] = ()
    absent: tuple[CellKey, ...] = ()  # planned, or being run

    @property
    def title(self) -> str:
        """ "cifar10-c, online, severity 5, batch 128"."""
        words = [self.dataset, self.setting]
        words += [f"severity {self.severity}"] if self.severity is not None else []
        words += [f"batch {self.batch_size}"]
        words += [f"at most {self.limit} images"] if self.limit is not None else []
        return ", ".join([*words, *([self.part] if self.part else [])])

    @property
    def resets(self) -> bool:
        """Whether the network goes back to its source at each domain or batch."""
        return bool({"online", "standard"} & set(self.setting.split("+")))

    @cached_property
    def label(self) -> Labelling:
        """The row of each key."""
        return row_labels(self.keys, stated_methods({cell.facts.config for cell in self.cells}))

    @cached_property
    def keys(self) -> tuple[CellKey, ...]:
        """Every key: finished, failed and absent."""
        return (*(c.key for c in self.cells), *(f.key for f in self.failures), *self.absent)

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """The rows in display order, also those without a finished cell."""
        first = {self.label(key): key for key in reversed(self.keys)}
        rows: list[Row] = []
        for label in sorted(first, key=lambda name: (_row_rank(first[name], name), name)):
            key = first[label]
            rows.append(Row(label, key.method, sum(row.method == key.method for row in rows), key.options))
        return tuple(rows)

    @cached_property
    def domains(self) -> tuple[str, ...]:
        """The columns in display order, also those without a finished cell."""
        return tuple(sorted({key.domain for key in self.keys}, key=lambda name: (rank("domain", name), name)))

    @cached_property
    def at(self) -> dict[Place, list[Cell]]:
        """The finished cells of each (row label, domain)."""
        found: dict[Place, list[Cell]] = defaultdict(list)
        for cell in self.cells:
            found[self.label(cell.key), cell.key.domain].append(cell)
        return dict(found)

    def table(self, value: str = "accuracy") -> Table:
        """Rows by domains, seeds gathered; has only what is finished."""
        if value not in self._tables:
            self._tables[value] = table(self.cells, rows=self.label, value=value)
        return self._tables[value]

    @cached_property
    def _tables(self) -> dict[str, Table]:
        return {}

    def row(self, method: str) -> Row | None:
        """The first row of a method, or None."""
        return next((row for row in self.rows if row.method == method), None)


@dataclass(frozen=True)
class Contents:
    """What a store holds, ready to be shown."""

    groups: tuple[Group, ...]
    counts: Counts
    pictures: Mapping[tuple[str, int], bytes] = field(default_factory=dict)  # by fingerprint and index
    class_names: Mapping[str, Sequence[str]] = field(default_factory=dict)  # by data set

    @property
    def cells(self) -> list[Cell]:
        return list({cell.key.digest: cell for group in self.groups for cell in group.cells}.values())


def read_contents(path: str | os.PathLike[str]) -> Contents:
    """Read a store once and cut it into groups; the store is not changed."""
    if Path(path).exists() and not Path(path).is_file():  # opening a pipe would wait for a writer
        raise DataError(f"'{path}' is not a file; give the results store that a benchmark wrote")
    with ResultStore(path, create=False) as store:
        cells, failures = store.results(), store.failures()
        absent = [*store.keys("pending"), *store.keys("running")]
        counts, pictures, class_names = store.counts(), store.pictures(), store.class_names()
    return Contents(tuple(make_groups(cells, failures, absent)), counts, pictures, class_names)


def make_groups(cells: Sequence[Cell], failures: Sequence[Failure] = (), absent: Sequence[CellKey] = ()) -> list[Group]:
    """Cut cells into groups whose tables mix nothing, in display order."""
    items: list[tuple[CellKey, Cell | Failure | CellKey]] = [(cell.key, cell) for cell in cells]
    items += [*((failure.key, failure) for failure in failures), *((key, key) for key in absent)]
    corrupted: dict[tuple[object, ...], set[tuple[object, ...]]] = defaultdict(set)
    for key, _ in items:
        if key.severity is not None:
            corrupted[_without_severity(key)].add(_group_values(key))
    bins: dict[tuple[object, ...], list[Cell | Failure | CellKey]] = defaultdict(list)
    for key, item in items:
        # Clean images have no severity: they belong to the stream of each severity that was run.
        streams = corrupted.get(_without_severity(key)) if key.severity is None else None
        for values in streams or {_group_values(key)}:
            bins[values].append(item)
    groups: list[Group] = []
    for values in sorted(bins, key=lambda v: [rank(n, x) for n, x in zip(_TITLE_FIELDS, v, strict=True)]):
        experiment, dataset, setting, severity, batch_size, limit = values
        whole = Group(
            experiment=str(experiment),
            dataset=str(dataset),
            setting=str(setting),
            severity=cast("int | None", severity),
            batch_size=cast(int, batch_size),
            limit=cast("int | None", limit),
            part="",
            cells=tuple(item for item in bins[values] if isinstance(item, Cell)),
            failures=tuple(item for item in bins[values] if isinstance(item, Failure)),
            absent=tuple(item for item in bins[values] if isinstance(item, CellKey)),
        )
        groups.extend(_separate(whole, _LAST_RESORTS))
    return groups


def _separate(group: Group, fields: Sequence[str]) -> list[Group]:
    """The group itself, or its parts by the first fields that make each fit one table."""
    try:
        group.table()
    except ConfigError:
        if not fields:
            raise
    else:
        return [group]
    parts = []
    for value in sorted({str(getattr(key, fields[0])) for key in group.keys}):
        word = f"{fields[0]} {value[:12]}"
        part = replace(
            group,
            part=f"{group.part}, {word}".removeprefix(", "),
            cells=tuple(c for c in group.cells if str(getattr(c.key, fields[0])) == value),
            failures=tuple(f for f in group.failures if str(getattr(f.key, fields[0])) == value),
            absent=tuple(k for k in group.absent if str(getattr(k, fields[0])) == value),
        )
        parts.append(part)
    if len(parts) == 1:
        parts = [group]
    return [smaller for part in parts for smaller in _separate(part, fields[1:])]


def _group_values(key: CellKey) -> tuple[object, ...]:
    gradual = "gradual" in key.setting.split("+")  # there the severity is part of the stream
    return tuple(None if name == "severity" and gradual else getattr(key, name) for name in _TITLE_FIELDS)


def _without_severity(key: CellKey) -> tuple[object, ...]:
    return tuple(getattr(key, name) for name in _TITLE_FIELDS if name != "severity")


def _row_rank(key: CellKey, label: str) -> tuple[object, ...]:
    """By method; what most lines of a method have in common comes first, then by options."""
    options = [rank(name, value) for name, value in sorted(key.option_values.items())]
    return rank("method", key.method), label != key.method, options
