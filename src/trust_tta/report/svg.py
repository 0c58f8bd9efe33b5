"""Charts as SVG, for the page; `figures` converts the same elements for papers.

Colors come from the page's style sheet, whose pickers hide elements by data-s (method) and data-d (domain).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from xml.etree.ElementTree import Element, tostring

from trust_tta.report.charts import Chart, Point, Series, split_outliers
from trust_tta.report.model import Variant
from trust_tta.report.significance import pareto_front
from trust_tta.report.text import safe, short_name, shortened
from trust_tta.report.theme import OUTLINES, css_class, style_of
from trust_tta.results import format_percent
from trust_tta.results.record import BINS

WIDTH = 560
LANE = 8.5  # pixels between markers that would overlap
MARKER = 11.0  # width of a marker in pixels
MAX_MARKED = 16  # points of a curve with a marker at each


@dataclass(frozen=True)
class Label:
    """The place of a text: left and right edge, and the baseline."""

    left: float
    right: float
    baseline: float


@dataclass(frozen=True)
class Scale:
    """Maps numbers to pixels, linearly or logarithmically; zero on a logarithmic scale is at `start`."""

    low: float
    high: float
    start: float
    end: float
    ticks: tuple[float, ...]
    logarithmic: bool = False
    zero: bool = False

    def __call__(self, x: float) -> float:
        if not self.logarithmic:
            return self.start + (x - self.low) / (self.high - self.low) * (self.end - self.start)
        first = self.start + (self.end - self.start) * (0.12 if self.zero else 0.0)
        if x <= 0:
            return self.start
        position = (math.log(x) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        return first + position * (self.end - first)


def linear_scale(values: Sequence[float], start: float, end: float, *, pad: float = 0.04) -> Scale:
    """A linear scale that covers `values` with a margin, with about five round ticks."""
    finite = [v for v in values if math.isfinite(v)] or [0.0, 1.0]
    low, high = min(finite), max(finite)
    spread = (high - low) or max(abs(high), 0.01) * 0.2
    low, high = low - pad * spread - (high == low) * spread / 2, high + pad * spread + (high == low) * spread / 2
    return Scale(low, high, start, end, round_ticks(low, high, 5))


def log_scale(values: Sequence[float], start: float, end: float) -> Scale:
    """A logarithmic scale over the positive `values`, with ticks at 1, 2 and 5 times powers of ten."""
    positive = [v for v in values if v > 0 and math.isfinite(v)] or [1.0]
    low, high = min(positive) / 1.25, max(positive) * 1.25
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if len(exponents) < 5 else (1,)
    ticks = [m * 10.0**e for e in exponents for m in steps if low <= m * 10.0**e <= high]
    zero = any(v <= 0 for v in values)
    return Scale(low, high, start, end, tuple([0.0] * zero + ticks), logarithmic=True, zero=zero)


def round_ticks(low: float, high: float, count: int) -> tuple[float, ...]:
    """Multiples of 1, 2 or 5 times a power of ten between `low` and `high`."""
    raw = (high - low) / max(count, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return tuple(i * step for i in range(first, math.floor(high / step + 1e-9) + 1))


def number(x: float) -> str:
    """A coordinate with at most two decimals."""
    text = f"{x:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def element(tag: str, *children: Element, **attributes: object) -> Element:
    """An element; `class_` is written "class" and `data_s` "data-s"; an attribute that is None or empty is left out."""
    made = Element(tag)
    for name, value in attributes.items():
        if value not in (None, ""):
            written = number(value) if isinstance(value, float) else safe(str(value))
            made.set(name.rstrip("_").replace("_", "-"), written)
    made.extend(children)
    return made


def line(x1: float, y1: float, x2: float, y2: float, role: str) -> Element:
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=role)


def text(x: float, y: float, content: str, *, anchor: str = "start", role: str = "", angle: int = 0) -> Element:
    """Text anchored at (x, y) on its baseline."""
    turned = f"rotate({angle} {number(x)} {number(y)})" if angle else None
    anchored = anchor if anchor != "start" else None
    made = element("text", x=x, y=y, text_anchor=anchored, class_=role, transform=turned)
    made.text = safe(content)
    return made


def path(points: Sequence[tuple[float, float]], role: str, *, tip: str = "", values: Sequence[str] = ()) -> Element:
    """A polyline, interrupted at NaN; `values` are the tooltips of its points."""
    steps: list[str] = []
    tips: list[str] = []
    pen = "M"
    for i, (x, y) in enumerate(points):
        if math.isfinite(x) and math.isfinite(y):
            steps.append(f"{pen}{number(round(x, 1))} {number(round(y, 1))}")
            tips += [values[i]] if values else []
            pen = "L"
        else:
            pen = "M"
    return element("path", d="".join(steps), class_=role, data_tip=tip, data_at=";".join(tips))


def marker(variant: Variant, x: float, y: float, *, size: float = 5.0, tip: str = "") -> Element:
    style = style_of(variant.method)
    role = f"mark {css_class(variant.method)}{' hollow' if style.hollow else ''}"
    transform = f"translate({number(round(x, 1))} {number(round(y, 1))}) scale({number(size)})"
    outline = OUTLINES[style.shape(variant.number)]
    return element("path", d=outline, transform=transform, class_=role, data_tip=tip)


def document(
    height: float, label: str, children: Sequence[Element], *, width: float = WIDTH, role: str = "", step: float = 0.0
) -> Element:
    """The <svg> element; `step` is the height of its rows, which the page may hide."""
    return element(
        "svg",
        *children,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {number(width)} {number(height)}",
        class_=f"chart {role}".strip(),
        role="img",
        aria_label=label,
        font_size=12,
        data_step=step or None,
    )


def legend_key(variant: Variant) -> str:
    """The marker of a variant alone, for a button or a table row."""
    mark = marker(variant, 9, 9, size=5.5)
    return tostring(element("svg", mark, viewBox="0 0 18 18", class_="key", aria_hidden="true"), encoding="unicode")


def render(chart: Chart) -> str:
    return tostring(draw(chart), encoding="unicode")


def draw(chart: Chart) -> Element:
    """A chart as a tree of SVG elements."""
    kinds = {"dots": _dots, "scatter": _scatter, "lines": _lines, "reliability": _reliability}
    return kinds[chart.kind](chart)


def bottom_axis(scale: Scale, y: float, top: float, title: str, *, unit: float = 1) -> list[Element]:
    """Grid lines, numbers and title of the horizontal axis; `unit` 100 shows fractions in percent."""
    grid = [line(scale(t), top, scale(t), y, "grid") for t in scale.ticks]
    texts = [text(scale(t), y + 16, f"{unit * t:.6g}", anchor="middle", role="tick") for t in scale.ticks]
    return [*grid, *texts, text((scale.start + scale.end) / 2, y + 34, title, anchor="middle", role="axis")]


def left_axis(scale: Scale, x: float, right: float, title: str, *, unit: float = 1) -> list[Element]:
    """Grid lines, numbers and title (above the axis) of the vertical axis."""
    grid = [line(x, scale(t), right, scale(t), "grid") for t in scale.ticks]
    texts = [text(x - 6, scale(t) + 4, f"{unit * t:.6g}", anchor="end", role="tick") for t in scale.ticks]
    return [*grid, *texts, text(8, min(scale.start, scale.end) - 10, title, role="axis")]


def _dots(chart: Chart) -> Element:
    """Rows of dots on one scale, in lanes where they would overlap; the page may hide rows."""
    left, top = min(max(128.0, 6.4 * max(map(len, chart.categories), default=0) + 12), 236.0), 8.0
    points = [(s.variant, p) for s in chart.series for p in s.points if math.isfinite(p.y)]
    scale = linear_scale(_extent(chart.series), left + 10, WIDTH - 14.0)
    rows = [[(v, p) for v, p in points if p.x == i] for i in range(len(chart.categories))]
    lanes = [assign_lanes([scale(p.y) for _, p in row]) for row in rows]
    crowd = max((lane for row in lanes for lane in row), default=0) + 1
    step = max(min(max(330 / max(len(rows), 1), 25.0), 46.0), min(LANE * crowd + 12, 70.0))
    pitch = min(LANE, (step - 12) / crowd)
    bottom, drawn = top + step * len(rows), list[Element]()
    for i, (name, row) in enumerate(zip(chart.categories, rows, strict=True)):
        shapes: list[Element] = [
            line(left, step, WIDTH - 8.0, step, "rail"),
            text(left - 6, step / 2 + 4, shortened(name, int(left / 6.2)), anchor="end", role="label"),
        ]
        middle = step / 2 - pitch * max(lanes[i], default=0) / 2
        for (variant, point), lane in zip(row, lanes[i], strict=True):
            y, on = middle + pitch * lane, "" if name == variant.name else f" on {name}"
            tip = f"{variant.name}{on}: {_value(point)}"
            bar = _interval(variant, point, scale, at=y, horizontal=True)
            shapes.append(element("g", *bar, marker(variant, scale(point.y), y, tip=tip), data_s=variant.index))
        domain = i if chart.rows_of == "domain" else None
        method = row[0][0].index if chart.rows_of == "method" and row else None
        place = f"translate(0 {number(top + step * i)})"
        drawn.append(element("g", *shapes, class_="row", transform=place, data_d=domain, data_s=method))
    axis = element("g", *bottom_axis(scale, bottom, top - 900, chart.y_label, unit=100), class_="under")
    return document(bottom + 42, chart.caption, [axis, *drawn], role="dots", step=step)


def _scatter(chart: Chart) -> Element:
    """Values against a cost, with the Pareto front, and names of points where there is room."""
    height, left, top = 400.0, 44.0, 26.0
    bottom, right = height - 42, WIDTH - 96.0
    series, outliers = split_outliers(chart.series)
    x = log_scale([s.points[0].x for s in series], left + 12, right)
    y = linear_scale(_extent(series), bottom - (16 if outliers else 0), top, pad=0.08)
    places: dict[str, tuple[float, float]] = {}
    for s in series:  # points of equal cost are moved apart, so that their intervals do not overlap
        u = x(s.points[0].x)
        twins = sum(abs(u - x(other.points[0].x)) < 1 for other in series[: len(places)])
        places[s.variant.label] = (u + 5.0 * (twins % 6), y(s.points[0].y))
    front = pareto_front(series, key=lambda s: (s.points[0].x, s.points[0].y))
    shapes = bottom_axis(x, bottom, top - 4, chart.x_label) + left_axis(y, left, right + 8, chart.y_label, unit=100)
    shapes.append(path([places[s.variant.label] for s in front], "frontier"))
    for variants in chart.connected:
        joined = [places[v.label] for v in variants if v.label in places]
        shapes += [path(joined, f"trail {css_class(variants[0].method)}")] if len(joined) > 1 else []
    for s in series:
        (u, v), point = places[s.variant.label], s.points[0]
        tip = f"{s.variant.name}: {_value(point)} at {point.x:.4g} {chart.x_label}"
        bar = _interval(s.variant, point, y, at=u)
        shapes.append(element("g", *bar, marker(s.variant, u, v, size=6, tip=tip), data_s=s.variant.index))
    taken = [Label(u - 7, u + 7, v + 4) for u, v in places.values()]  # no name covers a marker
    taken += [Label(left, right, bottom - 6)] if outliers else []
    for s in sorted(series, key=lambda s: (s.variant.number > 0, places[s.variant.label][1])):
        u, v = places[s.variant.label]
        short = short_name(s.variant.label)
        width = 6.4 * len(short)
        start = u + 10 if u + 10 + width <= WIDTH - 2 else u - 10 - width
        baseline = free_baseline(start, width, v + 4, taken, top=top + 4, bottom=bottom + 8)
        if baseline is not None:
            taken.append(Label(start, start + width, baseline))
            name = text(start, baseline, short, role=f"name {css_class(s.variant.method)}")
            shapes.append(element("g", name, data_s=s.variant.index))
    return document(height, chart.caption, [*shapes, *_outlier_note(outliers, left + 12, bottom - 6)])


def _lines(chart: Chart) -> Element:
    """Curves over numbers, without outliers, or over categories."""
    named = bool(chart.categories)
    height, left, top, right = 300.0 + (58 if named else 20), 44.0, 26.0, WIDTH - 104.0
    bottom = height - (80 if named else 42)
    series, outliers = (list(chart.series), []) if named else split_outliers(chart.series)
    across = [p.x for s in series for p in s.points]
    x = linear_scale(across, left + 8, right, pad=0.01)
    if chart.x_scale == "doubling":
        x = replace(log_scale(across, left + 8, right), ticks=tuple(sorted(set(across))))
    y = linear_scale(_extent(series), bottom - (18 if outliers else 0), top)
    shapes = [] if named else bottom_axis(x, bottom, top, chart.x_label)
    for i, name in enumerate(chart.categories):
        shapes.append(text(x(float(i)), bottom + 14, shortened(name, 16), anchor="end", role="tick", angle=-38))
    shapes += left_axis(y, left, right + 4, chart.y_label, unit=100)
    for i, s in enumerate(series):
        # intervals of several curves are moved to the left, so that they do not overlap
        bars = [bar for p in s.points for bar in _interval(s.variant, p, y, at=x(p.x) - 3.0 * i)]
        shapes.append(element("g", *bars, *_curve(chart, s, x, y), data_s=s.variant.index))
    labeled = sorted(series, key=lambda s: (s.variant.number > 0, -s.mean))[: int((bottom - top) / 11)]
    ends = [next((p.y for p in reversed(s.points) if math.isfinite(p.y)), math.nan) for s in labeled]
    wanted = [y(end) if math.isfinite(end) else bottom for end in ends]
    for s, place in zip(labeled, spread_labels(wanted, 12.5, top, bottom), strict=True):
        role = f"name {css_class(s.variant.method)}"
        label = text(right + 10, place + 4, short_name(s.variant.label, 17), role=role)
        shapes.append(element("g", label, data_s=s.variant.index))
    return document(height, chart.caption, [*shapes, *_outlier_note(outliers, left + 12, bottom - 6)])


def _curve(chart: Chart, series: Series, x: Scale, y: Scale) -> list[Element]:
    """The line of a series, with a marker at each point if there are few."""
    variant, points = series.variant, series.points
    places = [(x(p.x), y(p.y)) for p in points]
    at = [chart.categories[int(p.x)] if chart.categories else f"{p.x:.6g}" for p in points]
    values = [f"{_value(p)} at {where}" for p, where in zip(points, at, strict=True)]
    role = f"curve {css_class(variant.method)} v{min(variant.number, 3)}"
    if len(points) > MAX_MARKED:
        return [path(places, role, tip=variant.name, values=values)]
    marks = [
        marker(variant, u, v, size=4, tip=f"{variant.name}: {value}")
        for (u, v), value in zip(places, values, strict=True)
        if math.isfinite(u) and math.isfinite(v)
    ]
    return [path(places, role), *marks]


def _reliability(chart: Chart) -> Element:
    """Accuracy by confidence and the diagonal; paler bars stand for fewer samples."""
    size, left, top = 190.0, 30.0, 8.0
    bottom, right = size - 34, size - 8
    x, y = Scale(0, 1, left, right, (0.0, 0.5, 1.0)), Scale(0, 1, bottom, top, (0.0, 0.5, 1.0))
    width = x(1 / BINS) - x(0) - 1
    bars = []
    for s in chart.series:
        for p in s.points:
            start, tip = x(p.x - 0.5 / BINS) + 0.5, f"{p.y:.4g}{p.note}"
            box = {"x": start, "y": y(p.y), "width": width, "height": y(0) - y(p.y)}
            role = f"bar {css_class(s.variant.method)}"
            bars.append(element("rect", **box, opacity=p.weight, class_=role, data_tip=tip))
    axes = bottom_axis(x, bottom, top, chart.x_label) + left_axis(y, left, right, "")
    diagonal = line(x(0), y(0), x(1), y(1), "diagonal")
    return document(size, chart.caption, [*axes, *bars, diagonal], width=size, role="small")


def spread_labels(places: Sequence[float], gap: float, top: float, bottom: float) -> list[float]:
    """Places moved to be at least `gap` apart between `top` and `bottom`, in the same order.

    If there is not enough room, they are as far apart as possible.
    """
    order = sorted(range(len(places)), key=lambda i: places[i])
    gap = min(gap, (bottom - top) / max(len(places) - 1, 1))
    moved, lowest, highest = list(places), top, bottom
    for i in order:
        moved[i] = lowest = max(moved[i], lowest)
        lowest += gap
    for i in reversed(order):
        moved[i] = highest = min(moved[i], highest)
        highest -= gap
    return moved


def free_baseline(
    left: float, width: float, baseline: float, taken: Sequence[Label], *, top: float, bottom: float
) -> float | None:
    """The nearest baseline between `top` and `bottom` at which a text overlaps nothing in `taken`, or None."""
    for step in range(0, 28, 3):  # pixels; farther away, a name would seem to belong to another point
        for y in (baseline + step, baseline - step):
            free = all(abs(y - b.baseline) >= 12.5 or left >= b.right or b.left >= left + width for b in taken)
            if free and top <= y <= bottom:
                return y
    return None


def assign_lanes(places: Sequence[float]) -> list[int]:
    """For each marker the lowest lane in which it overlaps no other."""
    lanes, ends = [0] * len(places), list[float]()
    for place, i in sorted((place, i) for i, place in enumerate(places)):
        lane = next((k for k, end in enumerate(ends) if place - end >= MARKER), len(ends))
        ends[lane : lane + 1] = [place]
        lanes[i] = lane
    return lanes


def _extent(series: Sequence[Series]) -> list[float]:
    """The values that a scale must cover; intervals at most double the range of the values."""
    points = [(p.y, p.error) for s in series for p in s.points if math.isfinite(p.y)]
    if not points:
        return []
    low, high = min(y for y, _ in points), max(y for y, _ in points)
    room = max(high - low, 0.01)
    ends = [y + sign * error for y, error in points if error is not None for sign in (-1, 1)]
    return [low, high, *(min(max(end, low - room), high + room) for end in ends)]


def _value(point: Point) -> str:
    """A value in percent, its interval and its note: "70.0 ± 1.0"."""
    known = point.error is not None and math.isfinite(point.error)
    return format_percent(point.y) + (f" ± {format_percent(point.error)}" if known else "") + point.note


def _interval(variant: Variant, point: Point, scale: Scale, *, at: float, horizontal: bool = False) -> list[Element]:
    """The interval of a value along `scale`, cut at the frame."""
    if point.error is None or not math.isfinite(point.error) or not math.isfinite(point.y):
        return []
    first, last = sorted((scale.start, scale.end))
    ends = (scale(v) for v in (point.y - point.error, point.y + point.error))
    low, high = (min(max(end, first - 8), last + 8) for end in ends)
    role = f"whisker {css_class(variant.method)}"
    return [line(low, at, high, at, role) if horizontal else line(at, low, at, high, role)]


def _outlier_note(outliers: Sequence[Series], x: float, y: float) -> list[Element]:
    named = ", ".join(f"{s.variant.name} {format_percent(s.mean)}" for s in outliers)
    return [text(x, y, f"↓ below the frame: {named}", role="tick")] if outliers else []
