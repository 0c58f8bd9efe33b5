from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from tests.report.samples import make_cell, make_groups
from tests.results.samples import PROVENANCE
from trust_tta.report import series
from trust_tta.results import Cell, History


def means(sweep: series.Sweep) -> tuple[tuple[object, float], ...]:
    return tuple((x, mean) for x, (mean, _) in sweep.points)


def test_costs_are_per_batch_and_per_image() -> None:
    (group,) = make_groups([make_cell("trust", "fog", batches=7, batch_size=10, work=(6, 13, 25.0))])
    (cost,) = group.costs
    assert (cost.updates, cost.passes) == (6, 13)
    assert cost.milliseconds == pytest.approx(25.0)


def test_cost_without_a_course_counts_batches_from_the_samples() -> None:
    cell = make_cell("tent", "fog", batches=3, batch_size=8)
    bare = replace(cell, result=replace(cell.result, history=History(), samples=17, updates=3))
    (group,) = make_groups([bare])
    assert group.costs[0].updates == 1  # ceil(17 / 8) = 3 batches


def test_unknown_times_give_no_time() -> None:
    cell = make_cell("tent", "fog")
    (group,) = make_groups([replace(cell, result=replace(cell.result, seconds_median=math.nan))])
    assert group.costs[0].milliseconds is None


def test_running_accuracy_weights_batches_by_their_size() -> None:
    cell = make_cell("tent", "fog", accuracy=0.7)
    course = History(samples=(3, 1), accuracy=(1.0, 0.0), entropy=(0.0, 0.0), seconds=(0.0, 0.0))
    (group,) = make_groups([replace(cell, result=replace(cell.result, history=course))])
    (curve,) = series.running_accuracy(group, "fog")
    assert curve.points == ((3.0, 1.0), (4.0, 0.75))


def test_long_streams_are_thinned_and_keep_their_end() -> None:
    (group,) = make_groups([make_cell("tent", "fog", batches=331, batch_size=2)])
    (curve,) = series.running_accuracy(group)
    assert len(curve.points) <= series.MOST_POINTS
    assert curve.points[-1][0] == 662


def test_the_stream_order_is_that_of_the_runs() -> None:
    starts = {"snow": "03", "fog": "01", "contrast": "02"}
    cells = [
        make_cell("tent", d, setting="continual", provenance=replace(PROVENANCE, started=f"2026-01-01T{t}:00:00+00:00"))
        for d, t in starts.items()
    ]
    (group,) = make_groups(cells)
    assert series.stream_order(group) == ["fog", "contrast", "snow"]
    (curve,) = series.sequence(group)
    assert [x for x, _ in curve.points] == [0, 1, 2]
    assert series.sequence(group, "clean_accuracy") == []


def test_sweeps_hold_all_other_options_fixed() -> None:
    def cell(k: int, steps: int, accuracy: float) -> Cell:
        return make_cell("trust", "fog", accuracy=accuracy, options=f'{{"k": {k}, "steps": {steps}}}')

    (group,) = make_groups([cell(6, 1, 0.7), cell(2, 1, 0.6), cell(10, 1, 0.75), cell(6, 2, 0.8)])
    found = {(s.option, means(s)) for s in series.sweeps(group)}
    assert found == {("k", ((2, 0.6), (6, 0.7), (10, 0.75))), ("steps", ((1, 0.7), (2, 0.8)))}
    assert all(s.numeric for s in series.sweeps(group))


PAPER = ["abcd", "abdc", "adcb", "bacd", "badc", "dbca"]


def orders_cell(orders: list[str] | None, accuracy: float, *, k: int = 6) -> Cell:
    return make_cell("trust", "fog", accuracy=accuracy, options=json.dumps({"k": k, "orders": orders}))


@pytest.mark.parametrize("k", [6, 8], ids=["k left alone", "k said too"])
def test_orders_that_continue_the_papers_are_on_the_curve_over_k(k: int) -> None:
    cells = [orders_cell(None, 0.6, k=2), orders_cell(None, 0.7), orders_cell([*PAPER, "acbd", "dcba"], 0.8, k=k)]
    (sweep,) = series.sweeps(make_groups(cells)[0])
    assert (sweep.option, means(sweep), sweep.numeric) == ("k", ((2, 0.6), (6, 0.7), (8, 0.8)), True)


def test_digits_and_a_beginning_of_the_papers_orders_count_too() -> None:
    cells = [orders_cell(["0123", "0132", "0321"], 0.5), orders_cell(None, 0.7)]
    (sweep,) = series.sweeps(make_groups(cells)[0])
    assert means(sweep) == ((3, 0.5), (6, 0.7))


@pytest.mark.parametrize(
    "orders",
    [[*PAPER[1:], "abcd", "acbd"], [*PAPER[:5], "acbd", "dbca"], ["acbd", "dcba"], ["up", "down"]],
    ids=["turned", "interrupted", "two others", "no orders"],
)
def test_other_orders_are_not_on_the_curve_over_k(orders: list[str]) -> None:
    cells = [orders_cell(None, 0.6, k=2), orders_cell(None, 0.7), orders_cell(orders, 0.1, k=len(orders))]
    points = [means(s) for s in series.sweeps(make_groups(cells)[0]) if s.option == "k"]
    assert points == [((2, 0.6), (6, 0.7))]


def test_a_number_of_orders_is_on_the_curve_once() -> None:
    more = [orders_cell([*PAPER, last], a) for last, a in (("acbd", 0.8), ("dcba", 0.1))]
    (sweep,) = series.sweeps(make_groups([orders_cell(None, 0.7), *more])[0])
    assert means(sweep) == ((6, 0.7), (7, 0.8))


def test_batch_sizes_are_compared_across_groups() -> None:
    cells = [make_cell("tent", "fog", batch_size=b, accuracy=a) for b, a in ((16, 0.5), (128, 0.7), (64, 0.6))]
    (sizes,) = series.batch_size_curves(make_groups([*cells, make_cell("sar", "fog", batch_size=16)]))
    (curve,) = sizes.curves
    assert curve.points == ((16.0, 0.5), (64.0, 0.6), (128.0, 0.7))


def test_a_mean_needs_every_domain_of_the_group() -> None:
    cells = [make_cell("tent", "fog"), make_cell("tent", "snow"), make_cell("sar", "fog")]
    (group,) = make_groups(cells)
    assert group.means().keys() == {"tent"}
    (with_failed,) = make_groups([make_cell("tent", "fog")], [], [make_cell("sar", "snow").key])
    assert with_failed.means() == {}


def test_curves_relative_to_the_first_baseline() -> None:
    accuracies = {"source": (0.5, 0.4), "bn": (0.7, 0.6), "trust": (0.75, 0.5)}
    cells = [
        make_cell(m, d, accuracy=a, setting="continual")
        for m, both in accuracies.items()
        for d, a in zip(("snow", "fog"), both, strict=True)
    ]
    (group,) = make_groups(cells)
    base = series.baseline(group)
    assert base is not None
    (trust,) = series.sequence(group, over=base)
    assert (base.label, trust.variant.label) == ("bn", "trust")
    assert [y for _, y in trust.points] == pytest.approx([0.05, -0.1])
    (alone,) = make_groups([c for c in cells if c.key.method == "trust"])
    assert series.baseline(alone) is None
