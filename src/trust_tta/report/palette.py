"""One colour, marker and display name a method, the same in every chart, table and figure.

The hues follow palettes made for colour-blind readers; a marker of its own tells each method apart without colour.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, TypeAlias

Marker: TypeAlias = Literal["circle", "square", "diamond", "up", "down", "plus", "cross", "star", "left"]


@dataclass(frozen=True)
class Style:
    """How a method is drawn: its colour on a light and on a dark ground, and its marker, filled or hollow."""

    light: str
    dark: str
    marker: Marker
    hollow: bool = False


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
)
MARKERS: tuple[Marker, ...] = ("circle", "square", "diamond", "up", "down", "left", "plus", "cross", "star")

NAMES: Mapping[str, str] = MappingProxyType(
    {
        "source": "Source",
        "bn": "BN statistics",
        "tent": "Tent",
        "eta": "ETA",
        "sar": "SAR",
        "shot": "SHOT",
        "lame": "LAME",
        "foa": "FOA",
        "trust_naive": "TRUST naive",
        "trust": "TRUST",
        "ensemble": "Ensemble",
        "repetition": "Repetition",
        "augmentation": "Augmentation",
    }
)


def style_of(method: str) -> Style:
    """The style of a method; a name we do not know gets one by its letters, the same wherever it appears."""
    return STYLES.get(method) or OTHERS[sum(method.encode("utf-8")) % len(OTHERS)]


def css_class(method: str) -> str:
    """Class names that carry the method's colour; safe whatever the method is called."""
    if method in STYLES:
        return f"tone m-{method}"
    return f"tone m-other{sum(method.encode('utf-8')) % len(OTHERS)}"


def display_name(label: str) -> str:
    """ "trust (k=2)" as "TRUST (k=2)"; names we do not know stay as they are."""
    found = re.match(r"[a-z_]+", label)
    if found and found[0] in NAMES and (found.end() == len(label) or label[found.end()] == " "):
        return NAMES[found[0]] + label[found.end() :]
    return label


def short_name(label: str, most: int = 18) -> str:
    """A display name for a chart: lists by their length, where too long without the names of options, and then cut."""
    text = re.sub(r"(\w+)=\[([^]]+)\]", lambda found: f"{found[2].count(',') + 1} {found[1]}", display_name(label))
    text = text if len(text) <= most else re.sub(r"\w+=(?!True|False)", "", text.replace("=True", ""))
    return text if len(text) <= most else text[: most - 1] + "…"


def domain_name(domain: str) -> str:
    """ "gaussian_noise" as "gaussian noise"; what is no text in the name of a folder becomes a question mark."""
    return domain.replace("_", " ").encode("utf-8", "replace").decode("utf-8")


def palette_css() -> str:
    """The colour of every class, for both grounds: `--light` and `--dark` custom properties."""
    named = [*((f"m-{m}", s) for m, s in STYLES.items()), *((f"m-other{i}", s) for i, s in enumerate(OTHERS))]
    return "\n".join(f".{name} {{ --light: {s.light}; --dark: {s.dark}; }}" for name, s in named)
