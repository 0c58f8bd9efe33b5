from __future__ import annotations

import math
import random
import statistics
from dataclasses import replace
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.results.samples import RESULT, cell
from trust_tta.errors import ConfigError
from trust_tta.results import Aggregate, format_gain, format_percent, format_value, table
from trust_tta.results.display import CORRUPTIONS, METHODS


def test_rows_and_columns_stand_in_the_fixed_order_whatever_comes_first() -> None:
    cells = [cell(m, d, 0.5) for m in (*METHODS, "zeta", "alpha") for d in (*CORRUPTIONS, "clean", "spatter", "art")]
    random.Random(0).shuffle(cells)
    found = table(cells)
    assert found.rows == (*METHODS, "alpha", "zeta")
    assert found.columns == ("clean", *CORRUPTIONS, "spatter", "art")


def test_seeds_give_mean_deviation_and_t_interval() -> None:
    values = [0.71, 0.75, 0.70]
    found = table([cell("tent", "fog", v, seed=s) for s, v in enumerate(values)]).cell("tent", "fog")
    assert found.n == 3
    assert found.mean == pytest.approx(statistics.mean(values), abs=1e-15)
    assert found.std == pytest.approx(statistics.stdev(values), abs=1e-15)
    # 4.302653: the 97.5 % point of Student's t with two degrees of freedom, from printed tables.
    assert found.half_width == pytest.approx(4.302653 * statistics.stdev(values) / math.sqrt(3), rel=1e-6)


def test_two_seeds_follow_the_cauchy_closed_form() -> None:
    found = table([cell("tent", "fog", v, seed=s) for s, v in enumerate((0.25, 0.75))]).cell("tent", "fog")
    # One degree of freedom is the Cauchy law, whose 97.5 % point is tan(0.475 pi).
    assert found.half_width == pytest.approx(math.tan(0.475 * math.pi) * 0.25, rel=1e-9)


def test_one_seed_has_no_spread() -> None:
    assert table([cell("tent", "fog", 0.5)]).cell("tent", "fog") == Aggregate(0.5, n=1)


def test_mean_column() -> None:
    cells = [cell("source", d, a) for d, a in (("fog", 0.5), ("snow", 0.25))]
    cells += [cell("trust", d, a, seed=s) for s in (0, 1) for d, a in (("fog", 0.75 + s / 8), ("snow", 0.5))]
    found = table(cells)
    assert [m.mean for m in found.means] == [0.375, 0.65625]
    # Row means of the two seeds are 0.625 and 0.6875.
    assert found.means[1].std == pytest.approx(statistics.stdev([0.625, 0.6875]), abs=1e-15)


def test_rows_with_missing_entries_have_no_mean() -> None:
    found = table([cell("source", "fog", 0.5), cell("source", "snow", 0.5), cell("trust", "fog", 0.9)])
    assert found.cell("trust", "snow") == Aggregate()
    assert found.means == (Aggregate(0.5, n=1), Aggregate())


def test_uneven_seeds_keep_the_mean_of_what_is_shown() -> None:
    cells = [cell("trust", "fog", 0.5, seed=0), cell("trust", "fog", 0.75, seed=1), cell("trust", "snow", 0.25)]
    assert table(cells).means == (Aggregate((0.625 + 0.25) / 2, n=1),)


@pytest.mark.parametrize(
    ("twin", "field"),
    [
        (cell("trust", "fog", 0.5, batch_size=64), "batch_size"),
        (cell("trust", "fog", 0.5, options='{"k":2}', seed=1), "options"),
        (cell("trust", "fog", 0.5, dataset="pacs"), "dataset"),
        (cell("trust", "fog", 0.5, checkpoint="other", seed=1), "checkpoint"),
        (
            replace(cell("trust", "fog", 0.5), key=replace(cell("trust", "fog", 0.5).key, fingerprint="x")),
            "fingerprint",
        ),
        (cell("trust", "fog", 0.5), "2 times"),
    ],
    ids=["batch-size", "options", "dataset", "checkpoint", "fingerprint", "twice"],
)
def test_different_runs_are_never_mixed(twin: object, field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        table([cell("trust", "fog", 0.5), twin])  # type: ignore[list-item]


def test_data_may_follow_the_seed() -> None:
    one = cell("trust", "fog", 0.5)
    two = replace(cell("trust", "fog", 1.0), key=replace(one.key, seed=1, fingerprint="x"))
    assert table([one, two]).cell("trust", "fog").mean == 0.75


def test_labels_are_rows_in_the_order_of_methods_and_options() -> None:
    cells = [replace(cell("trust", "fog", 0.5, options=f'{{"k":{k}}}'), label=f"K={k}") for k in (12, 2)]
    assert table([*cells, cell("tent", "fog", 0.5)]).rows == ("tent", "K=2", "K=12")


def test_values_that_a_method_does_not_give_are_missing() -> None:
    none = replace(cell("lame", "fog", 0.5), result=replace(RESULT, accuracy_before=None))
    nan = replace(cell("trust", "fog", 0.5), result=replace(RESULT, accuracy_before=math.nan))
    found = table([none, nan], value="accuracy_before")
    assert found.means == (Aggregate(), Aggregate())


def test_no_cells_make_an_empty_table() -> None:
    assert (table([]).rows, table([]).columns, table([]).means) == ((), (), ())


@pytest.mark.parametrize("field", ["colour", "course"])
def test_unknown_values_are_refused(field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        table([cell("trust", "fog", 0.5)], value=field)


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (0.775, "77.5"),
        (0.7745, "77.4"),
        (0.7755, "77.6"),
        (0.6665, "66.6"),
        (0.77450001, "77.5"),
        (1.0, "100.0"),
        (0.0, "0.0"),
        (-0.0, "0.0"),
        (-0.0004, "0.0"),
        (1e-300, "0.0"),
        (2 / 3, "66.7"),
        (None, "–"),
        (math.nan, "–"),
        (math.inf, "inf"),
    ],
)
def test_percent_rounds_half_to_even_on_the_decimal(x: float | None, text: str) -> None:
    assert format_percent(x) == text


@given(st.integers(0, 10**6))
def test_percent_is_never_off_by_more_than_half_a_digit(millionths: int) -> None:
    text = format_percent(millionths / 10**6)
    assert abs(Decimal(text) - Decimal(millionths) / 10**4) <= Decimal("0.05")


@pytest.mark.parametrize(
    ("x", "text"), [(0.013, "+1.3"), (-0.002, "-0.2"), (0.0, "0.0"), (0.0004, "0.0"), (-0.0004, "0.0"), (None, "–")]
)
def test_gains_carry_their_sign(x: float | None, text: str) -> None:
    assert format_gain(x) == text


@pytest.mark.parametrize(
    ("name", "x", "text"),
    [
        ("ece", 0.0525, "5.2"),
        ("nll", 1.0625, "1.062"),
        ("updates", 79.0, "79"),
        ("peak_memory", 3 * 2**20, "3.0"),
        ("peak_memory", None, "–"),
        ("seconds_median", 1234.5, "1234.500"),
    ],
)
def test_other_values_have_their_own_digits(name: str, x: float | None, text: str) -> None:
    assert format_value(name, x) == text
