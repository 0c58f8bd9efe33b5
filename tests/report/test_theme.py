from __future__ import annotations

import itertools
import re

from trust_tta.methods.registry import METHODS as REGISTERED
from trust_tta.report import figures, theme
from trust_tta.results.display import METHODS


def test_methods_have_distinct_markers_and_contrast_on_both_backgrounds() -> None:
    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        r, g, b = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    def contrast(one: str, other: str) -> float:
        low, high = sorted((luminance(one), luminance(other)))
        return (high + 0.05) / (low + 0.05)

    styles = [theme.style_of(method) for method in METHODS]
    assert set(METHODS) == set(theme.STYLES)
    assert len({s.light for s in styles}) == len({s.dark for s in styles}) == len(METHODS)
    assert len({(s.marker, s.hollow) for s in styles}) == len(METHODS)
    for s in [*styles, *theme.OTHERS]:
        assert contrast(s.light, "#ffffff") >= 3
        assert contrast(s.dark, "#1b1e24") >= 3


def test_every_registered_method_has_a_sort_order_and_style() -> None:
    assert sorted(METHODS) == sorted(REGISTERED)


def test_every_marker_exists_in_matplotlib() -> None:
    assert set(figures.MARKERS) == set(theme.MARKERS)


def test_methods_with_the_same_marker_differ_in_color_for_color_blind_readers() -> None:
    """Filled and hollow markers may be small: color-blind readers must see two colors as well."""

    def seen(color: str) -> tuple[float, float, float]:
        """As by deuteranopes (Viénot, Brettel and Mollon, 1999), in linear light."""
        r, g, b = (((int(color[i : i + 2], 16) / 255 + 0.055) / 1.055) ** 2.4 for i in (1, 3, 5))
        yellow = 0.29275 * r + 0.70725 * g
        return yellow, yellow, -0.02234 * r + 0.02234 * g + b

    for ground in ("light", "dark"):
        by_marker: dict[str, list[str]] = {}
        for style in theme.STYLES.values():
            by_marker.setdefault(style.marker, []).append(getattr(style, ground))
        for colors in by_marker.values():
            for one, other in itertools.combinations(colors, 2):
                assert max(abs(a - b) for a, b in zip(seen(one), seen(other), strict=True)) > 0.03, (one, other)


def test_css_classes_of_unknown_methods_are_safe() -> None:
    assert re.fullmatch(r"tone m-other\d", theme.css_class("<script>"))
