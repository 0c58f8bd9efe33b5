from __future__ import annotations

import json

import pytest

from tests.report.samples import make_cell, make_groups
from trust_tta.report.charts import Sweep, by_batch_size, option_sweeps
from trust_tta.results import Cell


def means(sweep: Sweep) -> tuple[tuple[object, float], ...]:
    return tuple((x, point.y) for x, point in zip(sweep.values, sweep.series.points, strict=True))


def test_sweeps_hold_all_other_options_fixed() -> None:
    def cell(k: int, steps: int, accuracy: float) -> Cell:
        return make_cell("trust", "fog", accuracy=accuracy, options=f'{{"k": {k}, "steps": {steps}}}')

    (group,) = make_groups([cell(6, 1, 0.7), cell(2, 1, 0.6), cell(10, 1, 0.75), cell(6, 2, 0.8)])
    found = {(s.option, means(s)) for s in option_sweeps(group)}
    assert found == {("k", ((2, 0.6), (6, 0.7), (10, 0.75))), ("steps", ((1, 0.7), (2, 0.8)))}
    assert all(s.numeric for s in option_sweeps(group))


PAPER = ["abcd", "abdc", "adcb", "bacd", "badc", "dbca"]


def orders_cell(orders: list[str] | None, accuracy: float, *, k: int = 6) -> Cell:
    return make_cell("trust", "fog", accuracy=accuracy, options=json.dumps({"k": k, "orders": orders}))


@pytest.mark.parametrize("k", [6, 8], ids=["k left alone", "k said too"])
def test_orders_that_continue_the_papers_are_on_the_curve_over_k(k: int) -> None:
    cells = [orders_cell(None, 0.6, k=2), orders_cell(None, 0.7), orders_cell([*PAPER, "acbd", "dcba"], 0.8, k=k)]
    (sweep,) = option_sweeps(make_groups(cells)[0])
    assert (sweep.option, means(sweep), sweep.numeric) == ("k", ((2, 0.6), (6, 0.7), (8, 0.8)), True)


def test_digits_and_a_beginning_of_the_papers_orders_count_too() -> None:
    cells = [orders_cell(["0123", "0132", "0321"], 0.5), orders_cell(None, 0.7)]
    (sweep,) = option_sweeps(make_groups(cells)[0])
    assert means(sweep) == ((3, 0.5), (6, 0.7))


@pytest.mark.parametrize(
    "orders",
    [[*PAPER[1:], "abcd", "acbd"], [*PAPER[:5], "acbd", "dbca"], ["acbd", "dcba"], ["up", "down"]],
    ids=["turned", "interrupted", "two others", "no orders"],
)
def test_other_orders_are_not_on_the_curve_over_k(orders: list[str]) -> None:
    cells = [orders_cell(None, 0.6, k=2), orders_cell(None, 0.7), orders_cell(orders, 0.1, k=len(orders))]
    points = [means(s) for s in option_sweeps(make_groups(cells)[0]) if s.option == "k"]
    assert points == [((2, 0.6), (6, 0.7))]


def test_a_number_of_orders_is_on_the_curve_once() -> None:
    more = [orders_cell([*PAPER, last], a) for last, a in (("acbd", 0.8), ("dcba", 0.1))]
    (sweep,) = option_sweeps(make_groups([orders_cell(None, 0.7), *more])[0])
    assert means(sweep) == ((6, 0.7), (7, 0.8))


def test_batch_sizes_are_compared_across_groups() -> None:
    cells = [make_cell("tent", "fog", batch_size=b, accuracy=a) for b, a in ((16, 0.5), (128, 0.7), (64, 0.6))]
    (chart,) = by_batch_size(make_groups([*cells, make_cell("sar", "fog", batch_size=16)]))
    (curve,) = chart.series
    assert [(p.x, p.y) for p in curve.points] == [(16.0, 0.5), (64.0, 0.6), (128.0, 0.7)]
