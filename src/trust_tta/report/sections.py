"""What the page shows below the table of a group: panels of charts, sections, sample images, the paper's numbers.

To add a section: write a function that makes it from a group, or gives None where its data are missing, and put that
function into GROUP_SECTIONS, in the order of the page.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from trust_tta.report import charts, order_charts, series, tables
from trust_tta.report.model import Group, Report, Variant
from trust_tta.report.paper import compare, compare_sweeps
from trust_tta.report.published import load_published
from trust_tta.report.significance import paired, seed_means
from trust_tta.report.summary import at_equal_cost, not_compared
from trust_tta.report.tables import DataTable, over_domains
from trust_tta.report.text import domain_name, safe_line
from trust_tta.results import Reliability, SamplePrediction, format_percent
from trust_tta.results.order_records import EntropyByOrder, LossSurface, MemoryByK, OrderRecord, WeightNorms

MOST_IMAGES = 8  # of a domain
BARS = " Bars are 95 % intervals over seeds."
COSTS = {
    "updates": "updates per batch",
    "passes": "forward and backward passes per batch",
    "milliseconds": "milliseconds per image",
}

ORDER_CHARTS: dict[type[OrderRecord], tuple[str, Callable[[Any], str]]] = {
    LossSurface: (
        "loss on the plane through adapted networks (triangles) and their mean (star)",
        order_charts.loss_surface,
    ),
    WeightNorms: ("norms of adapted tensors over orders", order_charts.weight_norms),
    MemoryByK: ("peak memory by number of orders", order_charts.memory_by_k),
}


@dataclass(frozen=True)
class Drawing:
    """A chart, its caption, the file name when saved, and the name by which a panel offers it."""

    name: str
    caption: str
    svg: str
    choice: str = ""
    variant: Variant | None = None  # with which it is hidden


@dataclass(frozen=True)
class Panel:
    """A titled place for one of several drawings, chosen with buttons, or from a menu if there are many."""

    title: str
    legend: str
    drawings: Sequence[Drawing]
    menu: bool = False


@dataclass(frozen=True)
class Section:
    """A note, tables one above the other, then drawings: small ones, wide ones, and others side by side."""

    title: str
    note: str = ""
    tables: Sequence[DataTable] = ()
    small: Sequence[Drawing] = ()
    wide: Sequence[Drawing] = ()
    drawings: Sequence[Drawing] = ()
    free: bool = False  # independent of the pickers of methods and domains


@dataclass(frozen=True)
class Gallery:
    """Images of one domain by index: their pictures as far as they were kept, and what each line predicted."""

    name: str
    where: str
    pictures: dict[int, bytes | None]
    predictions: dict[int, list[tuple[Variant, SamplePrediction]]]


def panels(group: Group) -> list[Panel]:
    """The charts that every group has; those without data are left out."""
    found = [
        Panel("By domain", "what to show", by_domain(group)),
        Panel("Accuracy against cost", "cost", cost(group)),
        Panel("Along the stream", "domain", stream(group), menu=True),
        Panel("Before and after the update", "", before_after(group)),
    ]
    return [panel for panel in found if panel.drawings]


def by_domain(group: Group) -> list[Drawing]:
    """Accuracy of each method on each domain, and its gain over the first baseline there is."""
    names, dots = [domain_name(d) for d in group.domains], series.domain_dots(group)
    if not group.cells:
        return []
    chart = charts.dot_plot(f"Accuracy by domain: {group.title}", names, dots)
    drawn = [Drawing("by domain", f"Accuracy of each method on each domain.{_bars(dots)}", chart, "accuracy")]
    base = series.baseline(group)
    gains = series.domain_dots(group, over=base) if base is not None else []
    if base is not None and gains:
        chart = charts.dot_plot(f"Gain over {base.name}: {group.title}", names, gains, axis="points")
        said = f"Gain of each method over {base.name} on each domain, in points; the plain source is left out."
        drawn.append(Drawing("gain by domain", said + _bars(gains), chart, f"gain over {base.name}"))
    return drawn


def cost(group: Group) -> list[Drawing]:
    """Accuracy against updates, passes and time."""
    trails = [sweep.variants for sweep in series.sweeps(group) if sweep.numeric]
    drawn = []
    for name, axis in COSTS.items():
        found = [(c, getattr(c, name), group.mean(c.variant.label).half_width) for c in group.costs]
        spots = [charts.Spot(c.variant, x, c.accuracy, half) for c, x, half in found if x is not None]
        if spots:
            chart = charts.scatter(f"Mean accuracy against {axis}: {group.title}", spots, axis=axis, trails=trails)
            said = (
                f"Accuracy, {over_domains(group)}, against {axis}; the dashed line joins what no other beats in both."
            )
            said += " Colored lines join runs of a method that differ in one number." if trails else ""
            said += BARS if any(s.half is not None for s in spots) else ""
            choice = "time" if name == "milliseconds" else name
            drawn.append(Drawing(f"accuracy against {name}", said, chart, choice))
    return drawn


def stream(group: Group) -> list[Drawing]:
    """Running accuracy along the stream, of the mean over domains and of each."""
    drawn = []
    for domain in [*([None] if len(group.domains) > 1 else []), *group.domains]:
        curves = series.running_accuracy(group, domain)
        if any(len(curve.points) > 1 for curve in curves):
            name = "mean of all domains" if domain is None else domain_name(domain)
            chart = charts.line_chart(f"Running accuracy, {name}: {group.title}", curves, axis="images seen")
            said = f"Accuracy so far along the stream, {name}."
            said += " The bar at its end is the 95 % interval over seeds." if any(c.halves[-1] for c in curves) else ""
            drawn.append(Drawing(f"along the stream {name}", said, chart, name))
    return drawn


def before_after(group: Group) -> list[Drawing]:
    """The prediction before the update and the one after it."""
    before, after = group.means("accuracy_before"), group.means()
    pairs = []
    for c in group.costs:
        label = c.variant.label
        if label in before and c.updates > 0:
            gain = paired(seed_means(group, label), seed_means(group, label, "accuracy_before"))
            pairs.append((c.variant, before[label], after[label], gain.half_width))
    chart = charts.dumbbells(f"Before and after the update: {group.title}", pairs)
    said = "What predicting after the update gains on the same batches; methods that do not learn are left out."
    return [Drawing("before and after", said, chart)] if pairs else []


def comparison(group: Group) -> Section | None:
    """Whether the runs tell the best method from the others."""
    found = tables.difference_table(group)
    if found is None:
        return None
    note = "± is the 95 % interval of the difference, paired seed by seed."
    if any(column.title == "p" for column in found.columns):
        note += (
            " The counts are images that only one of the two has right, averaged over seeds; p is the probability of "
            "so uneven a split if neither were better (McNemar's exact test). Below 0.05 the two count as told apart."
        )
    return Section("Who is ahead, and how sure that is", note, [found])


def equal_cost(group: Group) -> Section | None:
    """Who is ahead at equal updates and in no more time, and what each method costs."""
    said = " ".join([*not_compared(group), *at_equal_cost(group)])
    found = [t for t in (tables.duel_table(group), tables.cost_table(group, load_published())) if t is not None]
    return Section("At equal cost" if said else "Cost", said, found) if found else None


def stability(group: Group) -> Section | None:
    """Accuracy domain after domain where nothing resets, and clean accuracy after each."""
    names = [tables.short_domain(d) for d in series.stream_order(group)]
    drawn = []

    def draw(name: str, title: str, said: str, curves: Sequence[series.Curve], measure: str = "accuracy in %") -> None:
        if curves:
            chart = charts.line_chart(f"{title}: {group.title}", curves, axis="", names=names, measure=measure)
            drawn.append(Drawing(name, said, chart))

    if not group.resets and len(names) > 1:
        said = "Accuracy on one domain after another, without a reset."
        draw("stability", "Stability", said, series.sequence(group))
        base = series.baseline(group)
        if base is not None:
            title = f"Gain over {base.name} without a reset"
            said = f"Gain over {base.name} on one domain after another: what sinks here does not last."
            draw("stability gain", title, said, series.sequence(group, over=base), f"points over {base.name}")
    title, curves = "Clean accuracy after each domain", series.sequence(group, "clean_accuracy")
    said = "Accuracy on clean images after each domain: what falls here was forgotten."
    draw("forgetting", title, said, curves, "clean accuracy in %")
    return Section("Stability and forgetting", drawings=drawn) if drawn else None


def calibration(group: Group) -> Section | None:
    """ECE, NLL and Brier score, and a reliability diagram for each method."""
    table, drawn, ece = tables.calibration_table(group), [], group.means("ece")
    for variant in group.variants:
        bins = Reliability.total(cell.result.reliability for cell in group.cells_of(variant.label))
        if sum(bins.count):
            chart = charts.reliability(f"Reliability of {variant.name}: {group.title}", variant, bins)
            score = f", ECE {format_percent(ece[variant.label])} %" if variant.label in ece else ""
            drawn.append(Drawing(f"reliability {variant.name}", f"{variant.name}{score}", chart, variant=variant))
    note = (
        "ECE is the expected calibration error of a run in 15 bins of confidence; shown is its mean over domains and "
        "seeds. A diagram adds up the bins of all runs: accuracy by confidence; on the dashed line the two agree."
    )
    return Section("Calibration", note, [table] if table else [], small=drawn) if table or drawn else None


def ablations(group: Group) -> Section | None:
    """How each option that was varied moves the mean accuracy."""
    drawn = []
    for sweep in series.sweeps(group):
        option, variant = safe_line(sweep.option.replace("_", " ")), sweep.curve.variant
        name = f"{variant.name}: {option}"
        if sweep.numeric:
            chart = charts.line_chart(name, [sweep.curve], axis=option)
        else:
            dots = series.Dots(variant, tuple(value for _, value in sweep.points))
            chart = charts.dot_plot(name, [safe_line(str(x)) for x, _ in sweep.points], [dots])
        drawn.append(Drawing(name, f"Accuracy of {variant.name} by {option}, {over_domains(group)}.", chart))
    return Section("Options that were varied", drawings=drawn, free=True) if drawn else None


GROUP_SECTIONS = (comparison, equal_cost, stability, calibration, ablations)


def group_sections(group: Group) -> list[Section]:
    """What the page shows of a group between its panels and its sample images."""
    return [section for make in GROUP_SECTIONS if (section := make(group)) is not None]


def galleries(group: Group, report: Report) -> list[Gallery]:
    """The first images that were kept of each domain, all of one stream: that of the first seed that has any."""
    found = []
    for domain in group.domains:
        cells = [(v, cell) for v in group.variants for cell in group.at.get((v.label, domain), [])]
        kept = [(v, cell) for v, cell in cells if cell.result.predictions]
        if kept:
            first = min((cell.key for _, cell in kept), key=lambda key: key.seed)
            predictions: dict[int, list[tuple[Variant, SamplePrediction]]] = defaultdict(list)
            for variant, cell in kept:
                for prediction in cell.result.predictions if cell.key.fingerprint == first.fingerprint else ():
                    predictions[prediction.index].append((variant, prediction))
            pictures = {i: report.pictures.get((first.fingerprint, i)) for i in sorted(predictions)[:MOST_IMAGES]}
            where = domain_name(domain) + (f", severity {first.severity}" if first.severity is not None else "")
            found.append(Gallery(domain_name(domain), where, pictures, predictions))
    return found


def paper_tables(group: Group) -> list[tuple[DataTable, DataTable | None]]:
    """Every published table that this group has a counterpart of: the means, and domain by domain."""
    return [
        (
            tables.paper_table(group, found),
            tables.paper_domains_table(group, found) if found.item.columns == "domain" else None,
        )
        for found in compare(group, load_published())
    ]


def across_sections(groups: Sequence[Group]) -> list[Section]:
    """What compares groups with each other."""
    drawn = []
    for sizes in series.batch_size_curves(groups):
        chart = charts.line_chart(f"Batch size: {sizes.title}", sizes.curves, axis="batch size", doubling=True)
        drawn.append(Drawing("batch size", f"Mean accuracy by batch size, {sizes.title}.", chart))
    curves = [tables.paper_sweep_table(pair) for pair in compare_sweeps(groups, load_published())]
    found = [Section("Batch size", drawings=drawn, free=True), Section("Curves next to the paper's", tables=curves)]
    return [section for section in found if section.drawings or section.tables]


def order_sections(records: Sequence[OrderRecord]) -> list[Section]:
    """What was found out about scan orders; the entropy of several data sets is one map."""
    maps = [r for r in records if isinstance(r, EntropyByOrder)]
    said = "Mean prediction entropy of each traversal order in nats; the orders chosen in each row are framed."
    heat = order_charts.heat_map("Mean entropy by order", maps) if maps else ""
    wide = [Drawing("entropy by order", said, heat)] if maps else []
    drawn = []
    for record in records:
        if type(record) in ORDER_CHARTS:
            said, draw = ORDER_CHARTS[type(record)]
            drawn.append(Drawing(record.title, f"{record.title}: {said}.", draw(record)))
    return [Section("What orders do", wide=wide, drawings=drawn, free=True)] if records else []


def defaults_note(group: Group) -> str:
    """What a method without brackets stands for, where other lines of it have brackets."""
    said = []
    for variant in group.variants:
        others = [v for v in group.variants if v.method == variant.method and v is not variant]
        if variant.label == variant.method and others:
            values: dict[str, Any] = json.loads(variant.options)
            varied = [n for n in sorted(values) if any(json.loads(o.options).get(n) != values[n] for o in others)]
            said.append(f"{variant.name} alone: {', '.join(f'{n}={values[n]}' for n in varied)}.")
    return " ".join(said)


def _bars(dots: Sequence[series.Dots]) -> str:
    return BARS if any(value and value[1] is not None for d in dots for value in d.values) else ""
