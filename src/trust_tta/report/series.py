"""The numbers behind the charts: accuracy by domain, along the stream, over domains, options and batch sizes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from trust_tta.errors import ConfigError
from trust_tta.orders import PAPER_ORDERS, ScanOrder
from trust_tta.report.model import Group, Variant
from trust_tta.report.significance import domain_seeds, paired
from trust_tta.results import Cell
from trust_tta.results.display import BASELINES
from trust_tta.results.select import aggregate

MOST_POINTS = 60
Point: TypeAlias = tuple[float, float]
Value: TypeAlias = tuple[float, float | None]  # a mean and the half-width of its interval over seeds


@dataclass(frozen=True)
class Dots:
    """The values of one line over the rows of a dot plot, None where missing."""

    variant: Variant
    values: tuple[Value | None, ...]


@dataclass(frozen=True)
class Curve:
    """One curve; `halves` are the half-widths of the intervals of its points, as far as they are known."""

    variant: Variant
    points: tuple[Point, ...]
    halves: tuple[float | None, ...] = ()

    @classmethod
    def through(cls, variant: Variant, values: Sequence[tuple[float, Value]]) -> Curve:
        """The curve through values at their places."""
        points = tuple((x, mean) for x, (mean, _) in values)
        return cls(variant, points, tuple(half for _, (_, half) in values))


@dataclass(frozen=True)
class Sweep:
    """The mean accuracy of one method as one of its options changes and all others stay."""

    method: str
    option: str
    points: tuple[tuple[Any, Value], ...]
    variants: tuple[Variant, ...]  # the line at each point

    @property
    def numeric(self) -> bool:
        return all(isinstance(x, int | float) and not isinstance(x, bool) for x, _ in self.points)

    @property
    def curve(self) -> Curve:
        """The sweep as a curve over its points, or over their places where they are not numbers."""
        values = [(float(x if self.numeric else i), value) for i, (x, value) in enumerate(self.points)]
        return Curve.through(Variant(0, self.method, self.method), values)


@dataclass(frozen=True)
class BatchSizes:
    """Mean accuracy by batch size in groups that differ in nothing else."""

    title: str
    dataset: str
    domains: int  # that each point is the mean of
    curves: tuple[Curve, ...]


def domain_dots(group: Group, value: str = "accuracy", *, over: Variant | None = None) -> list[Dots]:
    """A value of each line on each domain, with its interval over seeds; with `over` its gain over that line.

    Among gains the source is left out: it would squeeze the rest together.
    """
    kept = [v for v in group.variants if over is None or (v.label != over.label and v.method != "source")]
    return [Dots(v, tuple(_value(group, v.label, domain, value, over) for domain in group.domains)) for v in kept]


def baseline(group: Group) -> Variant | None:
    """The line that gains are shown over: the first baseline that has finished anything, batch statistics first."""
    finished = [d.variant for d in domain_dots(group) if any(d.values)]
    return next((v for method in reversed(BASELINES) for v in finished if v.method == method), None)


def running_accuracy(group: Group, domain: str | None = None) -> list[Curve]:
    """Accuracy over the images seen so far, mean over seeds, on one domain or on the mean of all."""
    curves = []
    for variant in group.variants:
        places = [(variant.label, d) for d in (group.domains if domain is None else [domain])]
        cells = [cell for place in places for cell in group.at.get(place, []) if cell.result.history.samples]
        if cells and all(place in group.at for place in places):
            points = _thin(_mean_curve([_running(cell) for cell in cells]))
            end = group.mean(variant.label) if domain is None else group.entry(variant.label, domain)
            curves.append(Curve(variant, points, (*[None] * (len(points) - 1), end.half_width)))
    return curves


def stream_order(group: Group) -> list[str]:
    """The domains in the order in which they came, by the start of their runs."""
    first: dict[str, str] = {}
    for cell in group.cells:
        first[cell.key.domain] = min(cell.provenance.started, first.get(cell.key.domain, cell.provenance.started))
    return sorted(first, key=lambda domain: (first[domain], group.domains.index(domain)))


def sequence(group: Group, value: str = "accuracy", *, over: Variant | None = None) -> list[Curve]:
    """A value along the domains in stream order, less that of the line `over`; lines without any are left out."""
    places = [group.domains.index(domain) for domain in stream_order(group)]
    return [
        Curve.through(dots.variant, [(float(i), dots.values[j] or (math.nan, None)) for i, j in enumerate(places)])
        for dots in domain_dots(group, value, over=over)
        if any(dots.values)
    ]


def sweeps(group: Group) -> list[Sweep]:
    """For each method, each option that alone tells some of its lines apart; of lines alike the first."""
    reached = group.means()
    found: dict[tuple[str, str, str], list[tuple[Any, Variant]]] = defaultdict(list)
    options = {cell.key.options: effective_options(cell.key.option_values) for cell in group.cells}
    for variant in group.variants:
        values = options.get(variant.options)
        if variant.label not in reached or values is None:
            continue
        for name, chosen in values.items():
            rest = str(sorted((n, str(v)) for n, v in values.items() if n != name))
            line = found[variant.method, name, rest]
            if chosen not in [x for x, _ in line]:
                line.append((chosen, variant))
    kept = [(m, n, sorted(line, key=_sweep_order)) for (m, n, _), line in found.items() if len(line) > 1]
    return [Sweep(m, n, tuple((x, _mean_value(group, v)) for x, v in line), tuple(v for _, v in line))
            for m, n, line in kept]  # fmt: skip


def batch_size_curves(groups: Sequence[Group]) -> list[BatchSizes]:
    """Mean accuracy by batch size, for groups that differ in nothing else."""
    families: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        families[group.heading.replace(f", batch {group.batch_size}", "")].append(group)
    found = []
    for title, members in families.items():
        points: dict[str, list[tuple[float, Value]]] = defaultdict(list)
        variants: dict[str, Variant] = {}
        for group in members:
            for variant in group.variants:
                if group.mean(variant.label).mean is not None:
                    variants[variant.label] = variant
                    points[variant.label].append((float(group.batch_size), _mean_value(group, variant)))
        lines = {variants[label]: sorted(line) for label, line in points.items() if len(line) > 1}
        curves = [Curve.through(variant, line) for variant, line in lines.items()]
        if curves:
            found.append(BatchSizes(title, members[0].dataset, len(members[0].domains), tuple(curves)))
    return found


def effective_options(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Options as they act: explicit `orders` count as their number `k`, and as None where they begin the paper's list.

    The paper's six and two more are k = 8, as its first two are k = 2; others stay as they are listed.
    """
    listed = values.get("orders")
    if not isinstance(listed, list):
        return values
    try:
        orders = [ScanOrder(order) for order in listed]
    except ConfigError:  # a store may be of another program's making
        return values
    continues = orders[: len(PAPER_ORDERS)] == list(PAPER_ORDERS[: len(orders)])
    return {**values, "k": len(orders), "orders": None if continues else [str(order) for order in orders]}


def _value(group: Group, label: str, domain: str, value: str, over: Variant | None) -> Value | None:
    """A value on a domain, or its gain over a line, whose interval is paired by seed."""
    seeds = domain_seeds(group, label, domain, value)
    mine = aggregate([*seeds.values()])
    if mine.mean is None or over is None:
        return None if mine.mean is None else (mine.mean, mine.half_width)
    others = domain_seeds(group, over.label, domain, value)
    theirs = aggregate([*others.values()]).mean
    return None if theirs is None else (mine.mean - theirs, paired(seeds, others).half_width)


def _mean_value(group: Group, variant: Variant) -> Value:
    entry = group.mean(variant.label)
    return math.nan if entry.mean is None else entry.mean, entry.half_width


def _running(cell: Cell) -> list[Point]:
    seen, right, points = 0, 0.0, []
    for n, accuracy in zip(cell.result.history.samples, cell.result.history.accuracy, strict=True):
        seen, right = seen + n, right + n * accuracy
        if seen:
            points.append((float(seen), right / seen))
    return points


def _mean_curve(curves: Sequence[Sequence[Point]]) -> list[Point]:
    """The pointwise mean, as far as the shortest goes."""
    length = min(len(curve) for curve in curves)
    columns = [[curve[i] for curve in curves] for i in range(length)]
    return [(finite_mean(p[0] for p in column), finite_mean(p[1] for p in column)) for column in columns]


def _thin(points: Sequence[Point]) -> tuple[Point, ...]:
    """At most MOST_POINTS of the points, the last one among them."""
    step = math.ceil(len(points) / MOST_POINTS) or 1
    return tuple(reversed(points[::-1][::step]))


def finite_mean(values: Iterable[float]) -> float:
    """The mean of the numbers that are finite, NaN without any."""
    finite = [v for v in values if math.isfinite(v)]
    return math.fsum(finite) / len(finite) if finite else math.nan


def _sweep_order(point: tuple[Any, Variant]) -> tuple[int, float, str]:
    x = point[0]
    return (0, float(x), "") if isinstance(x, int | float) and not isinstance(x, bool) else (1, 0.0, str(x))
