"""SVG as text: escaped elements, scales with round ticks, axes, markers. Colors come from the page's style sheet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from trust_tta.report.model import Variant
from trust_tta.report.text import safe
from trust_tta.report.theme import OUTLINES, css_class

WIDTH = 560


@dataclass(frozen=True)
class Scale:
    """Numbers to pixels, straight or logarithmic; on a logarithmic scale zero has a place of its own at `start`."""

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
        share = (math.log(x) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        return first + share * (self.end - first)


def linear_scale(values: Sequence[float], start: float, end: float, *, pad: float = 0.04) -> Scale:
    """A straight scale that covers `values` with a margin, with about five round ticks."""
    finite = [v for v in values if math.isfinite(v)] or [0.0, 1.0]
    low, high = min(finite), max(finite)
    spread = (high - low) or max(abs(high), 1e-6) * 0.2
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


def tick_text(x: float) -> str:
    """A tick's number, as short as it is exact."""
    return f"{x:.6g}"


def element(name: str, attributes: dict[str, object], *children: str) -> str:
    """One element; attribute values are escaped, children are taken as they are; None leaves an attribute out."""
    shown = ((k, number(v) if isinstance(v, float) else safe(str(v))) for k, v in attributes.items() if v is not None)
    opening = "".join([name, *(f' {k}="{escape(v)}"' for k, v in shown)])
    return f"<{opening}>{''.join(children)}</{name}>" if children else f"<{opening}/>"


def words(x: float, y: float, text: str, *, anchor: str = "start", role: str = "") -> str:
    """Escaped text at a place."""
    attributes: dict[str, object] = {"x": x, "y": y, "text-anchor": anchor if anchor != "start" else None}
    return element("text", {**attributes, "class": role or None}, escape(safe(text)))


def line(x1: float, y1: float, x2: float, y2: float, role: str) -> str:
    return element("line", {"x1": x1, "y1": y1, "x2": x2, "y2": y2, "class": role})


def path(points: Sequence[tuple[float, float]], role: str, *, tip: str = "", values: Sequence[str] = ()) -> str:
    """A polyline; a point that is not a number lifts the pen. `values` are what pointing at each point says."""
    steps: list[str] = []
    said: list[str] = []
    pen = "M"
    for i, (x, y) in enumerate(points):
        if math.isfinite(x) and math.isfinite(y):
            steps.append(f"{pen}{number(round(x, 1))} {number(round(y, 1))}")
            said += [values[i]] if values else []
            pen = "L"
        else:
            pen = "M"
    told = {"data-tip": tip or None, "data-at": ";".join(said) or None}
    return element("path", {"d": "".join(steps), "class": role, **told}) if steps else ""


def chart(
    height: float, title: str, *parts: str, width: float = WIDTH, role: str = "", step: float | None = None
) -> str:
    """A whole drawing with its accessible name; `step` is the height of its rows, where a page may take rows out."""
    attributes: dict[str, object] = {
        "xmlns": "http://www.w3.org/2000/svg",
        "viewBox": f"0 0 {number(width)} {number(height)}",
        "class": f"chart {role}".strip(),
        "role": "img",
        "aria-label": title,
        "font-size": 12,
        "data-step": step,
    }
    return element("svg", attributes, *parts)


def bottom_axis(scale: Scale, y: float, top: float, title: str) -> str:
    """Grid lines, numbers and title of the horizontal axis."""
    grid = [line(scale(t), top, scale(t), y, "grid") for t in scale.ticks]
    texts = [words(scale(t), y + 16, tick_text(t), anchor="middle", role="tick") for t in scale.ticks]
    middle = (scale.start + scale.end) / 2
    return "".join([*grid, *texts, words(middle, y + 34, title, anchor="middle", role="axis")])


def left_axis(scale: Scale, x: float, right: float, title: str) -> str:
    """Grid lines, numbers and title (above the axis) of the vertical axis."""
    grid = [line(x, scale(t), right, scale(t), "grid") for t in scale.ticks]
    texts = [words(x - 6, scale(t) + 4, tick_text(t), anchor="end", role="tick") for t in scale.ticks]
    return "".join([*grid, *texts, words(8, min(scale.start, scale.end) - 10, title, role="axis")])


def marker(variant: Variant, place: tuple[float, float], *, size: float = 5.0, tip: str = "") -> str:
    """The marker of a line; `tip` is what pointing at it says."""
    x, y = (number(round(v, 1)) for v in place)
    role = f"mark {css_class(variant.method)}{' hollow' if variant.style.hollow else ''}"
    outline, transform = OUTLINES[variant.style.shape(variant.number)], f"translate({x} {y}) scale({number(size)})"
    return element("path", {"d": outline, "transform": transform, "class": role, "data-tip": tip or None})


def key(variant: Variant) -> str:
    """The marker alone, for a button or a table row."""
    drawn = marker(variant, (9, 9), size=5.5)
    return element("svg", {"viewBox": "0 0 18 18", "class": "key", "aria-hidden": "true"}, drawn)
