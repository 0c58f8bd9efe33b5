"""The numbers behind the charts: means, costs, running accuracy, sequences and sweeps of a group."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from trust_tta.report.acting import acting_options
from trust_tta.report.charts import Curve, Dots, Look, Point
from trust_tta.report.groups import Group, Row
from trust_tta.results import Cell, Reliability
from trust_tta.results.record import BINS

MOST_POINTS = 60


@dataclass(frozen=True)
class Cost:
    """What a line reaches and at what cost: updates and passes a batch, milliseconds an image (None: unknown)."""

    row: Row
    accuracy: float
    updates: float
    passes: float
    milliseconds: float | None


@dataclass(frozen=True)
class Sweep:
    """The mean accuracy of one method as one of its options changes and all others stay."""

    method: str
    option: str
    points: tuple[tuple[Any, float], ...]
    labels: tuple[str, ...]  # of the line at each point

    @property
    def numeric(self) -> bool:
        return all(isinstance(x, int | float) and not isinstance(x, bool) for x, _ in self.points)


@dataclass(frozen=True)
class BatchSizes:
    """Mean accuracy by batch size in groups that differ in nothing else."""

    title: str
    dataset: str
    domains: int  # that each point is the mean of
    curves: tuple[Curve, ...]


def looks(group: Group) -> dict[str, Look]:
    """How each line of the group is drawn, by its label."""
    return {row.label: Look(i, row.label, row.method, row.variant) for i, row in enumerate(group.rows)}


def means(group: Group, value: str = "accuracy") -> dict[str, float]:
    """The mean over all domains of each complete line."""
    table = group.table(value)
    complete = set(table.columns) == set(group.domains)
    return {r: m.mean for r, m in zip(table.rows, table.means, strict=True) if m.mean is not None and complete}


def domain_dots(group: Group) -> list[Dots]:
    """Accuracy of each line on each domain, with the half-width of its interval over seeds."""
    table, look = group.table(), looks(group)
    found = {
        (r, c): (entry.mean, entry.half_width)
        for r, line in zip(table.rows, table.cells, strict=True)
        for c, entry in zip(table.columns, line, strict=True)
        if entry.mean is not None
    }
    return [Dots(look[row.label], tuple(found.get((row.label, d)) for d in group.domains)) for row in group.rows]


def gains(dots: Sequence[Dots]) -> tuple[Look, list[Dots]] | None:
    """Differences to the first baseline there is, and that baseline; beside batch statistics the source is left out.

    They have no intervals: those of the parts do not give that of a difference.
    """
    base = next((d for method in ("bn", "source") for d in dots if d.look.method == method and any(d.values)), None)
    if base is None:
        return None
    kept = [d for d in dots if d is not base and d.look.method != "source"]
    return base.look, [Dots(d.look, tuple(map(_less, d.values, base.values))) for d in kept]


def costs(group: Group) -> list[Cost]:
    """Accuracy and cost of each complete line."""
    found, reached = [], means(group)
    for row in group.rows:
        accuracy, cells = reached.get(row.label), row_cells(group, row.label)
        if accuracy is None or not cells:
            continue
        batches = sum(batch_count(cell) for cell in cells)
        updates = sum(cell.result.updates for cell in cells) / batches
        passes = sum(cell.result.forwards + cell.result.backwards for cell in cells) / batches
        found.append(Cost(row, accuracy, updates, passes, _milliseconds(cells)))
    return found


def batch_count(cell: Cell) -> int:
    """The number of batches that the cell's stream had."""
    return len(cell.result.course.samples) or max(1, math.ceil(cell.result.samples / cell.key.batch_size))


def running_accuracy(group: Group, domain: str | None = None) -> list[Curve]:
    """Accuracy over the images seen so far, mean over seeds, on one domain or on the mean of all."""
    curves = []
    for label, look in looks(group).items():
        places = [(label, d) for d in (group.domains if domain is None else [domain])]
        cells = [cell for place in places for cell in group.at.get(place, []) if cell.result.course.samples]
        if cells and all(place in group.at for place in places):
            curves.append(Curve(look, _thin(_mean_curve([_running(cell) for cell in cells]))))
    return curves


def pooled_reliability(cells: Iterable[Cell]) -> Reliability:
    """The bins of several cells added up."""
    bins = [cell.result.reliability for cell in cells]
    columns = range(BINS)
    return Reliability(
        count=tuple(sum(b.count[i] for b in bins) for i in columns),
        confidence=tuple(math.fsum(b.confidence[i] for b in bins) for i in columns),
        correct=tuple(sum(b.correct[i] for b in bins) for i in columns),
    )


def row_cells(group: Group, label: str) -> list[Cell]:
    """The finished cells of one line."""
    return [cell for domain in group.domains for cell in group.at.get((label, domain), [])]


def stream_order(group: Group) -> list[str]:
    """The domains in the order in which they came, by the start of their runs."""
    starts: dict[str, list[str]] = defaultdict(list)
    for cell in group.cells:
        starts[cell.key.domain].append(cell.facts.started)
    places: dict[str, int] = {d: i for i, d in enumerate(group.domains)}
    first = {domain: min(times) for domain, times in starts.items()}
    return sorted(first, key=lambda domain: (first[domain], places[domain]))


def sequence(group: Group, value: Callable[[Cell], float | None]) -> list[Curve]:
    """A value along the domains in stream order, mean over seeds; lines without any are left out."""
    order = stream_order(group)
    curves = []
    for label, look in looks(group).items():
        points = [(float(i), _mean(map(value, group.at.get((label, d), [])))) for i, d in enumerate(order)]
        if any(math.isfinite(y) for _, y in points):
            curves.append(Curve(look, tuple(points)))
    return curves


def relative(curves: Sequence[Curve]) -> tuple[Look, list[Curve]] | None:
    """Curves over the same places less the first baseline there is, and that baseline; as `gains` does for dots."""
    base = next((c for method in ("bn", "source") for c in curves if c.look.method == method), None)
    if base is None:
        return None
    kept = [c for c in curves if c is not base and c.look.method != "source"]
    pairs = [(c, zip(c.points, base.points, strict=True)) for c in kept]
    return base.look, [Curve(c.look, tuple((x, y - z) for (x, y), (_, z) in both)) for c, both in pairs]


def sweeps(group: Group) -> list[Sweep]:
    """For each method, each option that alone tells some of its lines apart; of lines alike the first."""
    reached = means(group)
    found: dict[tuple[str, str, str], dict[str, tuple[Any, float]]] = defaultdict(dict)
    options = {cell.key.options: acting_options(cell.key.option_values) for cell in group.cells}
    for row in group.rows:
        values = options.get(row.options)
        if row.label not in reached or values is None:
            continue
        for name, chosen in values.items():
            rest = str(sorted((n, str(v)) for n, v in values.items() if n != name))
            points = found[row.method, name, rest]
            if chosen not in [x for x, _ in points.values()]:
                points[row.label] = (chosen, reached[row.label])
    kept = [
        (m, n, sorted(points.items(), key=lambda item: _sweep_order(item[1])))
        for (m, n, _), points in found.items()
        if len(points) > 1
    ]
    return [Sweep(m, n, tuple(p for _, p in items), tuple(label for label, _ in items)) for m, n, items in kept]


def batch_size_curves(groups: Sequence[Group]) -> list[BatchSizes]:
    """Mean accuracy by batch size, for groups that differ in nothing else."""
    families: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        families[f"{group.experiment}: {group.title.replace(f', batch {group.batch_size}', '')}"].append(group)
    found = []
    for title, members in families.items():
        points: dict[str, list[Point]] = defaultdict(list)
        for group in members:
            for label, accuracy in means(group).items():
                points[label].append((float(group.batch_size), accuracy))
        look = {label: found_look for group in members for label, found_look in looks(group).items()}
        curves = tuple(Curve(look[label], tuple(sorted(p))) for label, p in points.items() if len(p) > 1)
        if curves:
            found.append(BatchSizes(title, members[0].dataset, len(members[0].domains), curves))
    return found


def _less(
    value: tuple[float, float | None] | None, base: tuple[float, float | None] | None
) -> tuple[float, None] | None:
    return None if value is None or base is None else (value[0] - base[0], None)


def _milliseconds(cells: Sequence[Cell]) -> float | None:
    """Median time of a batch spread over its images: a slow first batch does not count."""
    timed = [c for c in cells if math.isfinite(c.result.seconds_median) and c.result.samples]
    images = sum(c.result.samples for c in timed)
    seconds = sum(c.result.seconds_median * batch_count(c) for c in timed)
    return 1000 * seconds / images if images and seconds > 0 else None


def _running(cell: Cell) -> list[Point]:
    seen, right, points = 0, 0.0, []
    for n, accuracy in zip(cell.result.course.samples, cell.result.course.accuracy, strict=True):
        seen, right = seen + n, right + n * accuracy
        if seen:
            points.append((float(seen), right / seen))
    return points


def _mean_curve(curves: Sequence[Sequence[Point]]) -> list[Point]:
    """The pointwise mean, as far as the shortest goes."""
    length = min(len(curve) for curve in curves)
    columns = [[curve[i] for curve in curves] for i in range(length)]
    return [(_mean(p[0] for p in column), _mean(p[1] for p in column)) for column in columns]


def _thin(points: Sequence[Point]) -> tuple[Point, ...]:
    """At most MOST_POINTS of the points, the last one among them."""
    step = math.ceil(len(points) / MOST_POINTS) or 1
    return tuple(reversed(points[::-1][::step]))


def _mean(values: Iterable[float | None]) -> float:
    finite = [v for v in values if v is not None and math.isfinite(v)]
    return math.fsum(finite) / len(finite) if finite else math.nan


def _sweep_order(point: tuple[Any, float]) -> tuple[int, float, str]:
    x = point[0]
    return (0, float(x), "") if isinstance(x, int | float) and not isinstance(x, bool) else (1, 0.0, str(x))
