"""The SVG renderer: every kind of chart, label placement, scales."""

from __future__ import annotations

import itertools
import math
import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trust_tta.report import svg
from trust_tta.report.charts import Chart, Point, Series, outlier_floor, split_outliers
from trust_tta.report.model import Variant
from trust_tta.report.significance import pareto_front
from trust_tta.results.display import METHODS

SVG = "{http://www.w3.org/2000/svg}"
NAMESPACE = {"s": SVG[1:-1]}
HOSTILE = '<script>alert("1")</script>&\'"'


def series(index: int, method: str, *points: tuple[float, float, float | None]) -> Series:
    return Series(Variant(index, method, method), tuple(Point(x, y, error) for x, y, error in points))


def draw(kind: str, *members: Series, categories: tuple[str, ...] = ()) -> ElementTree.Element:
    return ElementTree.fromstring(svg.render(Chart(kind, "n", "t", members, categories=categories)))  # type: ignore[arg-type]


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


def test_outliers_far_below_the_rest_are_left_out_and_named() -> None:
    values = [0.595, 0.764, 0.766, 0.775, 0.789]
    assert outlier_floor(values) == 0.764
    assert outlier_floor([0.1, 0.2, 0.3, 0.4]) == -math.inf
    assert outlier_floor([0.5]) == outlier_floor([]) == -math.inf
    members = [series(i, m, (1.0 + i, v, None)) for i, (m, v) in enumerate(zip(METHODS, values, strict=False))]
    assert [s.variant.label for s in split_outliers(members)[1]] == ["source"]
    root = draw("scatter", *members)
    assert any("below the frame: source 59.5" in (item.text or "") for item in root.iter())
    assert len(root.findall(".//s:g[@data-s]/*[@class]", NAMESPACE)) >= 4


def test_dots_stand_at_their_values_with_tooltips() -> None:
    members = (series(0, "bn", (0, 0.5, None)), series(1, "source", (0, 0.7, 0.01), (1, 0.6, None)))
    root = draw("dots", *members, categories=("fog", "snow"))
    rows = root.findall(".//s:g[@class='row']", NAMESPACE)
    xs = [[x for x, _ in _marks(row)] for row in rows]
    assert [len(x) for x in xs] == [2, 1]
    assert xs[0][0] < xs[1][0] < xs[0][1]
    assert (xs[1][0] - xs[0][0]) == pytest.approx(xs[0][1] - xs[1][0], abs=0.11)
    assert "source on fog: 70.0 ± 1.0" in [item.get("data-tip") for item in root.iter()]


def test_overlapping_dots_are_drawn_in_lanes() -> None:
    methods = ("bn", "tent", "sar", "trust")
    members = [series(i, m, (0, 0.7 + i * 1e-4, None), (1, 0.3 + 0.1 * i, None)) for i, m in enumerate(methods)]
    rows = draw("dots", *members, categories=("fog", "snow")).findall(".//s:g[@class='row']", NAMESPACE)
    crowded, apart = (sorted(y for _, y in _marks(row)) for row in rows)
    assert all(below - above > 6 for above, below in pairwise(crowded))
    assert apart[0] == apart[-1]


@pytest.mark.parametrize(("rows_of", "attribute"), [("domain", "data-d"), ("method", "data-s"), ("", None)])
def test_rows_of_dots_are_hidden_by_their_picker(rows_of: str, attribute: str | None) -> None:
    chart = Chart("dots", "n", "t", (series(3, "tent", (0, 0.5, None)),), categories=("a",), rows_of=rows_of)  # type: ignore[arg-type]
    (row,) = ElementTree.fromstring(svg.render(chart)).findall(".//s:g[@class='row']", NAMESPACE)
    found = {name: row.get(name) for name in ("data-d", "data-s") if row.get(name) is not None}
    assert found == ({attribute: "0" if attribute == "data-d" else "3"} if attribute else {})


def _marks(row: ElementTree.Element) -> list[tuple[float, float]]:
    marks = [mark.get("transform", "") for mark in row.iter() if "mark" in mark.get("class", "")]
    places = [re.findall(r"translate\(([-\d.]+) ([-\d.]+)\)", transform)[0] for transform in marks]
    return [(float(x), float(y)) for x, y in places]


def test_intervals_are_drawn_within_the_frame() -> None:
    drawings = [
        draw("scatter", series(0, "tent", (1.0, 0.70, 0.01)), series(1, "bn", (2.0, 0.701, None))),
        draw("lines", series(0, "tent", (0.0, 0.5, 0.01), (1.0, 0.501, None))),
        draw("dots", series(0, "tent", (0, 0.7, 0.01)), categories=("fog",)),
    ]
    for root in drawings:
        (bar,) = [item for item in root.iter() if "whisker" in item.get("class", "")]
        assert all(0 <= float(bar.get(side, "nan")) <= 560 for side in ("x1", "x2", "y1", "y2"))


def test_curves_are_interrupted_at_nan() -> None:
    root = draw("lines", series(0, "tent", (0.0, 0.5, None), (1.0, math.nan, None), (2.0, 0.6, None), (3.0, 0.7, None)))
    (curve,) = [p.get("d", "") for p in root.iter(f"{SVG}path") if "curve" in p.get("class", "")]
    assert curve.count("M") == 2
    assert "nan" not in ElementTree.tostring(root, encoding="unicode")


def test_reliability_bars_reach_the_accuracy_of_their_bin() -> None:
    (bar,) = draw("reliability", series(0, "trust", (14.5 / 15, 0.5, None))).findall(".//s:rect", NAMESPACE)
    assert float(bar.get("height", "0")) == pytest.approx((190 - 34 - 8) / 2, abs=0.01)


@pytest.mark.parametrize("kind", ["dots", "scatter", "lines", "reliability"])
def test_charts_without_data_are_drawn(kind: str) -> None:
    draw(kind)
    if kind == "lines":
        draw(kind, series(0, "a"))


def test_hostile_names_stay_text() -> None:
    hostile = series(0, HOSTILE, (0.0, 0.5, 0.1))
    for kind in ("dots", "scatter", "lines", "reliability"):
        chart = Chart(kind, HOSTILE, HOSTILE, (hostile,), x_label=HOSTILE, y_label=HOSTILE, categories=(HOSTILE,))
        root = ElementTree.fromstring(svg.render(chart))
        assert all(item.tag.rpartition("}")[2] != "script" for item in root.iter())


@given(st.lists(st.floats(-50, 350), min_size=1, max_size=40), st.floats(1, 30))
def test_labels_are_spread_in_order_within_the_frame(places: list[float], gap: float) -> None:
    moved = svg.spread_labels(places, gap, 0.0, 300.0)
    order = sorted(range(len(places)), key=lambda i: places[i])
    room = min(gap, 300.0 / max(len(places) - 1, 1))
    assert all(moved[b] - moved[a] >= room - 1e-6 for a, b in itertools.pairwise(order))
    assert all(-1e-6 <= place <= 300.0 + 1e-6 for place in moved)


@pytest.mark.parametrize(
    ("places", "expected"),
    [([], []), ([20.0, 90.0], [20.0, 90.0]), ([50.0, 50.0], [50.0, 60.0]), ([0.0, 1.0], [0.0, 10.0]),
     ([100.0, 99.0], [100.0, 90.0])],
    ids=["none", "far apart", "a pair", "at the top", "at the bottom"],
)  # fmt: skip
def test_labels_move_only_where_they_overlap(places: list[float], expected: list[float]) -> None:
    assert svg.spread_labels(places, 10.0, 0.0, 100.0) == pytest.approx(expected)


def test_a_name_takes_the_nearest_free_baseline_or_none() -> None:
    taken = [svg.Label(0.0, 50.0, 100.0)]
    assert svg.free_baseline(60.0, 40.0, 100.0, taken, top=0.0, bottom=200.0) == 100.0
    moved = svg.free_baseline(10.0, 40.0, 100.0, taken, top=0.0, bottom=200.0)
    assert moved is not None
    assert 12.5 <= abs(moved - 100.0) <= 15.0
    assert svg.free_baseline(10.0, 40.0, 100.0, taken, top=95.0, bottom=105.0) is None


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=12))
def test_the_pareto_front_holds_what_no_other_point_dominates(points: list[tuple[int, int]]) -> None:
    found = pareto_front(points, key=lambda p: p)
    beaten = {p for p in points if any(q != p and q[0] <= p[0] and q[1] >= p[1] for q in points)}
    assert set(found) == set(points) - beaten
    assert found == sorted(found)
