"""Charts of what was found out about scan orders: entropy by order, loss surface, weight norms, memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from trust_tta.report import charts, svg
from trust_tta.report.model import Variant
from trust_tta.report.series import Curve
from trust_tta.results.order_records import EntropyByOrder, LossSurface, MemoryByK, WeightNorms

TRUST = Variant(0, "trust", "trust")
ADAPTED = Variant(0, "trust_naive", "trust_naive", 3)


def aligned(maps: Sequence[EntropyByOrder]) -> tuple[tuple[str, ...], list[tuple[float, ...]]]:
    """The orders of all records by alphabet, and each record's entropies in that order, NaN where it has none."""
    orders = tuple(sorted({order for record in maps for order in record.orders}))
    found = [dict(zip(record.orders, record.entropy, strict=True)) for record in maps]
    return orders, [tuple(values.get(order, math.nan) for order in orders) for values in found]


def lowest(values: Sequence[float], k: int) -> set[int]:
    """The places of the `k` lowest numbers."""
    known = [i for i, v in enumerate(values) if math.isfinite(v)]
    return set(sorted(known, key=lambda i: (values[i], i))[:k])


def shades(values: Sequence[float]) -> list[float]:
    """0 for the lowest number to 1 for the highest, NaN where there is none."""
    known = [v for v in values if math.isfinite(v)] or [0.0]
    low, spread = min(known), (max(known) - min(known)) or 1.0
    return [(v - low) / spread for v in values]


def heat_map(title: str, maps: Sequence[EntropyByOrder]) -> str:
    """One row per record, dark where low; the chosen orders of each row are framed."""
    columns, rows = aligned(maps)
    left, top, width, step = max(96.0, 7.0 * max(len(m.title) for m in maps) + 12), 46.0, 34.0, 26.0
    parts = [charts.slanted(left + width * (j + 0.5), top - 6, name) for j, name in enumerate(columns)]
    for i, (record, numbers) in enumerate(zip(maps, rows, strict=True)):
        y = top + step * i
        parts.append(svg.words(left - 8, y + 0.65 * step, record.title, anchor="end", role="label"))
        best = lowest(numbers, record.k)
        for j, (v, shade) in enumerate(zip(numbers, shades(numbers), strict=True)):
            if math.isfinite(v):
                x = left + width * j
                box: dict[str, object] = {"x": x + 1, "y": y + 1, "width": width - 2, "height": step - 2}
                box |= {"class": f"heat{' framed' if j in best else ''}", "fill-opacity": 0.85 - 0.75 * shade}
                parts.append(svg.element("rect", {**box, "data-tip": f"{columns[j]}: {v:.4f}"}))
                parts.append(svg.words(x + width / 2, y + 0.65 * step, f"{v:.2f}", anchor="middle", role="heat-text"))
    return svg.chart(top + step * len(maps) + 8, title, *parts, width=left + width * len(columns) + 8, role="wide")


def loss_surface(record: LossSurface) -> str:
    """Loss on the plane as shades, the adapted networks as triangles, their mean as a star."""
    width, height, left, top = float(svg.WIDTH), 420.0, 46.0, 12.0
    right, bottom = width - 12, height - 42
    columns, rows = _edges(record.x), _edges(record.y)
    x, y = _axis(columns, left, right), _axis(rows, bottom, top)
    flat = iter(shades([v for line in record.loss for v in line]))
    parts = []
    for i, line in enumerate(record.loss):
        for j, v in enumerate(line):
            shade = next(flat)
            box: dict[str, object] = {"x": x(columns[j]), "y": y(rows[i + 1])}
            box |= {"width": x(columns[j + 1]) - x(columns[j]), "height": y(rows[i]) - y(rows[i + 1])}
            box |= {"class": "heat flat", "fill-opacity": 0.9 - 0.85 * (shade if math.isfinite(shade) else 1.0)}
            parts.append(svg.element("rect", {**box, "data-tip": f"{v:.4f}"}))
    parts += [svg.marker(ADAPTED, (x(p.x), y(p.y)), size=7, tip=p.name) for p in record.adapted]
    parts.append(svg.marker(TRUST, (x(record.mean.x), y(record.mean.y)), size=8, tip=record.mean.name))
    axes = svg.bottom_axis(x, bottom, bottom, "") + svg.left_axis(y, left, left, "")
    return svg.chart(height, record.title, *parts, axes, width=width)


def weight_norms(record: WeightNorms) -> str:
    """One row per tensor: its norm, and the deviation over orders at the right."""
    left, step, top = 230.0, 17.0, 8.0
    scale = svg.linear_scale([0.0, *record.mean], left, svg.WIDTH - 90.0, pad=0.0)
    bottom = top + step * len(record.names)
    parts = [svg.bottom_axis(scale, bottom, top, "mean L2 norm over orders (deviation of elements at the right)")]
    for i, (name, mean, deviation) in enumerate(zip(record.names, record.mean, record.deviation, strict=True)):
        y = top + step * (i + 0.5)
        short = name if len(name) <= 34 else f"…{name[-33:]}"
        box: dict[str, object] = {"x": scale(0.0), "y": y - 5, "width": max(scale(mean) - scale(0.0), 0.5)}
        parts.append(svg.words(left - 6, y + 4, short, anchor="end", role="tick"))
        parts.append(svg.element("rect", {**box, "height": 10, "class": "bar tone m-trust"}))
        parts.append(svg.words(svg.WIDTH - 8.0, y + 4, f"{deviation:.2g}", anchor="end", role="tick"))
    return svg.chart(bottom + 42, record.title, *parts)


def memory_by_k(record: MemoryByK) -> str:
    """Peak memory relative to the network alone."""
    base = record.baseline or 1
    points = tuple((float(k), peak / base) for k, peak in zip(record.k, record.peak, strict=True))
    axis = "orders; memory relative to the network alone"
    return charts.line_chart(record.title, [Curve(TRUST, points)], axis=axis, percent=False)


def _edges(values: Sequence[float]) -> list[float]:
    """The borders of cells about ascending grid values: half way between neighbors, and as far beyond the ends."""
    steps = [b - a for a, b in pairwise(values)] or [1.0]
    return [values[0] - steps[0] / 2, *((a + b) / 2 for a, b in pairwise(values)), values[-1] + steps[-1] / 2]


def _axis(edges: Sequence[float], start: float, end: float) -> svg.Scale:
    low, high = edges[0], edges[-1]
    high = high if high > low else low + 1.0
    return svg.Scale(low, high, start, end, svg.round_ticks(low, high, 6))
