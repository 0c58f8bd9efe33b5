from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tests.report.samples import make_cell, make_groups
from tests.results.samples import ENTROPY, PROVENANCE
from trust_tta.report import charts
from trust_tta.report.tables import entropy_table
from trust_tta.results import History
from trust_tta.results.order_records import EntropyByOrder


def test_costs_are_per_batch_and_per_image() -> None:
    (group,) = make_groups([make_cell("trust", "fog", batches=7, batch_size=10, work=(6, 13, 25.0))])
    (cost,) = group.costs
    assert (cost.updates, cost.passes) == (6, 13)
    assert cost.milliseconds == pytest.approx(25.0)


def test_cost_without_a_history_counts_batches_from_the_samples() -> None:
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
    history = History(samples=(3, 1), accuracy=(1.0, 0.0), entropy=(0.0, 0.0), seconds=(0.0, 0.0))
    (group,) = make_groups([replace(cell, result=replace(cell.result, history=history))])
    (curve,) = charts.running_accuracy(group, "fog")
    assert [(p.x, p.y) for p in curve.points] == [(3.0, 1.0), (4.0, 0.75)]


def test_long_curves_are_thinned_and_keep_their_last_point() -> None:
    (group,) = make_groups([make_cell("tent", "fog", batches=331, batch_size=2)])
    (curve,) = charts.running_accuracy(group)
    assert len(curve.points) <= charts.MAX_POINTS
    assert curve.points[-1].x == 662


def test_the_stream_order_is_that_of_the_runs() -> None:
    starts = {"snow": "03", "fog": "01", "contrast": "02"}
    cells = [
        make_cell("tent", d, setting="continual", provenance=replace(PROVENANCE, started=f"2026-01-01T{t}:00:00+00:00"))
        for d, t in starts.items()
    ]
    (group,) = make_groups(cells)
    assert charts.stream_order(group) == ["fog", "contrast", "snow"]
    (curve,) = charts.sequence(group)
    assert [p.x for p in curve.points] == [0, 1, 2]
    assert charts.sequence(group, "clean_accuracy") == []


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
    base = charts.baseline(group)
    assert base is not None
    (trust,) = charts.sequence(group, over=base)
    assert (base.label, trust.variant.label) == ("bn", "trust")
    assert [p.y for p in trust.points] == pytest.approx([0.05, -0.1])
    (alone,) = make_groups([c for c in cells if c.key.method == "trust"])
    assert charts.baseline(alone) is None


def test_entropies_are_a_table_with_the_lowest_orders_in_bold() -> None:
    other = EntropyByOrder(title="b", orders=("dbca", "cdab", "abcd"), entropy=(1.0, 2.0, 3.0), k=1)
    table = entropy_table([ENTROPY, other])
    assert [column.title for column in table.columns] == ["data", "abcd", "badc", "cdab", "dbca"]
    first, second = ([(cell.text, cell.best) for cell in row.cells] for row in table.rows)
    assert first == [("0.600", True), ("0.750", False), ("–", False), ("0.700", True)]
    assert second == [("3.000", False), ("–", False), ("2.000", False), ("1.000", True)]


def test_update_gains_note_the_accuracy_before_and_after() -> None:
    cells = [
        make_cell("tent", "fog", accuracy=0.52, before=0.5),
        make_cell("tide", "fog", accuracy=0.6, before=0.6),  # predicts before the update
        make_cell("bn", "fog", work=(0, 1, 1.0)),
    ]
    (chart,) = charts.before_after(make_groups(cells)[0])
    (series,) = chart.series
    assert series.variant.label == "tent"
    assert series.points[0].y == pytest.approx(0.02)
    assert series.points[0].note == " (50.0 before, 52.0 after the update)"
