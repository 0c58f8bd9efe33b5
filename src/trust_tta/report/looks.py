"""One color and marker per method, the same in every chart, table and figure.

The hues follow palettes made for color-blind readers; a marker of its own tells each method apart without color.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, TypeAlias

Marker: TypeAlias = Literal["circle", "square", "diamond", "up", "down", "plus", "cross", "star", "left"]

MARKERS: tuple[Marker, ...] = ("circle", "square", "diamond", "up", "down", "left", "plus", "cross", "star")


@dataclass(frozen=True)
class Style:
    """How a method is drawn: its color on a light and on a dark ground, and its marker, filled or hollow."""

    light: str
    dark: str
    marker: Marker
    hollow: bool = False

    def shape(self, number: int) -> Marker:
        """The marker of a method's variant: later ones take other shapes in the same color."""
        return MARKERS[(MARKERS.index(self.marker) + number) % len(MARKERS)]


STYLES: Mapping[str, Style] = MappingProxyType(
    {
        "source": Style("#7d838c", "#9aa1ab", "circle", hollow=True),
        "bn": Style("#4a5058", "#cbd0d8", "circle"),
        "tent": Style("#0072b2", "#4fa9e6", "square"),
        "eta": Style("#2f8fbf", "#8fd0f5", "up"),
        "sar": Style("#00875f", "#2fc493", "diamond"),
        "shot": Style("#7a5cc0", "#b49cf2", "down"),
        "lame": Style("#5c7a29", "#a9c965", "plus"),
        "foa": Style("#8c5a3c", "#d0a184", "cross"),
        "tide": Style("#c2185b", "#ff77a9", "star", hollow=True),
        "trust_naive": Style("#b97a00", "#f0b83c", "diamond", hollow=True),
        "trust": Style("#d1440c", "#ff8552", "star"),
        "ensemble": Style("#b0478c", "#ee9bcf", "square", hollow=True),
        "repetition": Style("#85224f", "#d87aa5", "up", hollow=True),
        "augmentation": Style("#00798a", "#4cc9d6", "left", hollow=True),
    }
)
OTHERS = (
    Style("#5b6bb5", "#a5b1f0", "left"),
    Style("#9a5b13", "#dfa667", "down", hollow=True),
    Style("#3d7f7a", "#83c9c3", "circle", hollow=True),
    Style("#a13d3d", "#ef9a9a", "up"),
    Style("#6d6a00", "#d2cd4a", "plus", hollow=True),
    Style("#4b7d3a", "#9ad386", "cross", hollow=True),
    Style("#7a4fa3", "#cba6ee", "square"),
)


def style_of(method: str) -> Style:
    """The style of a method; a name that is not listed gets one by its letters, the same wherever it appears."""
    return STYLES.get(method) or OTHERS[_other(method)]


def css_class(method: str) -> str:
    """Class names that carry the method's color; safe whatever the method is called."""
    return f"tone m-{method}" if method in STYLES else f"tone m-other{_other(method)}"


def palette_css() -> str:
    """The color of every class, for both grounds: `--light` and `--dark` custom properties."""
    named = [*((f"m-{m}", s) for m, s in STYLES.items()), *((f"m-other{i}", s) for i, s in enumerate(OTHERS))]
    return "\n".join(f".{name} {{ --light: {s.light}; --dark: {s.dark}; }}" for name, s in named)


def marker_outline(shape: Marker) -> list[tuple[float, float]]:
    """The corners of a marker about the origin, y downward, for a size of 1; a circle has none."""
    if shape == "star":
        turns = [math.pi * k / 5 - math.pi / 2 for k in range(10)]
        return [((1.45, 0.62)[k % 2] * math.cos(t), (1.45, 0.62)[k % 2] * math.sin(t)) for k, t in enumerate(turns)]
    if shape in ("plus", "cross"):
        a, b, half = 0.36, 1.1, math.sqrt(0.5)
        arm = [(-a, -b), (a, -b), (a, -a)]  # turned about the origin four times
        plus = [turned for k in range(4) for turned in (_quarter_turns(p, k) for p in arm)]
        return plus if shape == "plus" else [((u - v) * half, (u + v) * half) for u, v in plus]
    corners: dict[str, list[tuple[float, float]]] = {
        "square": [(-0.82, -0.82), (0.82, -0.82), (0.82, 0.82), (-0.82, 0.82)],
        "diamond": [(0, -1.2), (1.1, 0), (0, 1.2), (-1.1, 0)],
        "up": [(0, -1.1), (1.1, 0.85), (-1.1, 0.85)],
        "down": [(0, 1.1), (1.1, -0.85), (-1.1, -0.85)],
        "left": [(-1.15, 0), (0.85, -1.05), (0.85, 1.05)],
    }
    return corners[shape]


def _quarter_turns(point: tuple[float, float], times: int) -> tuple[float, float]:
    x, y = point
    return ((x, y), (-y, x), (-x, -y), (y, -x))[times]


def _other(method: str) -> int:
    return sum(method.encode("utf-8", "replace")) % len(OTHERS)
