"""The sections of the page: a typed model each, with the name of the template that renders it.

To add one: write a dataclass with its `template` (a file in templates/sections), a function that makes it from a group
or gives None where its data are missing, and put that function into GROUP_SECTIONS, in the order of the page.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from trust_tta.report import charts, order_charts, series
from trust_tta.report.evidence import paired, seed_means
from trust_tta.report.model import Group, Report, Variant
from trust_tta.report.paper import compare, compare_sweeps
from trust_tta.report.published import load_published
from trust_tta.report.summary import at_equal_cost, not_compared, summarize
from trust_tta.report.tables import (
    OURS,
    PUBLISHED,
    DataTable,
    accuracy_table,
    calibration_table,
    cost_table,
    difference_table,
    duel_table,
    over_domains,
    paper_domains_table,
    paper_sweep_table,
    paper_table,
    short_domain,
)
from trust_tta.report.text import domain_name, safe_line
from trust_tta.results import Cell, SamplePrediction, format_percent
from trust_tta.results.order_records import EntropyByOrder, LossSurface, OrderRecord, WeightNorms

MOST_IMAGES = 8  # of a domain
MOST_ABSENT = 40  # cells still to be run that are listed


class Section(Protocol):
    """What the page can show: `template` is a file in templates/sections that renders it as `section`."""

    template: ClassVar[str]


@dataclass(frozen=True)
class Drawing:
    """A chart, its caption, and the name of its file when saved."""

    name: str
    caption: str
    svg: str
    variant: Variant | None = None  # that it goes away with


@dataclass(frozen=True)
class Panel:
    """A titled place for one of several drawings, picked by name from buttons, or from a menu where they are many."""

    title: str
    legend: str
    names: tuple[str, ...]
    drawings: tuple[Drawing, ...]
    menu: bool = False


@dataclass(frozen=True)
class Summary:
    template: ClassVar[str] = "summary.html"
    lead: str
    rest: str


@dataclass(frozen=True)
class Pickers:
    """Buttons that show and hide methods and domains everywhere in the group."""

    template: ClassVar[str] = "pickers.html"
    variants: tuple[Variant, ...]
    domains: tuple[str, ...]


@dataclass(frozen=True)
class Accuracy:
    template: ClassVar[str] = "accuracy.html"
    table: DataTable
    note: str
    failed: tuple[tuple[str, str, str, str], ...]  # name, where, message, digest
    absent: tuple[str, ...]
    counts: str


@dataclass(frozen=True)
class Panels:
    template: ClassVar[str] = "panels.html"
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Tables:
    template: ClassVar[str] = "tables.html"
    title: str
    note: str
    tables: tuple[DataTable, ...]


@dataclass(frozen=True)
class Drawings:
    """Charts side by side; `free` ones do not follow the pickers."""

    template: ClassVar[str] = "drawings.html"
    title: str
    drawings: tuple[Drawing, ...]
    wide: tuple[Drawing, ...] = ()
    free: bool = False


@dataclass(frozen=True)
class Calibration:
    template: ClassVar[str] = "calibration.html"
    note: str
    table: DataTable | None
    drawings: tuple[Drawing, ...]


@dataclass(frozen=True)
class Fate:
    """What one method made of an image: "dog 40% → cat 91%", the class before only where it was another."""

    variant: Variant
    before: str
    after: str
    right: bool


@dataclass(frozen=True)
class Sample:
    index: int
    truth: str
    picture: bytes | None
    fates: tuple[Fate, ...]


@dataclass(frozen=True)
class Gallery:
    """Images of one domain."""

    name: str
    where: str
    samples: tuple[Sample, ...]
    blank: bool  # whether a missing picture is said to be missing


@dataclass(frozen=True)
class Samples:
    template: ClassVar[str] = "samples.html"
    galleries: tuple[Gallery, ...]


@dataclass(frozen=True)
class Paper:
    template: ClassVar[str] = "paper.html"
    note: str
    source: str
    tables: tuple[tuple[DataTable, DataTable | None], ...]  # the means, and domain by domain


def summary(group: Group, _: Report) -> Section:
    lead, *rest = summarize(group)
    return Summary(lead, " ".join(rest))


def pickers(group: Group, _: Report) -> Section:
    return Pickers(group.variants, tuple(map(domain_name, group.domains)))


def accuracy(group: Group, _: Report) -> Section:
    failed = tuple(
        (group.label(f.key), f"{domain_name(f.key.domain)}, seed {f.key.seed}", f.message, f.key.digest[:12])
        for f in group.failures
    )
    absent = [f"{group.label(key)} on {domain_name(key.domain)}, seed {key.seed}" for key in group.absent]
    more = [f"{len(absent) - MOST_ABSENT} more"] if len(absent) > MOST_ABSENT else []
    counts = ", ".join(f"{n} {word}" for n, word in ((len(failed), "failed"), (len(absent), "missing")) if n)
    return Accuracy(accuracy_table(group), _defaults(group), failed, (*absent[:MOST_ABSENT], *more), counts)


def panels(group: Group, _: Report) -> Section | None:
    found = tuple(p for p in (by_domain(group), cost(group), stream(group), before_after(group)) if p is not None)
    return Panels(found) if found else None


def by_domain(group: Group) -> Panel | None:
    """Accuracy of each method on each domain, and its gain over the first baseline there is."""
    if not group.cells:
        return None
    names, dots = [domain_name(d) for d in group.domains], series.domain_dots(group)
    chart = charts.dot_plot(f"Accuracy by domain: {group.title}", names, dots)
    caption = f"Accuracy of each method on each domain.{_bars(dots)}"
    titles, drawn = ["accuracy"], [Drawing("by domain", caption, chart)]
    base = series.baseline(group)
    gains = series.domain_dots(group, over=base) if base is not None else []
    if base is not None and gains:
        chart = charts.dot_plot(f"Gain over {base.name}: {group.title}", names, gains, axis="points")
        caption = f"Gain of each method over {base.name} on each domain, in points; the plain source is left out."
        titles.append(f"gain over {base.name}")
        drawn.append(Drawing("gain by domain", caption + _bars(gains), chart))
    return Panel("By domain", "what to show", tuple(titles), tuple(drawn))


def cost(group: Group) -> Panel | None:
    """Accuracy against updates, passes and time."""
    trails = [sweep.variants for sweep in series.sweeps(group) if sweep.numeric]
    kinds = {"updates": "updates per batch", "passes": "forward and backward passes per batch"}
    names, drawn = [], []
    for name, axis in (*kinds.items(), ("milliseconds", "milliseconds per image")):
        spots = []
        for c in group.costs:
            x, half = getattr(c, name), group.mean(c.variant.label).half_width
            if x is not None:
                around = f" ± {format_percent(half)}" if half is not None else ""
                tip = f"{c.variant.name}: {format_percent(c.accuracy)}{around} at {x:.4g} {axis}"
                spots.append(charts.Spot(c.variant, x, c.accuracy, tip, half))
        if spots:
            chart = charts.scatter(f"Mean accuracy against {axis}: {group.title}", spots, axis=axis, trails=trails)
            said = (
                f"Accuracy, {over_domains(group)}, against {axis}; the dashed line joins what no other beats in both."
            )
            said += " Colored lines join runs of a method that differ in one number." if trails else ""
            said += " Bars are 95 % intervals over seeds." if any(s.half is not None for s in spots) else ""
            names.append("time" if name == "milliseconds" else name)
            drawn.append(Drawing(f"accuracy against {name}", said, chart))
    return Panel("Accuracy against cost", "cost", tuple(names), tuple(drawn)) if drawn else None


def stream(group: Group) -> Panel | None:
    """Running accuracy along the stream, of the mean over domains and of each."""
    names, drawn = [], []
    for domain in [*([None] if len(group.domains) > 1 else []), *group.domains]:
        curves = series.running_accuracy(group, domain)
        if not curves or all(len(curve.points) < 2 for curve in curves):
            continue
        name = "mean of all domains" if domain is None else domain_name(domain)
        chart = charts.line_chart(f"Running accuracy, {name}: {group.title}", curves, axis="images seen")
        bar = " The bar at its end is the 95 % interval over seeds." if any(c.halves[-1] for c in curves) else ""
        names.append(name)
        caption = f"Accuracy so far along the stream, {name}.{bar}"
        drawn.append(Drawing(f"along the stream {name}", caption, chart))
    return Panel("Along the stream", "domain", tuple(names), tuple(drawn), menu=True) if drawn else None


def before_after(group: Group) -> Panel | None:
    """The prediction before the update and the one after it."""
    before, after = group.means("accuracy_before"), group.means()
    learns = {c.variant.label for c in group.costs if c.updates > 0}
    pairs = []
    for variant in group.variants:
        label = variant.label
        if label in before and label in learns:
            gain = paired(seed_means(group, label), seed_means(group, label, "accuracy_before"))
            pairs.append((variant, before[label], after[label], gain.half_width))
    if not pairs:
        return None
    chart = charts.dumbbells(f"Before and after the update: {group.title}", pairs)
    said = "What predicting after the update gains on the same batches; methods that do not learn are left out."
    return Panel("Before and after the update", "", ("",), (Drawing("before and after", said, chart),))


def comparison(group: Group, _: Report) -> Section | None:
    """Whether the runs tell the best method from the others."""
    found = difference_table(group)
    if found is None:
        return None
    tested = any(column.title == "p" for column in found.columns)
    note = "± is the 95 % interval of the difference, paired seed by seed."
    if tested:
        note += (
            " The counts are images that only one of the two has right, averaged over seeds; p is the probability of "
            "so uneven a split if neither were better (McNemar's exact test). Below 0.05 the two count as told apart."
        )
    return Tables("Who is ahead, and how sure that is", note, (found,))


def equal_cost(group: Group, _: Report) -> Section | None:
    """Who is ahead at equal updates and in no more time, and what each method costs."""
    said = " ".join([*not_compared(group), *at_equal_cost(group)])
    tables = tuple(t for t in (duel_table(group), cost_table(group, load_published())) if t is not None)
    return Tables("At equal cost" if said else "Cost", said, tables) if tables else None


def stability(group: Group, _: Report) -> Section | None:
    """Accuracy domain after domain where nothing resets, and clean accuracy after each."""
    names = [short_domain(d) for d in series.stream_order(group)]
    drawn = []
    if not group.resets and len(names) > 1:
        curves = series.sequence(group)
        chart = charts.line_chart(f"Stability: {group.title}", curves, axis="", names=names)
        drawn.append(Drawing("stability", "Accuracy on one domain after another, without a reset.", chart))
        base = series.baseline(group)
        relative = series.sequence(group, over=base) if base is not None else []
        if base is not None and relative:
            title = f"Gain over {base.name} without a reset: {group.title}"
            chart = charts.line_chart(title, relative, axis="", names=names, measure=f"points over {base.name}")
            said = f"Gain over {base.name} on one domain after another: what sinks here does not last."
            drawn.append(Drawing("stability gain", said, chart))
    curves = series.sequence(group, "clean_accuracy")
    if curves:
        title = f"Clean accuracy after each domain: {group.title}"
        chart = charts.line_chart(title, curves, axis="", names=names, measure="clean accuracy in %")
        said = "Accuracy on clean images after each domain: what falls here was forgotten."
        drawn.append(Drawing("forgetting", said, chart))
    return Drawings("Stability and forgetting", tuple(drawn)) if drawn else None


def calibration(group: Group, _: Report) -> Section | None:
    """ECE, NLL and Brier score, and a reliability diagram for each method."""
    table, drawn, ece = calibration_table(group), [], group.means("ece")
    for variant in group.variants:
        bins = series.pooled_reliability(group.cells_of(variant.label))
        if sum(bins.count):
            chart = charts.reliability(f"Reliability of {variant.name}: {group.title}", variant, bins)
            score = f", ECE {format_percent(ece[variant.label])} %" if variant.label in ece else ""
            drawn.append(Drawing(f"reliability {variant.name}", f"{variant.name}{score}", chart, variant))
    note = (
        "ECE is the expected calibration error of a run in 15 bins of confidence; shown is its mean over domains and "
    )
    note += "seeds. A diagram adds up the bins of all runs: accuracy by confidence; on the dashed line the two agree."
    return Calibration(note, table, tuple(drawn)) if table or drawn else None


def ablations(group: Group, _: Report) -> Section | None:
    """How each option that was varied moves the mean accuracy."""
    drawn = []
    for sweep in series.sweeps(group):
        option = safe_line(sweep.option.replace("_", " "))
        variant = Variant(0, sweep.method, sweep.method)
        name = f"{variant.name}: {option}"
        if sweep.numeric:
            points, halves = (
                tuple((float(x), y) for x, (y, _) in sweep.points),
                tuple(h for _, (_, h) in sweep.points),
            )
            chart = charts.line_chart(name, [series.Curve(variant, points, halves)], axis=option)
        else:
            dots = series.Dots(variant, tuple(value for _, value in sweep.points))
            chart = charts.dot_plot(name, [safe_line(str(x)) for x, _ in sweep.points], [dots])
        said = f"Accuracy of {variant.name} by {option}, {over_domains(group)}."
        drawn.append(Drawing(name, said, chart))
    return Drawings("Options that were varied", tuple(drawn), free=True) if drawn else None


def samples(group: Group, report: Report) -> Section | None:
    """The first images that were kept of each domain, of the first seed."""
    galleries = []
    classes = report.class_names.get(group.dataset, ())
    for domain in group.domains:
        cells = _kept(group, domain)
        indices = sorted({p.index for cell in cells.values() for p in cell.result.predictions})[:MOST_IMAGES]
        if indices:
            first = next(iter(cells.values())).key
            pictures = {index: report.pictures.get((first.fingerprint, index)) for index in indices}
            where = domain_name(domain) + (f", severity {first.severity}" if first.severity is not None else "")
            shown = tuple(_sample(index, content, cells, classes) for index, content in pictures.items())
            galleries.append(Gallery(domain_name(domain), where, shown, blank=any(pictures.values())))
    return Samples(tuple(galleries)) if galleries else None


def paper(group: Group, _: Report) -> Section | None:
    """Every published table that this group has a counterpart of."""
    published = load_published()
    tables = tuple(
        (paper_table(group, found), paper_domains_table(group, found) if found.item.columns == "domain" else None)
        for found in compare(group, published)
    )
    note = (
        f"“{PUBLISHED}” is what the paper prints, for {published.network} on its own data; “{OURS}” is the network and "
        "data of this report. They are different experiments: compare the gains rather than the levels."
    )
    return Paper(note, f"Published numbers: {published.paper}.", tables) if tables else None


GROUP_SECTIONS: tuple[Callable[[Group, Report], Section | None], ...] = (
    summary,
    pickers,
    accuracy,
    panels,
    comparison,
    equal_cost,
    stability,
    calibration,
    ablations,
    samples,
    paper,
)


def group_sections(group: Group, report: Report) -> list[Section]:
    """What the page shows of a group."""
    return [section for make in GROUP_SECTIONS if (section := make(group, report)) is not None]


def across_sections(groups: Sequence[Group]) -> list[Section]:
    """What compares groups with each other."""
    drawn = []
    for sizes in series.batch_size_curves(groups):
        chart = charts.line_chart(f"Batch size: {sizes.title}", sizes.curves, axis="batch size", doubling=True)
        drawn.append(Drawing("batch size", f"Mean accuracy by batch size, {sizes.title}.", chart))
    curves = tuple(paper_sweep_table(pair) for pair in compare_sweeps(groups, load_published()))
    found: list[Section] = [Drawings("Batch size", tuple(drawn), free=True)] if drawn else []
    return [*found, *([Tables("Curves next to the paper's", "", curves)] if curves else [])]


def order_sections(records: Sequence[OrderRecord]) -> list[Section]:
    """What was found out about scan orders; the entropy of several data sets is one map."""
    maps = [r for r in records if isinstance(r, EntropyByOrder)]
    said = "Mean prediction entropy of each traversal order in nats; the orders chosen in each row are framed."
    title = "Mean entropy by order"
    wide = (Drawing("entropy by order", said, order_charts.heat_map(title, maps)),) if maps else ()
    drawn = []
    for record in records:
        if isinstance(record, LossSurface):
            said = f"{record.title}: loss on the plane through adapted networks (triangles) and their mean (star)."
            drawn.append(Drawing(record.title, said, order_charts.loss_surface(record)))
        elif isinstance(record, WeightNorms):
            said = f"{record.title}: norms of adapted tensors over orders."
            drawn.append(Drawing(record.title, said, order_charts.weight_norms(record)))
        elif not isinstance(record, EntropyByOrder):
            said = f"{record.title}: peak memory by number of orders."
            drawn.append(Drawing(record.title, said, order_charts.memory_by_k(record)))
    return [Drawings("What orders do", tuple(drawn), wide, free=True)] if wide or drawn else []


def _bars(dots: Sequence[series.Dots]) -> str:
    known = any(value is not None and value[1] is not None for d in dots for value in d.values)
    return " Bars are 95 % intervals over seeds." if known else ""


def _defaults(group: Group) -> str:
    """What a method without brackets stands for, where other lines of it have brackets."""
    said = []
    for variant in group.variants:
        others = [v for v in group.variants if v.method == variant.method and v is not variant]
        if variant.label == variant.method and others:
            values: dict[str, Any] = json.loads(variant.options)
            varied = [n for n in sorted(values) if any(json.loads(o.options).get(n) != values[n] for o in others)]
            said.append(f"{variant.name} alone: {', '.join(f'{n}={values[n]}' for n in varied)}.")
    return " ".join(said)


def _kept(group: Group, domain: str) -> dict[Variant, Cell]:
    """A cell of each line that kept predictions, all of the same stream: that of the first seed that has any."""
    found = [
        (cell.key.seed, variant, cell)
        for variant in group.variants
        for cell in group.at.get((variant.label, domain), [])
        if cell.result.predictions
    ]
    first = min(found, key=lambda item: item[0], default=None)
    same = [item for item in found if first is not None and item[2].key.fingerprint == first[2].key.fingerprint]
    return {variant: cell for _, variant, cell in same}


def _sample(index: int, picture: bytes | None, cells: Mapping[Variant, Cell], classes: Sequence[str]) -> Sample:
    found = [(v, p) for v, cell in cells.items() for p in cell.result.predictions if p.index == index]
    return Sample(index, _class(found[0][1].label, classes), picture, tuple(_fate(v, p, classes) for v, p in found))


def _fate(variant: Variant, p: SamplePrediction, classes: Sequence[str]) -> Fate:
    after, before = f"{_class(p.after, classes)} {_percent(p.confidence)}".strip(), ""
    if p.before is not None and p.before != p.after:
        before = f"{_class(p.before, classes)} {_percent(p.confidence_before)}".strip() + " →"
    elif p.confidence_before is not None and _percent(p.confidence_before) != _percent(p.confidence):
        before = f"{_percent(p.confidence_before)} →"
    return Fate(variant, before, after, p.after == p.label)


def _percent(confidence: float | None) -> str:
    return f"{confidence:.0%}" if confidence is not None and math.isfinite(confidence) else ""


def _class(label: int, classes: Sequence[str]) -> str:
    if label < 0:
        return "no number"
    return classes[label] if label < len(classes) else f"class {label}"
