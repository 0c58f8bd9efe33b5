"""The parts of a group on the page: its words and its charts; each empty where its data are not there."""

from __future__ import annotations

from trust_tta.report import budget, charts, markup, series
from trust_tta.report.groups import Group
from trust_tta.report.markup import Entry, Line, Runs
from trust_tta.report.palette import display_name, domain_name
from trust_tta.report.published import Published
from trust_tta.report.summary import at_equal_cost, not_compared, summarise
from trust_tta.report.tables import SHORT_LABELS
from trust_tta.results import format_percent, format_value


def words(group: Group) -> str:
    """The summary, its first sentence larger."""
    first, *rest = summarise(group)
    more = f"<p>{markup.prose(' '.join(rest))}</p>" if rest else ""
    return f'<div class="summary"><p class="lead">{markup.prose(first)}</p>{more}</div>'


def pickers(group: Group) -> str:
    """Buttons for methods and domains."""
    look = series.looks(group)
    methods = "".join(markup.chip("ms", i, display_name(label), look[label]) for i, label in enumerate(look))
    domains = "".join(markup.chip("md", i, domain_name(name)) for i, name in enumerate(group.domains))
    every = '<button type="button" class="all" data-all="{}">all</button>'
    box = '<div class="picker" role="group" aria-label="{}"><span class="hint">{}</span>{}</div>'
    parts = [box.format("methods", "methods", every.format("ms") + methods)] if len(look) > 1 else []
    if len(group.domains) > 1:
        parts.append(box.format("domains", "domains", every.format("md") + domains))
    return f'<div class="pickers">{"".join(parts)}</div>' if parts else ""


def by_domain(group: Group) -> str:
    """Accuracy of each method on each domain, and its gain over the first baseline there is."""
    if not group.cells:
        return ""
    names = [domain_name(d) for d in group.domains]
    dots = series.domain_dots(group)
    chart = charts.dot_plot(f"Accuracy by domain: {group.title}", names, dots)
    bars = " Bars are 95 % intervals over seeds." if any(v and v[1] is not None for d in dots for v in d.values) else ""
    shown = [markup.drawing("by domain", f"Accuracy of each method on each domain.{bars}", chart)]
    titles = ["accuracy"]
    found = series.gains(dots)
    if found is not None and found[1]:
        against = display_name(found[0].label)
        chart = charts.dot_plot(f"Gain over {against}: {group.title}", names, found[1], axis="points")
        said = f"Gain of each method over {against} on each domain, in points; the plain source is left out."
        shown.append(markup.drawing("gain by domain", said, chart))
        titles.append(f"gain over {against}")
    return markup.choices("what to show", titles, shown) if len(shown) > 1 else shown[0]


def cost(group: Group) -> str:
    """Accuracy against updates, passes and time."""
    look, found = series.looks(group), series.costs(group)
    if not found:
        return ""
    names, drawn = [], []
    trails = [sweep.labels for sweep in series.sweeps(group) if sweep.numeric]
    kinds = (("updates", "updates a batch"), ("passes", "forward and backward passes a batch"))
    for name, axis in (*kinds, ("milliseconds", "milliseconds an image")):
        spots = []
        for c in found:
            x = getattr(c, name)
            if x is not None:
                hint = f"{display_name(c.row.label)}: {format_percent(c.accuracy)} at {x:.4g} {axis}"
                spots.append(charts.Spot(look[c.row.label], x, c.accuracy, hint))
        if spots:
            names.append({"milliseconds": "time"}.get(name, name))
            chart = charts.scatter(f"Mean accuracy against {axis}: {group.title}", spots, axis=axis, trails=trails)
            said = f"Mean accuracy against {axis}; the dashed line joins those that no other beats in both."
            said += " Coloured lines join runs of a method that differ in one number." if trails else ""
            drawn.append(markup.drawing(f"accuracy against {name}", said, chart))
    return markup.choices("cost", names, drawn)


def equal_cost(group: Group, published: Published, runs: Runs) -> str:
    """Who is ahead at equal updates and in no more time, in words and numbers, and what each method costs."""
    said = " ".join([*not_compared(group), *at_equal_cost(group)])
    tables = [table for table in (budget.duel_table(group, runs), budget.cost_table(group, published, runs)) if table]
    grid = f'<div class="stack">{"".join(tables)}</div>' if tables else ""
    return markup.section("At equal cost" if said else "Cost", grid, note=said)


def stream(group: Group) -> str:
    """Running accuracy along the stream, of the mean over domains and of each."""
    names, drawn = [], []
    several = len(group.domains) > 1
    for domain in [*([None] if several else []), *group.domains]:
        curves = series.running_accuracy(group, domain)
        if not curves or all(len(curve.points) < 2 for curve in curves):
            continue
        name = "mean of all domains" if domain is None else domain_name(domain)
        chart = charts.line_chart(f"Running accuracy, {name}: {group.title}", curves, axis="images seen")
        names.append(name)
        drawn.append(markup.drawing(f"along the stream {name}", f"Accuracy so far along the stream, {name}.", chart))
    return markup.dropdown("domain", names, drawn) if drawn else ""


def before_after(group: Group) -> str:
    """The prediction before the update beside the one after it."""
    before, after = series.means(group, "accuracy_before"), series.means(group)
    look = series.looks(group)
    learns = {c.row.label for c in series.costs(group) if c.updates > 0}
    pairs = [(look[label], before[label], after[label]) for label in look if label in before and label in learns]
    if not pairs:
        return ""
    chart = charts.dumbbells(f"Before and after the update: {group.title}", pairs)
    said = "What predicting after the update gains on the same batches; methods that do not learn are left out."
    return markup.drawing("before and after", said, chart)


def calibration(group: Group, runs: Runs) -> str:
    """ECE, NLL and Brier score, and a reliability diagram for each method."""
    look = series.looks(group)
    values = ("ece", "nll", "brier", "entropy")
    found = {value: series.means(group, value) for value in values}
    lowest = {v: min((format_value(v, x) for x in found[v].values()), key=float, default="") for v in values[:3]}
    lines = []
    for label, its_look in look.items():
        texts = [(v, found[v].get(label)) for v in values]
        if any(x is not None for _, x in texts):
            entries = [Entry(format_value(v, x), x, "", _rank(format_value(v, x), lowest.get(v))) for v, x in texts]
            lines.append(Line(label, tuple(entries), its_look, runs.get(label, ())))
    header = ["method", "ECE in %", "NLL in nats", "Brier score (0 to 2)", "entropy in nats"]
    table = markup.data_table(
        f"calibration {group.title}",
        "Calibration, mean over domains; lower is better, but for the entropy",
        header,
        lines,
    )
    drawn = []
    for label, its_look in look.items():
        bins = series.pooled_reliability(series.row_cells(group, label))
        if sum(bins.count):
            chart = charts.reliability(f"Reliability of {display_name(label)}: {group.title}", its_look, bins)
            said = f"{display_name(label)}, ECE {format_percent(bins.ece)} %"
            figure = markup.drawing(f"reliability {label}", said, chart, role="tiny")
            drawn.append(f'<div data-s="{its_look.index}">{figure}</div>')
    grid = f'<div class="multiples">{"".join(drawn)}</div>' if drawn else ""
    note = (
        "Each diagram pools all domains and seeds, and so does its ECE: accuracy by confidence; on the dashed line the "
        "two agree."
    )
    both = f'<div class="stack">{table if lines else ""}{grid}</div>' if lines or drawn else ""
    return markup.section("Calibration", both, note=note if drawn else "")


def stability(group: Group) -> str:
    """Accuracy domain after domain where nothing resets, and clean accuracy after each."""
    names = [SHORT_LABELS.get(d, domain_name(d)) for d in series.stream_order(group)]
    drawn = []
    if not group.resets and len(names) > 1:
        curves = series.sequence(group, lambda cell: cell.result.accuracy)
        chart = charts.line_chart(f"Stability: {group.title}", curves, axis="", names=names)
        drawn.append(markup.drawing("stability", "Accuracy on one domain after another, without a reset.", chart))
        found = series.relative(curves)
        if found is not None and found[1]:
            against = display_name(found[0].label)
            title = f"Gain over {against} without a reset: {group.title}"
            chart = charts.line_chart(title, found[1], axis="", names=names, measure=f"points over {against}")
            said = f"Gain over {against} on one domain after another: what sinks here does not last."
            drawn.append(markup.drawing("stability gain", said, chart))
    curves = series.sequence(group, lambda cell: cell.result.clean_accuracy)
    if curves:
        title = f"Clean accuracy after each domain: {group.title}"
        chart = charts.line_chart(title, curves, axis="", names=names, measure="clean accuracy in %")
        said = "Accuracy on clean images after each domain: what falls here was forgotten."
        drawn.append(markup.drawing("forgetting", said, chart))
    grid = f'<div class="grid">{"".join(drawn)}</div>' if drawn else ""
    return markup.section("Stability and forgetting", grid)


def ablations(group: Group) -> str:
    """How each option that was varied moves the mean accuracy."""
    drawn = []
    for sweep in series.sweeps(group):
        option = sweep.option.replace("_", " ")
        name = f"{display_name(sweep.method)}: {option}"
        look = charts.Look(0, sweep.method, sweep.method)
        if sweep.numeric:
            curve = charts.Curve(look, tuple((float(x), y) for x, y in sweep.points))
            chart = charts.line_chart(name, [curve], axis=option)
        else:
            dots = charts.Dots(look, tuple((y, None) for _, y in sweep.points))
            chart = charts.dot_plot(name, [str(x) for x, _ in sweep.points], [dots])
        drawn.append(markup.drawing(name, f"Mean accuracy of {display_name(sweep.method)} by {option}.", chart))
    return markup.section("Options that were varied", f'<div class="grid free">{"".join(drawn)}</div>' if drawn else "")


def _rank(text: str, lowest: str | None) -> str:
    return "num best" if lowest and text == lowest else "num"
