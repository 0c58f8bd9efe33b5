"""Charts and page parts of the analyses: entropy by order, loss surface, weight norms, memory by number of orders."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from itertools import pairwise

from trust_tta.report import charts, markup, svg
from trust_tta.report.analyses import aligned, lowest
from trust_tta.results.order_records import EntropyByOrder, LossSurface, MemoryByK, OrderRecord, WeightNorms


def analyses_part(records: Sequence[OrderRecord]) -> str:
    """All analyses, the entropy of several data sets in one map."""
    maps = [r for r in records if isinstance(r, EntropyByOrder)]
    drawn = [_entropy(maps)] if maps else []
    small = [_small(record) for record in records if not isinstance(record, EntropyByOrder)]
    grid = f'<div class="grid free">{"".join(small)}</div>' if small else ""
    return markup.section("What orders do", *drawn, grid)


def heat_map(title: str, maps: Sequence[EntropyByOrder]) -> str:
    """A row a record, dark where low; the chosen orders of each row are framed."""
    columns, rows = aligned(maps)
    left, top, width, step = max(96.0, 7.0 * max(len(m.title) for m in maps) + 12), 46.0, 34.0, 26.0
    parts = [charts.slanted(left + width * (j + 0.5), top - 6, name) for j, name in enumerate(columns)]
    for i, (record, numbers) in enumerate(zip(maps, rows, strict=True)):
        y = top + step * i
        parts.append(svg.words(left - 8, y + 0.65 * step, record.title, anchor="end", role="label"))
        known = [v for v in numbers if math.isfinite(v)] or [0.0]
        low, spread = min(known), (max(known) - min(known)) or 1.0
        best = lowest(numbers, record.k)
        for j, v in enumerate(numbers):
            if math.isfinite(v):
                x = left + width * j
                box: dict[str, object] = {"x": x + 1, "y": y + 1, "width": width - 2, "height": step - 2}
                look = {
                    "class": f"heat{' framed' if j in best else ''}",
                    "fill-opacity": 0.85 - 0.75 * (v - low) / spread,
                }
                parts.append(
                    svg.element("rect", {**box, **look}, svg.element("title", {}, f"{escape(columns[j])}: {v:.4f}"))
                )
                parts.append(svg.words(x + width / 2, y + 0.65 * step, f"{v:.2f}", anchor="middle", role="heat-text"))
    return svg.chart(top + step * len(maps) + 8, title, *parts, width=left + width * len(columns) + 8, role="wide")


def loss_surface(record: LossSurface) -> str:
    """Loss on the plane as shades, the adapted networks as triangles, their mean as a star."""
    width, height, left, top = float(svg.WIDTH), 420.0, 46.0, 12.0
    right, bottom = width - 12, height - 42
    columns, rows = _edges(record.x), _edges(record.y)
    x, y = _axis(columns, left, right), _axis(rows, bottom, top)
    finite = [v for line in record.loss for v in line if math.isfinite(v)] or [0.0]
    low, high = min(finite), max(finite)
    parts = []
    for i, line in enumerate(record.loss):
        for j, v in enumerate(line):
            share = (v - low) / ((high - low) or 1) if math.isfinite(v) else 1.0
            box: dict[str, object] = {"x": x(columns[j]), "y": y(rows[i + 1])}
            box |= {"width": x(columns[j + 1]) - x(columns[j]), "height": y(rows[i]) - y(rows[i + 1])}
            box |= {"class": "heat flat", "fill-opacity": 0.9 - 0.85 * share}
            parts.append(svg.element("rect", box, svg.element("title", {}, f"{v:.4f}")))
    for point in record.adapted:
        parts.append(svg.marker("trust_naive", 3, x(point.x), y(point.y), size=7, hint=point.name))
    parts.append(svg.marker("trust", 0, x(record.mean.x), y(record.mean.y), size=8, hint=record.mean.name))
    axes = svg.bottom_axis(x, bottom, bottom, "") + svg.left_axis(y, left, left, "")
    return svg.chart(height, record.title, *parts, axes, width=width)


def weight_norms(record: WeightNorms) -> str:
    """One row a tensor: its norm, with the deviation over orders written beside it."""
    left, step, top = 230.0, 17.0, 8.0
    scale = svg.linear_scale([0.0, *record.mean], left, svg.WIDTH - 90.0, pad=0.0)
    bottom = top + step * len(record.names)
    parts = [svg.bottom_axis(scale, bottom, top, "mean L2 norm over orders (deviation of elements at the right)")]
    for i, (name, mean, deviation) in enumerate(zip(record.names, record.mean, record.deviation, strict=True)):
        y = top + step * (i + 0.5)
        parts.append(
            svg.words(left - 6, y + 4, name if len(name) <= 34 else f"…{name[-33:]}", anchor="end", role="tick")
        )
        box: dict[str, object] = {
            "x": scale(0.0),
            "y": y - 5,
            "width": max(scale(mean) - scale(0.0), 0.5),
            "height": 10,
        }
        parts.append(svg.element("rect", {**box, "class": "bar tone m-trust"}))
        parts.append(svg.words(svg.WIDTH - 8.0, y + 4, f"{deviation:.2g}", anchor="end", role="tick"))
    return svg.chart(bottom + 42, record.title, *parts)


def memory_by_k(record: MemoryByK) -> str:
    """Peak memory relative to the network alone."""
    base = record.baseline or 1
    points = tuple((float(k), peak / base) for k, peak in zip(record.k, record.peak, strict=True))
    curve = charts.Curve(charts.Look(0, "trust", "trust"), points)
    return charts.line_chart(record.title, [curve], axis="orders; memory relative to the network alone", percent=False)


def _entropy(maps: Sequence[EntropyByOrder]) -> str:
    said = "Mean prediction entropy of each traversal order in nats; the orders chosen in each row are framed."
    return markup.drawing("entropy by order", said, heat_map("Mean entropy by order", maps))


def _small(record: OrderRecord) -> str:
    if isinstance(record, LossSurface):
        said = f"{record.title}: loss on the plane through adapted networks (triangles) and their mean (star)."
        return markup.drawing(record.title, said, loss_surface(record))
    if isinstance(record, WeightNorms):
        return markup.drawing(
            record.title, f"{record.title}: norms of adapted tensors over orders.", weight_norms(record)
        )
    if isinstance(record, MemoryByK):
        return markup.drawing(record.title, f"{record.title}: peak memory by number of orders.", memory_by_k(record))
    return escape(record.title)


def _edges(values: Sequence[float]) -> list[float]:
    """The borders of cells about ascending grid values: half way between neighbours, and as far beyond the ends."""
    steps = [b - a for a, b in pairwise(values)] or [1.0]
    return [values[0] - steps[0] / 2, *((a + b) / 2 for a, b in pairwise(values)), values[-1] + steps[-1] / 2]


def _axis(edges: Sequence[float], start: float, end: float) -> svg.Scale:
    low, high = edges[0], edges[-1]
    high = high if high > low else low + 1.0
    return svg.Scale(low, high, start, end, svg.round_ticks(low, high, 6))
