"""The pivot behind every table: cells by rows and columns, seeds gathered, nothing mixed up."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

from trust_tta.errors import ConfigError
from trust_tta.results.codec import canonical_json
from trust_tta.results.display import Rank, rank
from trust_tta.results.record import Cell, CellKey, CellResult

Label: TypeAlias = str | Callable[[CellKey], str]

_NO_NUMBERS = ("course", "reliability", "confusion", "predictions", "correct", "pixels", "masks")
VALUES = tuple(f.name for f in fields(CellResult) if f.name not in _NO_NUMBERS)
_KEY_FIELDS = tuple(f.name for f in fields(CellKey))


@dataclass(frozen=True)
class Aggregate:
    """One entry of a table over `n` seeds; `missing` counts the parts whose absence keeps seeds out of the mean."""

    mean: float | None = None
    std: float | None = None  # over seeds, None below two
    half_width: float | None = None  # of the 95 % t-interval of the mean
    n: int = 0
    missing: int = 0


@dataclass(frozen=True)
class Table:
    """A pivot: `cells[i][j]` belongs to `rows[i]` and `columns[j]`, `means[i]` to the row over all columns."""

    value: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: tuple[tuple[Aggregate, ...], ...]
    means: tuple[Aggregate, ...]

    def cell(self, row: str, column: str) -> Aggregate:
        """The entry at two labels."""
        return self.cells[self.rows.index(row)][self.columns.index(column)]

    def gains(self, baseline: str) -> tuple[float | None, ...]:
        """Each row's mean less that of the row `baseline`; None where either is missing."""
        if baseline not in self.rows:
            raise ConfigError(f"there is no row {baseline!r} to compare with; the rows are {', '.join(self.rows)}")
        base = self.means[self.rows.index(baseline)].mean
        return tuple(None if base is None or m.mean is None else m.mean - base for m in self.means)


def table(
    cells: Iterable[Cell],
    *,
    rows: Label = "method",
    columns: Label = "domain",
    value: str = "accuracy",
    over: Collection[str] = (),
) -> Table:
    """Pivot finished cells.

    `rows` and `columns` are "label", fields of CellKey, options as "options.k", or functions of the key. Entries are
    means over seeds; fields in `over` (say "domain") are averaged first, within a seed, and only where every part that
    another row of that column has is there. Cells that differ in anything else are refused rather than mixed.
    """
    if value not in VALUES:
        raise ConfigError(f"{value!r} is not a value of a result; give one of {', '.join(VALUES)}")
    groups: dict[tuple[str, str], list[Cell]] = defaultdict(list)
    row_ranks: dict[str, list[Rank]] = {}
    column_ranks: dict[str, list[Rank]] = {}
    for cell in cells:
        groups[_place(row_ranks, rows, cell), _place(column_ranks, columns, cell)].append(cell)
    row_labels, column_labels = _in_order(row_ranks), _in_order(column_ranks)
    expected: dict[str, set[Hashable]] = defaultdict(set)
    for (_, column), found in groups.items():
        expected[column].update(_part(cell.key, over) for cell in found)
    lines = [[_by_seed(groups.get((r, c), []), value, over, expected[c]) for c in column_labels] for r in row_labels]
    entries = tuple(tuple(aggregate([*seeds.values()], missing=missing) for seeds, missing in line) for line in lines)
    means = (_row_mean([seeds for seeds, _ in line], shown) for line, shown in zip(lines, entries, strict=True))
    return Table(value, row_labels, column_labels, entries, tuple(means))


def split(cells: Iterable[Cell], names: Sequence[str]) -> dict[tuple[Any, ...], list[Cell]]:
    """Cells by their values of the key fields `names`, groups in display order."""
    groups: dict[tuple[Any, ...], list[Cell]] = defaultdict(list)
    for cell in cells:
        groups[tuple(field_value(cell.key, name) for name in names)].append(cell)
    order = sorted(groups, key=lambda values: [rank(n, v) for n, v in zip(names, values, strict=True)])
    return {values: groups[values] for values in order}


def field_value(key: CellKey, name: str) -> Any:
    """The key's field `name`, or its option `x` where `name` is "options.x" (None when not given)."""
    if name.startswith("options."):
        value = key.option_values.get(name.removeprefix("options."))
        return canonical_json(value) if isinstance(value, list | dict) else value
    if name not in _KEY_FIELDS:
        raise ConfigError(f"{name!r} is not a field of a cell; give one of {', '.join(_KEY_FIELDS)} or options.NAME")
    return getattr(key, name)


def _place(ranks: dict[str, list[Rank]], label: Label, cell: Cell) -> str:
    """The label of `cell`, noting in `ranks` where it is to be shown."""
    key = cell.key
    if isinstance(label, str) and label != "label":
        found = field_value(key, label)
        name, order = "-" if found is None else str(found), [rank(label, found)]
    else:
        options = sorted(key.option_values.items())
        name = label(key) if callable(label) else cell.label
        order = [rank("method", key.method), *(rank(option, v) for option, v in options)]
    ranks[name] = min(ranks.get(name, order), order)
    return name


def _in_order(ranks: dict[str, list[Rank]]) -> tuple[str, ...]:
    return tuple(sorted(ranks, key=lambda label: (ranks[label], label)))


def _part(key: CellKey, over: Collection[str]) -> Hashable:
    return tuple(str(field_value(key, name)) for name in over)


def _by_seed(
    cells: list[Cell], value: str, over: Collection[str], expected: set[Hashable]
) -> tuple[dict[int, float], int]:
    """The value of each complete seed, and how many parts the others lack."""
    _refuse_mixture(cells, over)
    seeds: dict[int, dict[Hashable, float]] = defaultdict(dict)
    for cell in cells:
        number = getattr(cell.result, value)
        if number is not None and not math.isnan(number):
            seeds[cell.key.seed][_part(cell.key, over)] = float(number)
    complete = {s: math.fsum(p.values()) / len(p) for s, p in sorted(seeds.items()) if p.keys() == expected}
    missing = sum(len(expected) - len(p) for p in seeds.values()) if seeds else len(expected)
    return complete, missing


def _refuse_mixture(cells: list[Cell], over: Collection[str]) -> None:
    """The cells of an entry may differ in seed and averaged fields; data follow both, weights only the latter."""
    keys = [cell.key for cell in cells]
    _agree(keys, [name for name in _KEY_FIELDS if name not in {"seed", "fingerprint", "checkpoint", *over}])
    parts: dict[Hashable, list[CellKey]] = defaultdict(list)
    twins: dict[Hashable, list[CellKey]] = defaultdict(list)
    for key in keys:
        parts[_part(key, over)].append(key)
        twins[_part(key, over), key.seed].append(key)
    for same_part in parts.values():
        _agree(same_part, ["checkpoint"])
    for same_run in twins.values():
        _agree(same_run, ["fingerprint"])
        if len(same_run) > 1:
            digest = same_run[0].digest[:12]
            raise ConfigError(f"the cell {digest} was given {len(same_run)} times; give each cell once")


def _agree(keys: list[CellKey], names: Sequence[str]) -> None:
    for name in names:
        found = sorted({str(getattr(key, name)) for key in keys})
        if len(found) > 1:
            raise ConfigError(
                f"results of {keys[0].method} on {keys[0].domain} differ in {name} ({', '.join(found)}) and cannot "
                f"share one entry; select one, or use {name} for rows or columns"
            )


def aggregate(values: Sequence[float], *, missing: int = 0) -> Aggregate:
    """The mean of values of different seeds, with its spread and interval."""
    n = len(values)
    if n == 0:
        return Aggregate(missing=missing)
    mean = math.fsum(values) / n
    if n == 1:
        return Aggregate(mean, n=1, missing=missing)
    from scipy import special

    std = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1))
    return Aggregate(mean, std, float(special.stdtrit(n - 1, 0.975)) * std / math.sqrt(n), n, missing)


def _row_mean(by_column: list[dict[int, float]], entries: Sequence[Aggregate]) -> Aggregate:
    """The mean of the shown entries, with the spread over seeds where all columns have the same ones."""
    absent = sum(entry.mean is None for entry in entries)
    if absent:
        return Aggregate(missing=absent)
    if all(column.keys() == by_column[0].keys() for column in by_column):
        return aggregate([math.fsum(column[s] for column in by_column) / len(by_column) for s in by_column[0]])
    mean = math.fsum(entry.mean for entry in entries if entry.mean is not None) / len(entries)
    return Aggregate(mean, n=min(entry.n for entry in entries))
