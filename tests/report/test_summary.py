from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tests.report.samples import make_cell, make_groups, plausible_cells
from trust_tta.report.model import ResultGroup
from trust_tta.report.significance import difference
from trust_tta.report.summary import summarize
from trust_tta.results import Cell, Failure


def group_of(*cells: Cell) -> ResultGroup:
    (group,) = make_groups(cells)
    return group


def seeded(method: str, values: list[float], domain: str = "fog", options: str = "{}") -> list[Cell]:
    return [make_cell(method, domain, seed=i, accuracy=a, options=options) for i, a in enumerate(values)]


def test_the_leader_its_interval_and_its_margin() -> None:
    group = group_of(*seeded("trust", [0.79, 0.80, 0.81]), *seeded("bn", [0.75, 0.76, 0.77]))
    first, second, *_ = summarize(group)
    # 4.302653 is the 97.5 % quantile of Student's t with two degrees of freedom: 0.01 * 4.302653 / sqrt(3) = 0.0248.
    assert "trust leads with 80.0 % accuracy on the only domain" in first
    assert "(95 % interval over 3 seeds: 77.5 to 82.5)" in first
    assert second == "That is 4.0 points above bn (the second, ± 0.0 paired by seed)."


def test_a_difference_within_its_interval_is_called_unresolved() -> None:
    group = group_of(*seeded("trust", [0.70, 0.80, 0.75]), *seeded("tent", [0.78, 0.70, 0.76]))
    first, *_ = summarize(group)
    assert first.endswith(
        "a tie: trust and tent reach 74.7 to 75.0 % accuracy on the only domain (no significant difference: 3 seeds)."
    )


def test_paired_differences_in_closed_form() -> None:
    group = group_of(*seeded("trust", [0.70, 0.74]), *seeded("tent", [0.69, 0.70]))
    tent, trust = group.variants
    found = difference(group, trust, tent)
    assert found.gain == found.seeds.mean == pytest.approx(0.025)
    assert found.seeds.half_width == pytest.approx(12.706204736 * 0.03 / math.sqrt(2) / math.sqrt(2))
    assert group.seed_means("trust") == {0: 0.70, 1: 0.74}


def test_summary_says_when_trust_does_not_win() -> None:
    text = " ".join(
        summarize(group_of(make_cell("trust", "fog", accuracy=0.7), make_cell("sar", "fog", accuracy=0.75)))
    )
    assert "sar leads with 75.0 %" in text
    assert "TRUST does not win here: trust is 5.0 points behind sar." in text
    assert "one seed, so no interval" in text


def test_updates_passes_and_time_of_the_best_method() -> None:
    cells = [
        make_cell("tent", "fog", accuracy=0.6, work=(1, 3, 4.0)),
        make_cell("trust", "fog", accuracy=0.8, work=(6, 13, 24.0)),
        make_cell("trust_naive", "fog", accuracy=0.79, work=(6, 13, 23.0), options='{"steps": 6}'),
    ]
    text = " ".join(summarize(group_of(*cells)))
    assert "trust makes 6 updates and 13 passes per batch, 24 ms per image, 6 times tent." in text


def test_ties_are_reported() -> None:
    cells = [make_cell(m, "fog", accuracy=a) for m, a in (("bn", 0.7), ("tent", 0.70001), ("sar", 0.7), ("eta", 0.6))]
    first, second, *_ = summarize(group_of(*cells))
    assert first.endswith("a tie: tent, bn and sar reach 70.0 % accuracy on the only domain.")
    assert second == "tent is 10.0 points above eta (the next)."


def test_equal_trust_neither_wins_nor_loses() -> None:
    cells = [make_cell(m, "fog", accuracy=a) for m, a in (("bn", 0.70001), ("trust", 0.7), ("trust_naive", 0.69999))]
    text = " ".join(summarize(group_of(*cells)))
    assert "does not win" not in text


def test_missing_and_failed_runs_are_counted() -> None:
    done = [make_cell("tent", "fog"), make_cell("tent", "snow"), make_cell("sar", "fog")]
    (group,) = make_groups(done, [Failure(make_cell("sar", "snow").key, "x")], [make_cell("eta", "fog").key])
    assert summarize(group)[-1] == (
        "1 run failed; 1 run is missing; no mean, because some domains are missing: eta and sar."
    )


def test_no_ranking_without_a_complete_method() -> None:
    text = " ".join(summarize(group_of(make_cell("tent", "fog"), make_cell("sar", "snow"))))
    assert "no method has finished every domain yet, so there is no ranking." in text
    assert "leads" not in text


def test_a_group_with_nothing_finished() -> None:
    (group,) = make_groups([], [Failure(make_cell("tent", "fog").key, "x")])
    assert summarize(group) == [f"Nothing has finished on {group.title} yet.", "1 run failed."]


def test_nan_results_do_not_lead() -> None:
    broken = make_cell("trust", "fog", accuracy=math.nan)
    text = " ".join(summarize(group_of(broken, make_cell("tent", "fog", accuracy=0.6))))
    assert "tent reaches 60.0 %" in text
    assert "1 run predicted NaN for some images" in text


def test_one_cell_is_enough() -> None:
    first, *rest = summarize(group_of(make_cell("tent", "fog", accuracy=0.5)))
    assert first.endswith("tent reaches 50.0 % accuracy on the only domain (one seed, so no interval).")
    assert len(rest) == 1  # its cost


def test_sentences_do_not_depend_on_the_order_of_cells() -> None:
    cells = plausible_cells(methods=["trust", "tent", "bn"], domains=["fog", "snow"])
    assert summarize(group_of(*cells)) == summarize(group_of(*reversed(cells)))
    faster = [replace(c, result=replace(c.result, seconds_median=1.0)) for c in cells]
    assert summarize(group_of(*cells)) != summarize(group_of(*faster))
