from __future__ import annotations

import itertools
import math
import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trust_tta.methods.registry import METHODS as REGISTERED
from trust_tta.report import charts, figures, svg
from trust_tta.report import theme as looks
from trust_tta.report.charts import Spot
from trust_tta.report.model import Variant
from trust_tta.report.series import Curve, Dots
from trust_tta.results import Reliability
from trust_tta.results.display import METHODS

NAMESPACE = {"s": "http://www.w3.org/2000/svg"}
HOSTILE = '<script>alert("1")</script>&\'"'


def parse(text: str) -> ElementTree.Element:
    return ElementTree.fromstring(text)


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [(0, 1, (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)), (71.2, 79.9, (72, 74, 76, 78)), (-3, 12, (0, 5, 10)), (1e-9, 9e-9, None)],
    ids=["unit", "percent", "signed", "tiny"],
)
def test_ticks_are_round_and_inside(low: float, high: float, ticks: tuple[float, ...] | None) -> None:
    found = svg.round_ticks(low, high, 5)
    assert all(low - 1e-12 <= t <= high * (1 + 1e-9) for t in found)
    assert 3 <= len(found) <= 12
    if ticks is not None:
        assert found == pytest.approx(ticks)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20))
def test_a_linear_scale_keeps_order_and_stays_in_its_frame(values: list[float]) -> None:
    scale = svg.linear_scale(values, 10.0, 110.0)
    places = [scale(v) for v in sorted(values)]
    assert places == sorted(places)
    assert all(9.999 <= p <= 110.001 for p in places)


@given(st.lists(st.just(0.0) | st.floats(1e-6, 1e6), min_size=1, max_size=20))
def test_a_log_scale_keeps_order_and_gives_zero_a_place(values: list[float]) -> None:
    scale = svg.log_scale(values, 10.0, 110.0)
    places = [scale(v) for v in sorted(values)]
    assert all(a <= b + 1e-9 for a, b in zip(places, places[1:], strict=False))
    assert all(9.999 <= p <= 110.001 for p in places)
    assert len(scale.ticks) <= 14


def test_far_outliers_are_taken_off_the_scale_and_named() -> None:
    values = [0.595, 0.764, 0.766, 0.775, 0.789]
    assert charts.off_scale(values) == 0.764
    assert charts.off_scale([0.1, 0.2, 0.3, 0.4]) == -math.inf
    assert charts.off_scale([0.5]) == -math.inf
    assert charts.off_scale([]) == -math.inf
    spots = [Spot(Variant(i, m, m), 1.0 + i, v) for i, (m, v) in enumerate(zip(METHODS, values, strict=False))]
    drawn = charts.scatter("t", spots, axis="x")
    assert "below the frame: source 59.5" in drawn
    assert len(parse(drawn).findall(".//s:g[@data-s]/*[@class]", NAMESPACE)) >= 4


def test_dots_stand_where_their_values_are() -> None:
    dots = [
        Dots(Variant(0, "bn", "bn"), ((0.5, None), None)),
        Dots(Variant(1, "source", "source"), ((0.7, 0.01), (0.6, None))),
    ]
    root = parse(charts.dot_plot("t", ["fog", "snow"], dots))
    rows = root.findall(".//s:g[@class='row']", NAMESPACE)
    xs = [[x for x, _ in _marks(row)] for row in rows]
    assert [len(x) for x in xs] == [2, 1]
    assert xs[0][0] < xs[1][0] < xs[0][1]
    assert (xs[1][0] - xs[0][0]) == pytest.approx(xs[0][1] - xs[1][0], abs=0.11)
    assert len(root.findall(".//s:line[@class]", NAMESPACE)) > 2
    tips = [item.get("data-tip") for item in root.iter()]
    assert "source on fog: 70.0 ± 1.0" in tips


def test_dots_that_would_cover_each_other_stand_side_by_side() -> None:
    methods = ("bn", "tent", "sar", "trust")
    dots = [Dots(Variant(i, m, m), ((0.7 + i * 1e-4, None), (0.3 + 0.1 * i, None))) for i, m in enumerate(methods)]
    root = parse(charts.dot_plot("t", ["fog", "snow"], dots))
    rows = root.findall(".//s:g[@class='row']", NAMESPACE)
    crowded, apart = (sorted(y for _, y in _marks(row)) for row in rows)
    assert all(below - above > 6 for above, below in pairwise(crowded))
    assert apart[0] == apart[-1]


def _place(mark: ElementTree.Element) -> tuple[float, float]:
    x, y = re.findall(r"translate\(([-\d.]+) ([-\d.]+)\)", mark.get("transform", ""))[0]
    return float(x), float(y)


def _marks(row: ElementTree.Element) -> list[tuple[float, float]]:
    return [_place(mark) for mark in row.iter() if "mark" in mark.get("class", "")]


def test_intervals_are_drawn_and_within_the_frame() -> None:
    variant = Variant(0, "tent", "tent")
    drawings = [
        charts.scatter("t", [Spot(variant, 1.0, 0.70, half=0.01), Spot(Variant(1, "bn", "bn"), 2.0, 0.701)], axis="x"),
        charts.line_chart("t", [Curve(variant, ((0.0, 0.5), (1.0, 0.501)), (0.01, None))], axis="x"),
        charts.dot_plot("t", ["fog"], [Dots(variant, ((0.7, 0.01),))]),
    ]
    for drawn in drawings:
        bars = [item for item in parse(drawn).iter() if "whisker" in item.get("class", "")]
        assert len(bars) == 1
        assert all(0 <= float(bars[0].get(side, "nan")) <= 560 for side in ("x1", "x2", "y1", "y2"))


def test_a_curve_lifts_the_pen_where_there_is_no_number() -> None:
    curve = Curve(Variant(0, "tent", "tent"), ((0.0, 0.5), (1.0, math.nan), (2.0, 0.6), (3.0, 0.7)))
    drawn = charts.line_chart("t", [curve], axis="x")
    d = next(
        p.get("d", "") for p in parse(drawn).iter("{http://www.w3.org/2000/svg}path") if "curve" in p.get("class", "")
    )
    assert d.count("M") == 2
    assert "nan" not in drawn


def test_reliability_bars_reach_the_accuracy_of_their_bin() -> None:
    bins = Reliability(count=(0,) * 14 + (10,), confidence=(0.0,) * 14 + (9.8,), correct=(0,) * 14 + (5,))
    root = parse(charts.reliability("t", Variant(0, "trust", "trust"), bins))
    (bar,) = root.findall(".//s:rect", NAMESPACE)
    assert float(bar.get("height", "0")) == pytest.approx((190 - 34 - 8) / 2, abs=0.01)


def test_dumbbells_write_the_gain() -> None:
    drawn = charts.dumbbells(
        "t", [(Variant(0, "tent", "tent"), 0.5, 0.52, 0.001), (Variant(1, "sar", "sar"), 0.5, 0.49, None)]
    )
    assert ">+2.0 ± 0.1<" in drawn
    assert ">-1.0<" in drawn


@pytest.mark.parametrize("empty", [[], [Curve(Variant(0, "a", "a"), ())]], ids=["no curve", "no point"])
def test_charts_of_nothing_are_still_drawings(empty: list[Curve]) -> None:
    parse(charts.line_chart("t", empty, axis="x"))
    parse(charts.dot_plot("t", [], []))
    parse(charts.scatter("t", [], axis="x"))


def test_hostile_names_stay_text() -> None:
    look = Variant(0, HOSTILE, HOSTILE)
    drawings = [
        charts.dot_plot(HOSTILE, [HOSTILE], [Dots(look, ((0.5, 0.1),))]),
        charts.scatter(HOSTILE, [Spot(look, 1.0, 0.5)], axis=HOSTILE),
        charts.line_chart(HOSTILE, [Curve(look, ((0.0, 0.5), (1.0, 0.6)))], axis=HOSTILE, names=[HOSTILE, HOSTILE]),
        charts.dumbbells(HOSTILE, [(look, 0.5, 0.6, 0.01)]),
        charts.reliability(HOSTILE, look, Reliability()),
    ]
    for drawn in drawings:
        assert all(item.tag.rpartition("}")[2] != "script" for item in parse(drawn).iter())


def test_every_method_has_its_own_colour_marker_pair_and_both_grounds_have_contrast() -> None:
    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        r, g, b = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    def contrast(one: str, other: str) -> float:
        low, high = sorted((luminance(one), luminance(other)))
        return (high + 0.05) / (low + 0.05)

    styles = [looks.style_of(method) for method in METHODS]
    assert set(METHODS) == set(looks.STYLES)
    assert len({s.light for s in styles}) == len({s.dark for s in styles}) == len(METHODS)
    assert len({(s.marker, s.hollow) for s in styles}) == len(METHODS)
    for s in [*styles, *looks.OTHERS]:
        assert contrast(s.light, "#ffffff") >= 3
        assert contrast(s.dark, "#1b1e24") >= 3


def test_no_method_is_without_a_place_and_a_look() -> None:
    assert sorted(METHODS) == sorted(REGISTERED)


def test_every_marker_can_be_drawn_everywhere() -> None:
    assert set(figures.MARKS) == set(looks.MARKERS)


def test_methods_of_one_outline_differ_in_color_also_without_red_or_green_cones() -> None:
    """Filled and hollow markers may be small: color-blind readers must see two colors as well."""

    def seen(color: str) -> tuple[float, float, float]:
        """As by deuteranopes (Viénot, Brettel and Mollon, 1999), in linear light."""
        r, g, b = (((int(color[i : i + 2], 16) / 255 + 0.055) / 1.055) ** 2.4 for i in (1, 3, 5))
        yellow = 0.29275 * r + 0.70725 * g
        return yellow, yellow, -0.02234 * r + 0.02234 * g + b

    for ground in ("light", "dark"):
        by_marker: dict[str, list[str]] = {}
        for style in looks.STYLES.values():
            by_marker.setdefault(style.marker, []).append(getattr(style, ground))
        for colors in by_marker.values():
            for one, other in itertools.combinations(colors, 2):
                assert max(abs(a - b) for a, b in zip(seen(one), seen(other), strict=True)) > 0.03, (one, other)


def test_class_names_are_safe() -> None:
    assert re.fullmatch(r"tone m-other\d", looks.css_class(HOSTILE))
