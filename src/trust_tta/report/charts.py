"""The data of a report's charts; `svg` draws them for the page, and `figures` for papers."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from trust_tta.report.model import Report, ResultGroup, Variant, aggregate, effective_options, finite_mean
from trust_tta.report.significance import paired
from trust_tta.report.text import domain_name, safe_line, short_domain
from trust_tta.results import Reliability, format_percent
from trust_tta.results.record import BINS

Kind: TypeAlias = Literal["dots", "scatter", "lines", "reliability"]
ACCURACY = "accuracy in %"


@dataclass(frozen=True)
class Point:
    """A value `y` (NaN: missing) at `x`, a number or the index of a category."""

    x: float
    y: float
    error: float | None = None  # half-width of the 95 % interval
    note: str = ""  # text of the tooltip after the value
    weight: float = 1.0  # opacity of a reliability bar


@dataclass(frozen=True)
class Series:
    variant: Variant
    points: tuple[Point, ...]

    @property
    def mean(self) -> float:
        return finite_mean(point.y for point in self.points)


@dataclass(frozen=True)
class Chart:
    """One chart.

    dots: a row per category, values on the horizontal axis; the page's pickers hide rows by `rows_of`.
    scatter: one point per series. lines: curves over numbers or categories. reliability: accuracy by confidence.
    """

    kind: Kind
    name: str  # of its file
    caption: str
    series: tuple[Series, ...] = ()
    choice: str = ""  # its name among the charts of a panel
    x_label: str = ""
    y_label: str = ACCURACY
    categories: tuple[str, ...] = ()
    rows_of: Literal["", "domain", "method"] = ""
    x_scale: Literal["linear", "log", "doubling"] = "linear"
    connected: tuple[tuple[Variant, ...], ...] = ()  # variants of a scatter plot joined by a line


def split_outliers(series: Sequence[Series]) -> tuple[list[Series], list[Series]]:
    """Series that share a scale, and those so far below that they would compress it."""
    floor = outlier_floor([s.mean for s in series])
    return [s for s in series if not s.mean < floor], [s for s in series if s.mean < floor]


def outlier_floor(values: Sequence[float]) -> float:
    """The lowest value after a gap of 0.8 times the spread above it; at most a third of the values lie below."""
    order = sorted(v for v in values if math.isfinite(v))
    for cut in range(len(order) // 3, 0, -1):
        gap, spread = order[cut] - order[cut - 1], order[-1] - order[cut]
        if spread > 0 and gap > max(0.8 * spread, 0.02):
            return order[cut]
    return -math.inf


# made from groups

MAX_POINTS = 60  # of a curve along the stream
COSTS = {
    "updates": "updates per batch",
    "passes": "forward and backward passes per batch",
    "milliseconds": "milliseconds per image",
}


def paper_charts(report: Report) -> Iterator[tuple[str, Chart]]:
    """The charts that `--figures` draws, each with the group it belongs to."""
    for group in report.groups:
        where = f"{group.experiment} {group.dataset} {group.setting} {group.batch_size}"
        found = [*by_domain(group), *cost(group, ["passes"]), *along_stream(group)[:1], *ablations(group)]
        yield from ((where, chart) for chart in found)
    yield from (("", chart) for chart in by_batch_size(report.groups))


def by_domain(group: ResultGroup) -> list[Chart]:
    """Accuracy of each method on each domain, and its gain over the baseline."""
    if not group.cells:
        return []
    names, base, series = tuple(map(domain_name, group.domains)), baseline(group), domain_series(group)
    text = f"Accuracy of each method on each domain.{_interval_note(series)}"
    chart = Chart("dots", "accuracy by domain", text, series, "accuracy", categories=names, rows_of="domain")
    gains = domain_series(group, over=base) if base is not None else ()
    if base is None or not gains:
        return [chart]
    text = f"Gain of each method over {base.name} on each domain, in points; source is left out.{_interval_note(gains)}"
    choice = f"gain over {base.name}"
    return [chart, replace(chart, name="gain by domain", caption=text, series=gains, choice=choice, y_label="points")]


def cost(group: ResultGroup, kinds: Sequence[str] = tuple(COSTS)) -> list[Chart]:
    """Mean accuracy against updates, passes and time."""
    connected = tuple(sweep.variants for sweep in option_sweeps(group) if sweep.numeric)
    found = []
    for kind in kinds:
        known = [(c.variant, x) for c in group.costs if (x := getattr(c, kind)) is not None]
        series = tuple(Series(variant, (mean_point(group, variant, x),)) for variant, x in known)
        if series:
            text = f"Accuracy, {group.scope}, against {COSTS[kind]}; the dashed line is the Pareto front."
            text += " Colored lines join runs of a method that differ in one number." if connected else ""
            name, choice = f"accuracy against {kind}", "time" if kind == "milliseconds" else kind
            chart = Chart("scatter", name, text + _interval_note(series), series, choice, COSTS[kind])
            found.append(replace(chart, x_scale="log", connected=connected))
    return found


def along_stream(group: ResultGroup) -> list[Chart]:
    """Running accuracy along the stream: the mean over domains, then each domain."""
    found = []
    for domain in [*([None] if len(group.domains) > 1 else []), *group.domains]:
        series = running_accuracy(group, domain)
        if any(len(s.points) > 1 for s in series):
            name = "mean of all domains" if domain is None else domain_name(domain)
            text = f"Running accuracy along the stream, {name}."
            if any(s.points[-1].error for s in series):
                text += " The bar at the end is the 95 % interval over seeds."
            found.append(Chart("lines", f"along the stream {name}", text, tuple(series), name, "images seen"))
    return found


def before_after(group: ResultGroup) -> list[Chart]:
    """The gain from predicting after the update instead of before it."""
    before, series = group.means("accuracy_before"), list[Series]()
    for c in group.costs:
        label = c.variant.label
        after, earlier = group.seed_means(label), group.seed_means(label, "accuracy_before")
        if label in before and c.updates > 0 and after != earlier:
            half = paired(after, earlier).half_width
            note = f" ({format_percent(before[label])} before, {format_percent(c.accuracy)} after the update)"
            series.append(Series(c.variant, (Point(len(series), c.accuracy - before[label], half, note),)))
    text = (
        "Gain from predicting after the update instead of before it; methods that do not learn, or predict before the "
        "update, are left out."
    )
    names = tuple(s.variant.name for s in series)
    chart = Chart("dots", "before and after", text, tuple(series), y_label="points", categories=names, rows_of="method")
    return [chart] if series else []


def stability(group: ResultGroup) -> list[Chart]:
    """Accuracy over the domains of a stream without resets, and accuracy on clean images after each domain."""
    order, base, found = stream_order(group), baseline(group), list[Chart]()
    if not group.resets and len(order) > 1:
        text = "Accuracy on one domain after another, without a reset."
        found.append(Chart("lines", "stability", text, tuple(sequence(group))))
        if base is not None:
            text = f"Gain over {base.name} on one domain after another, without a reset."
            gains = tuple(sequence(group, over=base))
            found.append(Chart("lines", "stability gain", text, gains, y_label=f"points over {base.name}"))
    text = "Accuracy on clean images after each domain; a decrease is forgetting."
    clean = tuple(sequence(group, "clean_accuracy"))
    found.append(Chart("lines", "forgetting", text, clean, y_label="clean accuracy in %"))
    names = tuple(map(short_domain, order))
    return [replace(chart, categories=names) for chart in found if chart.series]


def reliability(group: ResultGroup) -> list[Chart]:
    """A reliability diagram for each method: accuracy by confidence, all runs together."""
    ece, found = group.means("ece"), []
    for variant in group.variants:
        bins = Reliability.total(cell.result.reliability for cell in group.cells_of(variant.label))
        if not sum(bins.count):
            continue
        points = []
        for i, (n, confidence, correct) in enumerate(zip(bins.count, bins.confidence, bins.correct, strict=True)):
            if n:
                note = f" accuracy at a mean confidence of {confidence / n:.3f}, {n} samples"
                weight = 0.3 + 0.7 * math.sqrt(n / max(bins.count))
                points.append(Point((i + 0.5) / BINS, correct / n, note=note, weight=weight))
        text = f"{variant.name}, ECE {format_percent(ece[variant.label])} %" if variant.label in ece else variant.name
        series = (Series(variant, tuple(points)),)
        name = f"reliability {variant.name}"
        found.append(Chart("reliability", name, text, series, x_label="confidence", y_label="accuracy"))
    return found


@dataclass(frozen=True)
class Sweep:
    """The mean accuracy of one method over the values of one option, the others being equal."""

    method: str
    option: str
    values: tuple[Any, ...]
    variants: tuple[Variant, ...]  # at each value
    series: Series  # over the values, or over their indices if they are not numbers

    @property
    def numeric(self) -> bool:
        return all(_is_number(value) for value in self.values)


def option_sweeps(group: ResultGroup) -> list[Sweep]:
    """A sweep for each option of a method in which some of its variants differ, and in nothing else."""
    reached = group.means()
    found: dict[tuple[str, str, str], list[tuple[Any, Variant]]] = defaultdict(list)
    options = {cell.key.options: effective_options(cell.key.option_values) for cell in group.cells}
    for variant in group.variants:
        values = options.get(variant.options)
        if variant.label not in reached or values is None:
            continue
        for name, chosen in values.items():
            rest = str(sorted((n, str(v)) for n, v in values.items() if n != name))
            members = found[variant.method, name, rest]
            if chosen not in [value for value, _ in members]:
                members.append((chosen, variant))
    sweeps = []
    for (method, option, _), members in found.items():
        if len(members) > 1:
            members.sort(key=lambda pair: (0, float(pair[0]), "") if _is_number(pair[0]) else (1, 0.0, str(pair[0])))
            numeric = all(_is_number(value) for value, _ in members)
            points = [mean_point(group, variant, x if numeric else i) for i, (x, variant) in enumerate(members)]
            series = Series(Variant(0, method, method), tuple(points))
            chosen_values, variants = zip(*members, strict=True)
            sweeps.append(Sweep(method, option, chosen_values, variants, series))
    return sweeps


def ablations(group: ResultGroup) -> list[Chart]:
    """Mean accuracy over the values of each option that was varied."""
    found = []
    for sweep in option_sweeps(group):
        option, method = safe_line(sweep.option.replace("_", " ")), safe_line(sweep.method)
        text = f"Accuracy of {method} by {option}, {group.scope}."
        names = () if sweep.numeric else tuple(safe_line(str(value)) for value in sweep.values)
        kind: Kind = "lines" if sweep.numeric else "dots"
        chart = Chart(kind, f"{method} by {option}", text, (sweep.series,), x_label=option, categories=names)
        found.append(chart)
    return found


def by_batch_size(groups: Sequence[ResultGroup]) -> list[Chart]:
    """Mean accuracy by batch size, for groups that differ in nothing else."""
    families: dict[str, list[ResultGroup]] = defaultdict(list)
    for group in sorted(groups, key=lambda group: group.batch_size):
        families[group.heading.replace(f", batch {group.batch_size}", "")].append(group)
    found = []
    for title, members in families.items():
        points: dict[str, list[Point]] = defaultdict(list)
        variants = {variant.label: variant for group in members for variant in group.variants}
        for group in members:
            for label in group.means():
                points[label].append(mean_point(group, variants[label], group.batch_size))
        series = tuple(Series(variants[label], tuple(line)) for label, line in points.items() if len(line) > 1)
        if series:
            text, name = f"Mean accuracy by batch size, {title}.", f"batch size {title}"
            found.append(Chart("lines", name, text, series, x_label="batch size", x_scale="doubling"))
    return found


def mean_point(group: ResultGroup, variant: Variant, x: float) -> Point:
    """The mean accuracy of a variant over all domains, at `x`."""
    entry = group.mean(variant.label)
    return Point(float(x), math.nan if entry.mean is None else entry.mean, entry.half_width)


def domain_series(group: ResultGroup, value: str = "accuracy", *, over: Variant | None = None) -> tuple[Series, ...]:
    """A value of each variant on each domain with its interval, or its gain over the variant `over`.

    Gains omit source, which would compress the scale.
    """
    kept = [v for v in group.variants if over is None or (v.label != over.label and v.method != "source")]
    found = []
    for variant in kept:
        points = []
        for i, domain in enumerate(group.domains):
            seeds = group.seeds_of(variant.label, domain, value)
            entry = aggregate([*seeds.values()])
            if entry.mean is not None and over is None:
                points.append(Point(i, entry.mean, entry.half_width))
            elif entry.mean is not None and over is not None:
                others = group.seeds_of(over.label, domain, value)
                other = aggregate([*others.values()]).mean
                points += [] if other is None else [Point(i, entry.mean - other, paired(seeds, others).half_width)]
        found.append(Series(variant, tuple(points)))
    return tuple(found)


def baseline(group: ResultGroup) -> Variant | None:
    """The variant to compare with: bn, else source; None if neither has finished runs."""
    return next((v for v in reversed(group.baselines) if group.cells_of(v.label)), None)


def running_accuracy(group: ResultGroup, domain: str | None = None) -> list[Series]:
    """Accuracy over the images seen so far, mean over seeds, on one domain or averaged over all."""
    found = []
    for variant in group.variants:
        places = [(variant.label, d) for d in (group.domains if domain is None else [domain])]
        cells = [cell for place in places for cell in group.at.get(place, []) if cell.result.history.samples]
        if not cells or not all(place in group.at for place in places):
            continue
        curves = []
        for cell in cells:
            seen, correct, curve = 0, 0.0, []
            for n, accuracy in zip(cell.result.history.samples, cell.result.history.accuracy, strict=True):
                seen, correct = seen + n, correct + n * accuracy
                if seen:
                    curve.append((float(seen), correct / seen))
            curves.append(curve)
        length = min(map(len, curves))
        means = [tuple(finite_mean(c[i][axis] for c in curves) for axis in (0, 1)) for i in range(length)]
        kept = means[::-1][:: math.ceil(length / MAX_POINTS) or 1][::-1]  # the last point is always kept
        end = group.mean(variant.label) if domain is None else group.entry(variant.label, domain)
        points = [Point(x, y, end.half_width if i == len(kept) - 1 else None) for i, (x, y) in enumerate(kept)]
        found.append(Series(variant, tuple(points)))
    return found


def stream_order(group: ResultGroup) -> list[str]:
    """The domains in the order in which their runs started."""
    first: dict[str, str] = {}
    for cell in group.cells:
        first[cell.key.domain] = min(cell.provenance.started, first.get(cell.key.domain, cell.provenance.started))
    return sorted(first, key=lambda domain: (first[domain], group.domains.index(domain)))


def sequence(group: ResultGroup, value: str = "accuracy", *, over: Variant | None = None) -> list[Series]:
    """A value on the domains in stream order, or its gain over a variant; NaN where missing."""
    found = []
    for series in domain_series(group, value, over=over):
        at = {group.domains[int(point.x)]: point for point in series.points}
        points = [replace(at.get(d, Point(0, math.nan)), x=i) for i, d in enumerate(stream_order(group))]
        found += [Series(series.variant, tuple(points))] if at else []
    return found


def _interval_note(series: Iterable[Series]) -> str:
    known = any(point.error is not None for one in series for point in one.points)
    return " Bars are 95 % intervals over seeds." if known else ""


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
