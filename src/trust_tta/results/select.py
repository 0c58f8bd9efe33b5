"""Pivot tables of cells: labels by domains, averaged over seeds."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

from trust_tta.errors import ConfigError
from trust_tta.results.display import Rank, rank
from trust_tta.results.record import Cell, CellKey, CellResult

_NO_NUMBERS = ("history", "reliability", "confusion", "predictions", "correct", "pixels", "masks")
VALUES = tuple(f.name for f in fields(CellResult) if f.name not in _NO_NUMBERS)
_KEY_FIELDS = tuple(f.name for f in fields(CellKey))


@dataclass(frozen=True)
class Aggregate:
    """Mean over `n` seeds; None if a value is missing."""

    mean: float | None = None
    std: float | None = None  # over seeds, None below two
    half_width: float | None = None  # of the 95 % t-interval of the mean
    n: int = 0


@dataclass(frozen=True)
class Table:
    """A pivot table: `cells[i][j]` is at `rows[i]` and `columns[j]`, `means[i]` is over all columns."""

    value: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: tuple[tuple[Aggregate, ...], ...]
    means: tuple[Aggregate, ...]

    def cell(self, row: str, column: str) -> Aggregate:
        """The entry of a row and a column."""
        return self.cells[self.rows.index(row)][self.columns.index(column)]


def table(cells: Iterable[Cell], *, value: str = "accuracy") -> Table:
    """Pivot finished cells: labels by domains.

    Entries are means over seeds; cells that differ in anything else are refused.
    """
    if value not in VALUES:
        raise ConfigError(f"{value!r} is not a value of a result; give one of {', '.join(VALUES)}")
    groups: dict[tuple[str, str], list[Cell]] = defaultdict(list)
    ranks: dict[str, list[Rank]] = {}
    for cell in cells:
        groups[cell.label, cell.key.domain].append(cell)
        options = sorted(cell.key.option_values.items())
        order = [rank("method", cell.key.method), *(rank(option, v) for option, v in options)]
        ranks[cell.label] = min(ranks.get(cell.label, order), order)
    rows = tuple(sorted(ranks, key=lambda label: (ranks[label], label)))
    columns = tuple(sorted({domain for _, domain in groups}, key=lambda name: (rank("domain", name), name)))
    lines = [[_by_seed(groups.get((row, column), []), value) for column in columns] for row in rows]
    entries = tuple(tuple(aggregate([*seeds.values()]) for seeds in line) for line in lines)
    means = (_row_mean(line, shown) for line, shown in zip(lines, entries, strict=True))
    return Table(value, rows, columns, entries, tuple(means))


def _by_seed(cells: list[Cell], value: str) -> dict[int, float]:
    """The finite values by seed."""
    _refuse_mixture([cell.key for cell in cells])
    values = {cell.key.seed: getattr(cell.result, value) for cell in cells}
    return {s: float(v) for s, v in sorted(values.items()) if v is not None and not math.isnan(v)}


def _refuse_mixture(keys: list[CellKey]) -> None:
    """Refuse cells of one entry that differ in more than seed and fingerprint."""
    _agree(keys, [name for name in _KEY_FIELDS if name not in ("seed", "fingerprint")])
    runs: dict[int, list[CellKey]] = defaultdict(list)
    for key in keys:
        runs[key.seed].append(key)
    for same_run in runs.values():
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
                "share one entry; select one, or give them different labels"
            )


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


def _row_mean(by_column: list[dict[int, float]], entries: Sequence[Aggregate]) -> Aggregate:
    """The mean over columns, with a deviation if all columns have the same seeds."""
    if any(entry.mean is None for entry in entries):
        return Aggregate()
    if all(column.keys() == by_column[0].keys() for column in by_column):
        return aggregate([math.fsum(column[s] for column in by_column) / len(by_column) for s in by_column[0]])
    mean = math.fsum(entry.mean for entry in entries if entry.mean is not None) / len(entries)
    return Aggregate(mean, n=min(entry.n for entry in entries))
