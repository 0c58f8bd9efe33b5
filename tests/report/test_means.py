"""Means over seeds and domains, and which runs share a table."""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import replace

import pytest

from tests.results.samples import RESULT, cell
from trust_tta.report.model import Aggregate, ResultGroup, make_groups
from trust_tta.results import Cell
from trust_tta.results.display import CORRUPTIONS, METHODS


def group_of(*cells: Cell) -> ResultGroup:
    (group,) = make_groups(cells)
    return group


def test_rows_and_columns_have_a_fixed_order() -> None:
    cells = [cell(m, d, 0.5) for m in (*METHODS, "zeta", "alpha") for d in (*CORRUPTIONS, "clean", "spatter", "art")]
    random.Random(0).shuffle(cells)
    group = group_of(*cells)
    assert tuple(variant.label for variant in group.variants) == (*METHODS, "alpha", "zeta")
    assert group.domains == ("clean", *CORRUPTIONS, "spatter", "art")


def test_seeds_give_mean_deviation_and_t_interval() -> None:
    values = [0.71, 0.75, 0.70]
    found = group_of(*(cell("tent", "fog", v, seed=s) for s, v in enumerate(values))).entry("tent", "fog")
    assert found.n == 3
    assert found.mean == pytest.approx(statistics.mean(values), abs=1e-15)
    assert found.std == pytest.approx(statistics.stdev(values), abs=1e-15)
    # 4.302653: the 97.5 % point of Student's t with two degrees of freedom, from printed tables.
    assert found.half_width == pytest.approx(4.302653 * statistics.stdev(values) / math.sqrt(3), rel=1e-6)


def test_two_seeds_follow_the_cauchy_closed_form() -> None:
    found = group_of(*(cell("tent", "fog", v, seed=s) for s, v in enumerate((0.25, 0.75)))).entry("tent", "fog")
    # One degree of freedom is the Cauchy law, whose 97.5 % point is tan(0.475 pi).
    assert found.half_width == pytest.approx(math.tan(0.475 * math.pi) * 0.25, rel=1e-9)


def test_one_seed_has_no_spread() -> None:
    assert group_of(cell("tent", "fog", 0.5)).entry("tent", "fog") == Aggregate(0.5, n=1)


def test_mean_over_domains() -> None:
    cells = [cell("source", d, a) for d, a in (("fog", 0.5), ("snow", 0.25))]
    cells += [cell("trust", d, a, seed=s) for s in (0, 1) for d, a in (("fog", 0.75 + s / 8), ("snow", 0.5))]
    group = group_of(*cells)
    assert [group.mean(label).mean for label in ("source", "trust")] == [0.375, 0.65625]
    # The means of the two seeds are 0.625 and 0.6875.
    assert group.mean("trust").std == pytest.approx(statistics.stdev([0.625, 0.6875]), abs=1e-15)


def test_variants_with_missing_domains_have_no_mean() -> None:
    group = group_of(cell("source", "fog", 0.5), cell("source", "snow", 0.5), cell("trust", "fog", 0.9))
    assert group.entry("trust", "snow") == Aggregate()
    assert (group.mean("source"), group.mean("trust")) == (Aggregate(0.5, n=1), Aggregate())


def test_uneven_seeds_keep_the_mean_of_what_is_shown() -> None:
    cells = [cell("trust", "fog", 0.5, seed=0), cell("trust", "fog", 0.75, seed=1), cell("trust", "snow", 0.25)]
    assert group_of(*cells).mean("trust") == Aggregate((0.625 + 0.25) / 2, n=1)


@pytest.mark.parametrize(
    "twin",
    [
        cell("trust", "fog", 0.75, batch_size=64),
        cell("trust", "fog", 0.75, dataset="pacs"),
        cell("trust", "fog", 0.75, checkpoint="other", seed=1),
        replace(cell("trust", "fog", 0.75), key=replace(cell("trust", "fog", 0.5).key, fingerprint="x")),
    ],
    ids=["batch-size", "dataset", "checkpoint", "fingerprint"],
)
def test_different_runs_are_never_mixed(twin: Cell) -> None:
    groups = make_groups([cell("trust", "fog", 0.5), twin])
    assert sorted(group.entry("trust", "fog").mean or 0.0 for group in groups) == [0.5, 0.75]


def test_variants_are_never_mixed() -> None:
    group = group_of(cell("trust", "fog", 0.5), cell("trust", "fog", 0.75, options='{"k":2}', seed=1))
    assert sorted(group.means().values()) == [0.5, 0.75]


def test_data_may_follow_the_seed() -> None:
    one = cell("trust", "fog", 0.5)
    two = replace(cell("trust", "fog", 1.0), key=replace(one.key, seed=1, fingerprint="x"))
    assert group_of(one, two).entry("trust", "fog").mean == 0.75


def test_labels_are_rows_in_the_order_of_methods_and_options() -> None:
    cells = [replace(cell("trust", "fog", 0.5, options=f'{{"k":{k}}}'), label=f"K={k}") for k in (12, 2)]
    labels = [variant.label for variant in group_of(*cells, cell("tent", "fog", 0.5)).variants]
    assert labels == ["tent", "K=2", "K=12"]


def test_values_that_a_method_lacks_are_missing() -> None:
    none = replace(cell("lame", "fog", 0.5), result=replace(RESULT, accuracy_before=None))
    nan = replace(cell("trust", "fog", 0.5), result=replace(RESULT, accuracy_before=math.nan))
    assert group_of(none, nan).means("accuracy_before") == {}
