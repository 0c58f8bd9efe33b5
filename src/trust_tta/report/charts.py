"""The page's charts as pure functions: data in, SVG text out; what belongs to a line carries its number in data-s."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import zip_longest

from trust_tta.report import svg
from trust_tta.report.model import Variant
from trust_tta.report.series import Curve, Dots, Point, Value, finite_mean
from trust_tta.report.significance import frontier
from trust_tta.report.text import safe, shortened
from trust_tta.report.theme import css_class
from trust_tta.results import Reliability, format_gain, format_percent

LANE = 8.5  # pixels between markers that would cover each other
MARKER = 11.0  # pixels that a marker takes


@dataclass(frozen=True)
class Spot:
    """One point of a scatter plot; `half` is the half-width of its interval."""

    variant: Variant
    x: float
    y: float
    half: float | None = None


@dataclass(frozen=True)
class Box:
    """An occupied rectangle: left and right edge, and the baseline of a line of text."""

    left: float
    right: float
    baseline: float


def dot_plot(title: str, rows: Sequence[str], dots: Sequence[Dots], *, axis: str = "accuracy in %") -> str:
    """Rows of dots on one scale, side by side where they would overlap; the page may hide rows."""
    left, top = 128.0, 8.0
    scale = svg.linear_scale(_reach([v for d in dots for v in d.values if v is not None]), left + 10, svg.WIDTH - 14.0)
    lanes = [_lanes([(v := d.values[i]) and scale(100 * v[0]) for d in dots]) for i in range(len(rows))]
    crowd = max((lane for row in lanes for lane in row), default=0) + 1
    step = max(min(max(330 / max(len(rows), 1), 25.0), 46.0), min(LANE * crowd + 12, 70.0))
    pitch = min(LANE, (step - 12) / crowd)
    bottom = top + step * len(rows)
    drawn = []
    for i, row in enumerate(rows):
        middle = step / 2 - pitch * max(lanes[i], default=0) / 2
        marks = [
            _dot(d, d.values[i], scale, middle + pitch * lane, row) for d, lane in zip(dots, lanes[i], strict=True)
        ]
        place = {"class": "row", "data-d": i, "transform": f"translate(0 {svg.number(top + step * i)})"}
        rail = svg.line(left, step, svg.WIDTH - 8.0, step, "rail")
        name = svg.words(left - 6, step / 2 + 4, shortened(row, 20), anchor="end", role="label")
        drawn.append(svg.element("g", place, rail, name, *marks))
    under = svg.element("g", {"class": "under"}, svg.bottom_axis(scale, bottom, top - 900, axis))
    return svg.chart(bottom + 42, title, under, *drawn, role="dots", step=step)


def scatter(title: str, spots: Sequence[Spot], *, axis: str, trails: Sequence[Sequence[Variant]] = ()) -> str:
    """Accuracy against a cost; a line joins the best for their cost, and points are named where there is room.

    `trails` are lines that differ in one option alone: each trail is joined by a line in its method's color.
    """
    height, left, top = 400.0, 44.0, 26.0
    bottom, right = height - 42, svg.WIDTH - 96.0
    floor = off_scale([s.y for s in spots])
    below = [(s.variant, s.y) for s in spots if s.y < floor]
    spots = [s for s in spots if s.y >= floor]
    x = svg.log_scale([s.x for s in spots], left + 12, right)
    y = svg.linear_scale(_reach([(s.y, s.half) for s in spots]), bottom - (16 if below else 0), top, pad=0.08)
    places = _side_by_side({s.variant.label: (x(s.x), y(100 * s.y)) for s in spots})
    steps = [places[s.variant.label] for s in frontier(spots, key=lambda s: (s.x, s.y))]
    marks = []
    for s, place in zip(spots, places.values(), strict=True):
        tip = f"{s.variant.name}: {format_percent(s.y)}{_around(s.half)} at {s.x:.4g} {axis}"
        bar = _whisker(s.variant, place[0], (s.y, s.half), y)
        marks.append(_of(s.variant, bar + svg.marker(s.variant, place, size=6, tip=tip)))
    taken = [Box(u - 7, u + 7, v + 4) for u, v in places.values()]  # no name covers a marker
    taken += [Box(left, right, bottom - 6)] if below else []
    names = _names(spots, list(places.values()), taken, (top + 4, bottom + 8))
    joined = [[v for v in trail if v.label in places] for trail in trails]
    lines = [
        svg.path([places[v.label] for v in vs], f"trail {css_class(vs[0].method)}") for vs in joined if len(vs) > 1
    ]
    axes = svg.bottom_axis(x, bottom, top - 4, axis) + svg.left_axis(y, left, right + 8, "accuracy in %")
    said = _below(below, left + 12, bottom - 6)
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
    levels = {c.variant.label: finite_mean(y for _, y in c.points) for c in curves}
    floor = -math.inf if names else off_scale(list(levels.values()))
    below = [(c.variant, levels[c.variant.label]) for c in curves if levels[c.variant.label] < floor]
    curves = [c for c in curves if levels[c.variant.label] >= floor]
    across = [p[0] for c in curves for p in c.points]
    x = svg.linear_scale(across, left + 8, right, pad=0.01)
    if doubling:
        x = replace(svg.log_scale(across, left + 8, right), ticks=tuple(sorted(set(across))))
    reach = _reach([(p[1], half) for c in curves for p, half in _with_halves(c)], factor)
    y = svg.linear_scale(reach, bottom - (18 if below else 0), top)
    base = svg.bottom_axis(x, bottom, top, axis)
    if names:
        base = "".join(slanted(x(float(i)), bottom + 14, name, down=True) for i, name in enumerate(names))
    parts = [base, svg.left_axis(y, left, right + 4, measure if percent else axis)]
    parts += [
        _of(c.variant, _bars(c, x, y, factor, 3.0 * i) + _curve(c, x, y, factor, names)) for i, c in enumerate(curves)
    ]
    named = sorted(curves, key=lambda c: (c.variant.number > 0, -levels[c.variant.label]))[: int((bottom - top) / 11)]
    ends = spread_out([_end(curve, y, factor) for curve in named], 12.5, top, bottom)
    for curve, place in zip(named, ends, strict=True):
        name = svg.words(right + 10, place + 4, curve.variant.short(17), role=f"name {css_class(curve.variant.method)}")
        parts.append(_of(curve.variant, name))
    return svg.chart(height, title, *parts, _below(below, left + 12, bottom - 6, factor))


def dumbbells(title: str, pairs: Sequence[tuple[Variant, float, float, float | None]]) -> str:
    """Before (bar) and after (marker) the update, one row per line; the fourth is the interval of the gain."""
    left, step, top = 150.0, 27.0, 8.0
    reach = _reach([v for _, before, after, half in pairs for v in ((before, None), (after, half))])
    scale = svg.linear_scale(reach, left + 10, svg.WIDTH - 84.0)
    bottom = top + step * len(pairs)
    parts = [svg.bottom_axis(scale, bottom, top, "accuracy in %, before the update (bar) and after (marker)")]
    for i, (variant, before, after, half) in enumerate(pairs):
        y = top + step * (i + 0.5)
        a, b = scale(100 * before), scale(100 * after)
        gain = format_gain(after - before) + _around(half)
        tip = f"{variant.name}: {format_percent(before)} before, {format_percent(after)} after: {gain}"
        role = css_class(variant.method)
        drawn = [
            svg.words(left - 6, y + 4, shortened(variant.name, 22), anchor="end", role="label"),
            svg.line(a, y, b, y, f"link {role}"),
            svg.line(a, y - 6, a, y + 6, f"link {role}"),
            _whisker(variant, y, (after, half), scale, level=True),
            svg.marker(variant, (b, y), size=6, tip=tip),
            svg.words(svg.WIDTH - 76.0, y + 4, gain, role="tick"),
        ]
        parts.append(_of(variant, "".join(drawn)))
    return svg.chart(bottom + 42, title, *parts)


def reliability(title: str, variant: Variant, bins: Reliability) -> str:
    """Accuracy by confidence in 15 bins and the diagonal; the paler a bar, the fewer samples it stands for."""
    size, left, top = 190.0, 30.0, 8.0
    bottom, right = size - 34, size - 8
    x = svg.Scale(0, 1, left, right, (0.0, 0.5, 1.0))
    y = svg.Scale(0, 1, bottom, top, (0.0, 0.5, 1.0))
    total = max(bins.count) or 1
    bars = []
    for i, (n, sure, good) in enumerate(zip(bins.count, bins.confidence, bins.correct, strict=True)):
        if n:
            tip = f"{n} samples, mean confidence {sure / n:.3f}, accuracy {good / n:.3f}"
            box: dict[str, object] = {"x": x(i / 15) + 0.5, "y": y(good / n), "width": x(1 / 15) - x(0) - 1}
            box |= {"height": y(0) - y(good / n), "opacity": 0.3 + 0.7 * math.sqrt(n / total)}
            bars.append(svg.element("rect", {**box, "class": f"bar {css_class(variant.method)}", "data-tip": tip}))
    axes = svg.bottom_axis(x, bottom, top, "confidence") + svg.left_axis(y, left, right, "")
    diagonal = svg.line(x(0), y(0), x(1), y(1), "diagonal")
    return svg.chart(size, title, axes, *bars, diagonal, width=size, role="small")


def off_scale(values: Sequence[float]) -> float:
    """A floor below which values are so far from the rest that showing them would squeeze it together."""
    order = sorted(v for v in values if math.isfinite(v))
    for cut in range(len(order) // 3, 0, -1):
        gap, spread = order[cut] - order[cut - 1], order[-1] - order[cut]
        if spread > 0 and gap > max(0.8 * spread, 0.02):
            return order[cut]
    return -math.inf


def spread_out(places: Sequence[float], apart: float, top: float, bottom: float) -> list[float]:
    """The nearest places (least squares), in the same order, `apart` or more from each other, from `top` to `bottom`.

    If there is not enough room, they are as far apart as possible.
    """
    if not places:
        return []
    n = len(places)
    apart = min(apart, (bottom - top) / max(n - 1, 1))
    order = sorted(range(n), key=lambda i: places[i])
    # Less i * apart, the places must only not decrease: isotonic regression, by pooling neighbors out of order.
    pools: list[tuple[float, int]] = []
    for i, k in enumerate(order):
        mean, size = places[k] - i * apart, 1
        while pools and pools[-1][0] > mean:
            other, count = pools.pop()
            mean, size = (mean * size + other * count) / (size + count), size + count
        pools.append((mean, size))
    flat = [mean for mean, size in pools for _ in range(size)]
    moved = [0.0] * n
    for i, k in enumerate(order):
        moved[k] = min(max(flat[i], top), bottom - (n - 1) * apart) + i * apart
    return moved


def free_place(
    left: float, width: float, baseline: float, taken: Sequence[Box], *, top: float, bottom: float
) -> float | None:
    """The nearest baseline from `top` to `bottom` at which a text touches nothing in `taken`, or None."""
    for step in range(0, 28, 3):  # farther away a name would not seem to belong to its point
        for y in (baseline + step, baseline - step):
            free = all(abs(y - b.baseline) >= 12.5 or left >= b.right or b.left >= left + width for b in taken)
            if free and top <= y <= bottom:
                return y
    return None


def slanted(x: float, y: float, text: str, *, down: bool = False) -> str:
    """A tilted name above a column, or below a place of the axis."""
    turn = f"rotate({-38 if down else -50} {svg.number(x)} {svg.number(y)})"
    place: dict[str, object] = {"x": x, "y": y, "transform": turn, "class": "tick"}
    place |= {"text-anchor": "end" if down else "start"}
    return svg.element("text", place, escape(safe(shortened(text, 16))))


def _around(half: float | None) -> str:
    return f" ± {format_percent(half)}" if half is not None and math.isfinite(half) else ""


def _side_by_side(places: Mapping[str, Point]) -> dict[str, Point]:
    """Points of the same cost a little apart, so that neither they nor their intervals cover each other."""
    found: dict[str, Point] = {}
    for i, (label, (x, y)) in enumerate(places.items()):
        twins = sum(abs(x - other) < 1 for other, _ in list(places.values())[:i])
        found[label] = (x + 5.0 * (twins % 6), y)
    return found


def _lanes(places: Sequence[float | None]) -> list[int]:
    """For each marker the lowest lane in which it covers no other."""
    lanes, ends = [0] * len(places), list[float]()
    known = [(place, i) for i, place in enumerate(places) if place is not None]
    for place, i in sorted(known):
        lane = next((k for k, end in enumerate(ends) if place - end >= MARKER), len(ends))
        ends[lane : lane + 1] = [place]
        lanes[i] = lane
    return lanes


def _reach(values: Sequence[Value], factor: int = 100) -> list[float]:
    """What a scale must cover: the values and their intervals, unless these would squeeze the values together."""
    means = [factor * mean for mean, _ in values if math.isfinite(mean)]
    if not means:
        return []
    room = max(max(means) - min(means), 0.01 * factor)
    halves = [(factor * mean, factor * half) for mean, half in values if half is not None and math.isfinite(mean)]
    ends = [end for mean, half in halves for end in (mean - half, mean + half)]
    return [*means, *(min(max(end, min(means) - room), max(means) + room) for end in ends)]


def _whisker(variant: Variant, at: float, value: Value, scale: svg.Scale, *, level: bool = False) -> str:
    """The interval of a value on `scale`, cut at the frame; `level` where the scale is the horizontal one."""
    mean, half = value
    if half is None or not math.isfinite(half) or not math.isfinite(mean):
        return ""
    edges = sorted((scale.start, scale.end))
    low, high = (min(max(scale(100 * v), edges[0] - 8), edges[1] + 8) for v in (mean - half, mean + half))
    role = f"whisker {css_class(variant.method)}"
    return svg.line(low, at, high, at, role) if level else svg.line(at, low, at, high, role)


def _below(left_out: Sequence[tuple[Variant, float]], x: float, y: float, factor: int = 100) -> str:
    """Names what lies below the frame."""
    if not left_out:
        return ""
    named = ", ".join(f"{variant.name} {factor * value:.1f}" for variant, value in left_out)
    return svg.words(x, y, f"↓ below the frame: {named}", role="tick")


def _with_halves(curve: Curve) -> list[tuple[Point, float | None]]:
    return list(zip_longest(curve.points, curve.halves))


def _curve(curve: Curve, x: svg.Scale, y: svg.Scale, factor: int, names: Sequence[str]) -> str:
    variant = curve.variant
    places = [(x(u), y(factor * v)) for u, v in curve.points]
    at = [names[int(u)] if names else svg.tick_text(u) for u, _ in curve.points]
    values = [f"{factor * v:.1f}" for _, v in curve.points]
    role = f"curve {css_class(variant.method)} v{min(variant.number, 3)}"
    if len(places) > 16:
        return svg.path(places, role, tip=variant.name, values=[f"{v} at {u}" for u, v in zip(at, values, strict=True)])
    around = [f" ± {factor * half:.1f}" if half is not None else "" for _, half in _with_halves(curve)]
    tips = [f"{variant.name}: {v}{w} at {u}" for u, v, w in zip(at, values, around, strict=True)]
    finite = [(p, tip) for p, tip in zip(places, tips, strict=True) if all(map(math.isfinite, p))]
    return svg.path(places, role) + "".join(svg.marker(variant, p, size=4, tip=tip) for p, tip in finite)


def _bars(curve: Curve, x: svg.Scale, y: svg.Scale, factor: int, shift: float) -> str:
    """The intervals of a curve's points, moved to the left so that those of several curves can be told apart."""
    found = [(u, (v * factor / 100, half * factor / 100)) for (u, v), half in _with_halves(curve) if half is not None]
    return "".join(_whisker(curve.variant, x(u) - shift, value, y) for u, value in found)


def _end(curve: Curve, y: svg.Scale, factor: int) -> float:
    """The height of the last point that is a number."""
    return y(factor * next((v for _, v in reversed(curve.points) if math.isfinite(v)), y.low / factor))


def _dot(dots: Dots, value: Value | None, scale: svg.Scale, y: float, row: str) -> str:
    if value is None:
        return ""
    mean, half = value
    tip = f"{dots.variant.name} on {row}: {format_percent(mean)}{_around(half)}"
    bar = _whisker(dots.variant, y, value, scale, level=True)
    return _of(dots.variant, bar + svg.marker(dots.variant, (scale(100 * mean), y), tip=tip))


def _of(variant: Variant, content: str) -> str:
    return svg.element("g", {"data-s": variant.index}, content)


def _names(spots: Sequence[Spot], places: Sequence[Point], taken: list[Box], frame: tuple[float, float]) -> list[str]:
    """A name at each point, moved up or down until it touches nothing else; the best first, none without room."""
    names = [""] * len(spots)
    for i in sorted(range(len(spots)), key=lambda k: (spots[k].variant.number > 0, places[k][1])):
        variant, (x, y) = spots[i].variant, places[i]
        text = variant.short()
        width = 6.4 * len(text)
        left = x + 10 if x + 10 + width <= svg.WIDTH - 2 else x - 10 - width
        baseline = free_place(left, width, y + 4, taken, top=frame[0], bottom=frame[1])
        if baseline is not None:
            taken.append(Box(left, left + width, baseline))
            names[i] = _of(variant, svg.words(left, baseline, text, role=f"name {css_class(variant.method)}"))
    return names
