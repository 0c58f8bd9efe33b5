"""Labels of methods, number formats, and images that only one of two cells has right."""

from __future__ import annotations

import math
from dataclasses import replace
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.results.samples import KEY, PROVENANCE, RESULT
from trust_tta.results import Cell, discordant, format_gain, format_number, format_percent, make_label


def test_a_label_shows_the_options_of_its_method() -> None:
    assert make_label("trust", {}) == "trust"
    assert make_label("trust", {"merge": "slerp", "k": 2}) == "trust (k=2, merge=slerp)"
    assert make_label("my\x1b[31m", {"a": "\n"}) == "my?[31m (a=?)"


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=40))
def test_discordant_images_are_counted(pairs: list[tuple[bool, bool]]) -> None:
    def cell(right: list[bool], method: str = "trust", fingerprint: str = "abc") -> Cell:
        bits = "".join("1" if r else "0" for r in right).ljust(-(-len(right) // 8) * 8, "0")
        correct = bytes(int(bits[i : i + 8], 2) for i in range(0, len(bits), 8))
        key = replace(KEY, method=method, fingerprint=fingerprint)
        return Cell(key, replace(RESULT, samples=len(right), correct=correct), PROVENANCE)

    one, other = cell([a for a, _ in pairs]), cell([b for _, b in pairs], method="tent")
    assert discordant(one, other) == (sum(a and not b for a, b in pairs), sum(b and not a for a, b in pairs))
    assert discordant(one, cell([b for _, b in pairs], fingerprint="other")) is None
    assert discordant(one, Cell(KEY, RESULT, PROVENANCE)) is None


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


@pytest.mark.parametrize(("x", "text"), [(1.0625, "1.062"), (1234.5, "1234.500"), (None, "–")])
def test_other_numbers_have_three_decimals(x: float | None, text: str) -> None:
    assert format_number(x) == text
