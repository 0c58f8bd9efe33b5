"""The page's charts as pure functions: data in, SVG text out; what belongs to a line carries its number in data-s."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape

from trust_tta.report import svg
from trust_tta.report.palette import css_class, display_name, short_name
from trust_tta.report.placing import Box, free_place, frontier, spread_out
from trust_tta.results import Reliability, format_percent

Point = tuple[float, float]


@dataclass(frozen=True)
class Look:
    """Which line of the group a drawing belongs to, and how that line looks."""

    index: int
    label: str
    method: str
    variant: int = 0


@dataclass(frozen=True)
class Dots:
    """The values of one line over the rows of a dot plot: mean and half-width of its interval, None where missing."""

    look: Look
    values: tuple[tuple[float, float | None] | None, ...]


@dataclass(frozen=True)
class Spot:
    """One point of a scatter plot."""

    look: Look
    x: float
    y: float
    hint: str = ""


@dataclass(frozen=True)
class Curve:
    """One curve, with a marker at each point where there are few."""

    look: Look
    points: tuple[Point, ...]


def dot_plot(title: str, rows: Sequence[str], dots: Sequence[Dots], *, axis: str = "accuracy in %") -> str:
    """Rows of dots on one scale; each row is a group of its own, so that the page can take rows out."""
    values = [100 * v[0] for d in dots for v in d.values if v is not None]
    left, top = 128.0, 8.0
    step = min(max(330 / max(len(rows), 1), 25.0), 46.0)
    scale = svg.linear_scale(values, left + 10, svg.WIDTH - 14.0)
    bottom = top + step * len(rows)
    groups = [
        svg.element(
            "g",
            {"class": "row", "data-d": i, "transform": f"translate(0 {svg.number(top + step * i)})"},
            svg.line(left, step / 2, svg.WIDTH - 8.0, step / 2, "rail"),
            svg.words(left - 6, step / 2 + 4, _shorten(row, 20), anchor="end", role="label"),
            *(_dot(d, d.values[i], scale, step / 2, row) for d in dots),
        )
        for i, row in enumerate(rows)
    ]
    axis_part = svg.element("g", {"class": "under"}, svg.bottom_axis(scale, bottom, top - 600, axis))
    return svg.chart(bottom + 42, title, axis_part, *groups, role="dots", step=step)


def scatter(title: str, spots: Sequence[Spot], *, axis: str, trails: Sequence[Sequence[str]] = ()) -> str:
    """Accuracy against a cost; the best for their cost are joined by a line, points are named where there is room.

    `trails` are labels of lines that differ in one option alone: each is joined by a line in its method's colour.
    """
    height, left, top = 400.0, 44.0, 26.0
    bottom, right = height - 42, svg.WIDTH - 96.0
    floor = off_scale([s.y for s in spots])
    below = [s for s in spots if s.y < floor]
    spots = [s for s in spots if s.y >= floor]
    x = svg.log_scale([s.x for s in spots], left + 12, right)
    y = svg.linear_scale([100 * s.y for s in spots], bottom - (16 if below else 0), top, pad=0.08)
    steps = [(x(s.x), y(100 * s.y)) for s in frontier(spots, key=lambda s: (s.x, s.y))]
    marks = [_of(s.look, _marker(s.look, x(s.x), y(100 * s.y), s.hint, 6.0)) for s in spots]
    places = {s.look.label: (x(s.x), y(100 * s.y)) for s in spots}
    taken = [Box(u - 7, u + 7, v + 4) for u, v in places.values()]  # no name covers a marker
    taken += [Box(left, right, bottom - 6)] if below else []
    frame = top + 4, bottom + 8
    texts = _names(spots, list(places.values()), taken, frame)
    names = [_of(s.look, name) for s, name in zip(spots, texts, strict=True)]
    method = {s.look.label: s.look.method for s in spots}
    joined = [[label for label in trail if label in places] for trail in trails]
    lines = [svg.path([places[k] for k in ks], f"trail {css_class(method[ks[0]])}") for ks in joined if len(ks) > 1]
    axes = svg.bottom_axis(x, bottom, top - 4, axis) + svg.left_axis(y, left, right + 8, "accuracy in %")
    said = _below([(s.look, s.y) for s in below], left + 12, bottom - 6)
    return svg.chart(height, title, axes, svg.path(steps, "frontier"), *lines, *marks, *names, said)


def line_chart(
    title: str,
    curves: Sequence[Curve],
    *,
    axis: str,
    percent: bool = True,
    measure: str = "accuracy in %",
    names: Sequence[str] = (),
    doubling: bool = False,
) -> str:
    """Curves over a straight axis, one on which doublings are equal steps, or over the places `names`.

    Over names also what falls far is shown.
    """
    height, left, top, right = 300.0 + (58 if names else 20), 44.0, 26.0, svg.WIDTH - 104.0
    bottom = height - (80 if names else 42)
    factor = 100 if percent else 1
    levels = {c.look.label: _level(c) for c in curves}
    floor = -math.inf if names else off_scale(list(levels.values()))
    below = [(c.look, levels[c.look.label]) for c in curves if levels[c.look.label] < floor]
    curves = [c for c in curves if levels[c.look.label] >= floor]
    across = [p[0] for c in curves for p in c.points]
    x = svg.linear_scale(across, left + 8, right, pad=0.01)
    if doubling:
        x = replace(svg.log_scale(across, left + 8, right), ticks=tuple(sorted(set(across))))
    y = svg.linear_scale([factor * p[1] for c in curves for p in c.points], bottom - (18 if below else 0), top)
    base = _named_axis(x, names, bottom) if names else svg.bottom_axis(x, bottom, top, axis)
    parts = [base, svg.left_axis(y, left, right + 4, measure if percent else axis)]
    parts += [_of(curve.look, _curve(curve, x, y, factor)) for curve in curves]
    named = sorted(curves, key=lambda c: (c.look.variant > 0, -levels[c.look.label]))[: int((bottom - top) / 11)]
    ends = spread_out([_end(curve, y, factor) for curve in named], 12.5, top, bottom)
    for curve, place in zip(named, ends, strict=True):
        text = short_name(curve.look.label, 17)
        name = svg.words(right + 10, place + 4, text, role=f"name {css_class(curve.look.method)}")
        parts.append(_of(curve.look, name))
    return svg.chart(height, title, *parts, _below(below, left + 12, bottom - 6, factor))


def dumbbells(title: str, pairs: Sequence[tuple[Look, float, float]]) -> str:
    """Before (bar) and after (marker) the update, one row a line."""
    left, step, top = 150.0, 27.0, 8.0
    scale = svg.linear_scale([100 * v for _, *both in pairs for v in both], left + 10, svg.WIDTH - 54.0)
    bottom = top + step * len(pairs)
    parts = [svg.bottom_axis(scale, bottom, top, "accuracy in %, before the update (bar) and after (marker)")]
    for i, (look, before, after) in enumerate(pairs):
        y = top + step * (i + 0.5)
        a, b = scale(100 * before), scale(100 * after)
        hint = f"{display_name(look.label)}: {format_percent(before)} before, {format_percent(after)} after"
        drawn = [
            svg.words(left - 6, y + 4, _shorten(display_name(look.label), 22), anchor="end", role="label"),
            svg.line(a, y, b, y, f"link {css_class(look.method)}"),
            svg.line(a, y - 6, a, y + 6, f"link {css_class(look.method)}"),
            _marker(look, b, y, hint, 6.0),
            svg.words(max(a, b) + 11, y + 4, _signed(after - before), role="tick"),
        ]
        parts.append(_of(look, "".join(drawn)))
    return svg.chart(bottom + 42, title, *parts)


def reliability(title: str, look: Look, bins: Reliability) -> str:
    """Accuracy by confidence in 15 bins beside the diagonal; the paler a bar, the fewer samples it stands for."""
    size, left, top = 190.0, 30.0, 8.0
    bottom, right = size - 34, size - 8
    x = svg.Scale(0, 1, left, right, (0.0, 0.5, 1.0))
    y = svg.Scale(0, 1, bottom, top, (0.0, 0.5, 1.0))
    total = max(bins.count) or 1
    bars = []
    for i, (n, sure, good) in enumerate(zip(bins.count, bins.confidence, bins.correct, strict=True)):
        if n == 0:
            continue
        height = y(0) - y(good / n)
        hint = f"{n} samples, mean confidence {sure / n:.3f}, accuracy {good / n:.3f}"
        box: dict[str, object] = {
            "x": x(i / 15) + 0.5,
            "y": y(good / n),
            "width": x(1 / 15) - x(0) - 1,
            "height": height,
        }
        ink = 0.3 + 0.7 * math.sqrt(n / total)
        shape = {**box, "class": f"bar {css_class(look.method)}", "opacity": ink}
        bars.append(svg.element("rect", shape, svg.element("title", {}, hint)))
    axes = svg.bottom_axis(x, bottom, top, "confidence") + svg.left_axis(y, left, right, "")
    diagonal = svg.line(x(0), y(0), x(1), y(1), "diagonal")
    return svg.chart(size, title, axes, *bars, diagonal, width=size, role="small")


def legend_marker(look: Look) -> str:
    """The marker alone, for a button or a table row."""
    mark = svg.marker(look.method, look.variant, 9, 9, size=5.5)
    return svg.element("svg", {"viewBox": "0 0 18 18", "class": "key", "aria-hidden": "true"}, mark)


def off_scale(values: Sequence[float]) -> float:
    """A floor below which values are so far from all others that showing them would squeeze the rest together."""
    order = sorted(v for v in values if math.isfinite(v))
    for cut in range(len(order) // 3, 0, -1):
        gap, spread = order[cut] - order[cut - 1], order[-1] - order[cut]
        if spread > 0 and gap > max(0.8 * spread, 0.02):
            return order[cut]
    return -math.inf


def _below(left_out: Sequence[tuple[Look, float]], x: float, y: float, factor: int = 100) -> str:
    """Names what lies below the frame."""
    if not left_out:
        return ""
    named = ", ".join(f"{display_name(look.label)} {factor * value:.1f}" for look, value in left_out)
    return svg.words(x, y, f"↓ below the frame: {named}", role="tick")


def _curve(curve: Curve, x: svg.Scale, y: svg.Scale, factor: int) -> str:
    places = [(x(u), y(factor * v)) for u, v in curve.points]
    role = f"curve {css_class(curve.look.method)} v{min(curve.look.variant, 3)}"
    drawn = svg.path(places, role, hint=display_name(curve.look.label))
    if len(places) > 16:
        return drawn
    hints = [f"{display_name(curve.look.label)}: {factor * v:.1f} at {svg.tick_text(u)}" for u, v in curve.points]
    marks = [_marker(curve.look, *p, h, 4.0) for p, h in zip(places, hints, strict=True) if _finite(p)]
    return drawn + "".join(marks)


def _end(curve: Curve, y: svg.Scale, factor: int) -> float:
    """The height of the last point that is a number."""
    return y(factor * next((v for _, v in reversed(curve.points) if math.isfinite(v)), y.low / factor))


def _level(curve: Curve) -> float:
    finite = [y for _, y in curve.points if math.isfinite(y)]
    return math.fsum(finite) / len(finite) if finite else math.nan


def _dot(dots: Dots, value: tuple[float, float | None] | None, scale: svg.Scale, y: float, row: str) -> str:
    if value is None:
        return ""
    mean, half = value
    hint = f"{display_name(dots.look.label)} on {row}: {format_percent(mean)}"
    bar = ""
    if half is not None and math.isfinite(half):
        hint += f" ± {format_percent(half)}"
        low, high = (min(max(scale(100 * v), scale.start - 8), scale.end + 8) for v in (mean - half, mean + half))
        bar = svg.line(low, y, high, y, f"whisker {css_class(dots.look.method)}")
    return _of(dots.look, bar + _marker(dots.look, scale(100 * mean), y, hint, 5.2))


def _marker(look: Look, x: float, y: float, hint: str, size: float) -> str:
    return svg.marker(look.method, look.variant, x, y, size=size, hint=hint)


def _of(look: Look, content: str) -> str:
    return svg.element("g", {"data-s": look.index}, content)


def _names(spots: Sequence[Spot], places: Sequence[Point], taken: list[Box], frame: tuple[float, float]) -> list[str]:
    """A name beside each point, moved up or down until it touches nothing else; the best first, none without room."""
    names = [""] * len(spots)
    for i in sorted(range(len(spots)), key=lambda k: (spots[k].look.variant > 0, places[k][1])):
        text = short_name(spots[i].look.label)
        width = 6.4 * len(text)
        left = places[i][0] + 10
        if left + width > svg.WIDTH - 2:
            left = places[i][0] - 10 - width
        y = free_place(left, width, places[i][1] + 4, taken, *frame)
        if y is not None:
            taken.append(Box(left, left + width, y))
            names[i] = svg.words(left, y, text, role=f"name {css_class(spots[i].look.method)}")
    return names


def _named_axis(scale: svg.Scale, names: Sequence[str], y: float) -> str:
    return "".join(slanted(scale(float(i)), y + 14, name, down=True) for i, name in enumerate(names))


def slanted(x: float, y: float, text: str, *, down: bool = False) -> str:
    turn = f"rotate({-38 if down else -50} {svg.number(x)} {svg.number(y)})"
    attributes: dict[str, object] = {
        "x": x,
        "y": y,
        "transform": turn,
        "class": "tick",
        "text-anchor": "end" if down else "start",
    }
    return svg.element("text", attributes, escape(_shorten(text, 16)))


def _shorten(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _signed(difference: float) -> str:
    text = format_percent(difference)
    return f"+{text}" if difference > 0 and text != "0.0" else text


def _finite(point: Point) -> bool:
    return all(math.isfinite(v) for v in point)
