"""Color and marker of each method in charts and tables, chosen for color-blind readers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# SVG paths of the markers around the origin, y downward, in the order in which variants of a method use them.
OUTLINES: Mapping[str, str] = {
    "circle": "M-.9 0A.9 .9 0 1 1 .9 0A.9 .9 0 1 1 -.9 0Z",
    "square": "M-.82 -.82H.82V.82H-.82Z",
    "diamond": "M0 -1.2L1.1 0L0 1.2L-1.1 0Z",
    "up": "M0 -1.1L1.1 .85H-1.1Z",
    "down": "M0 1.1L1.1 -.85H-1.1Z",
    "left": "M-1.15 0L.85 -1.05V1.05Z",
    "plus": "M-.36 -1.1H.36V-.36H1.1V.36H.36V1.1H-.36V.36H-1.1V-.36H-.36Z",
    "cross": "M-1 -.5L-.5 -1L0 -.5L.5 -1L1 -.5L.5 0L1 .5L.5 1L0 .5L-.5 1L-1 .5L-.5 0Z",
    "star": "M0 -1.45L.36 -.5L1.38 -.45L.59 .19L.85 1.17L0 .62L-.85 1.17L-.59 .19L-1.38 -.45L-.36 -.5Z",
    "right": "M1.15 0L-.85 -1.05V1.05Z",
    "pentagon": "M0 -1.1L1.05 -.34L.65 .89H-.65L-1.05 -.34Z",
    "hexagon": "M-1.1 0L-.55 -.95H.55L1.1 0L.55 .95H-.55Z",
    "thin": "M0 -1.4L.65 0L0 1.4L-.65 0Z",
}
MARKERS = tuple(OUTLINES)


@dataclass(frozen=True)
class Style:
    """Color on a light and on a dark background, and marker."""

    light: str
    dark: str
    marker: str
    hollow: bool = False

    def shape(self, number: int) -> str:
        return MARKERS[(MARKERS.index(self.marker) + number) % len(MARKERS)]


STYLES: Mapping[str, Style] = {
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
    "bn_alpha": Style("#4f6f9c", "#9ab4e0", "thin"),
    "bn_ema": Style("#7d6a5a", "#c9b5a3", "thin", hollow=True),
    "eata": Style("#1b5e9b", "#6fb1ee", "pentagon"),
    "rdumb": Style("#4277c9", "#9cc3ff", "pentagon", hollow=True),
    "deyo": Style("#137a7a", "#5fd0c8", "right"),
    "roid": Style("#9440b5", "#dc9df5", "hexagon"),
    "cmf": Style("#6a4fd0", "#a99bff", "hexagon", hollow=True),
    "cotta": Style("#2c6e8f", "#86c8e8", "plus", hollow=True),
    "rotta": Style("#7a7300", "#d6cc3f", "cross", hollow=True),
    "neo": Style("#a35a00", "#f2a65a", "down", hollow=True),
    "t3a": Style("#96303b", "#f0929c", "left"),
    "dpcore": Style("#6e4a2f", "#c9a489", "right", hollow=True),
}
OTHERS = (
    Style("#5b6bb5", "#a5b1f0", "left"),
    Style("#9a5b13", "#dfa667", "down", hollow=True),
    Style("#3d7f7a", "#83c9c3", "circle", hollow=True),
    Style("#a13d3d", "#ef9a9a", "up"),
    Style("#6d6a00", "#d2cd4a", "plus", hollow=True),
    Style("#4b7d3a", "#9ad386", "cross", hollow=True),
    Style("#7a4fa3", "#cba6ee", "square"),
)


# The style behind each CSS class.
NAMED_STYLES = {f"m-{m}": s for m, s in STYLES.items()} | {f"m-other{i}": s for i, s in enumerate(OTHERS)}


def css_class(method: str) -> str:
    """CSS classes of a method's color, safe for any name; unknown methods get one by a hash of their name."""
    other = sum(method.encode("utf-8", "replace")) % len(OTHERS)
    return f"tone m-{method}" if method in STYLES else f"tone m-other{other}"


def style_of(method: str) -> Style:
    return NAMED_STYLES[css_class(method).removeprefix("tone ")]
