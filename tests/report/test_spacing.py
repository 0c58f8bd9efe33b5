from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trust_tta.report.charts import Box, free_place, spread_out
from trust_tta.report.significance import frontier


@given(st.lists(st.floats(-50, 350), min_size=1, max_size=40), st.floats(1, 30))
def test_places_are_spread_out_in_the_same_order_within_the_frame(places: list[float], apart: float) -> None:
    moved = spread_out(places, apart, 0.0, 300.0)
    order = sorted(range(len(places)), key=lambda i: places[i])
    room = min(apart, 300.0 / max(len(places) - 1, 1))
    assert all(moved[b] - moved[a] >= room - 1e-6 for a, b in itertools.pairwise(order))
    assert all(-1e-6 <= place <= 300.0 + 1e-6 for place in moved)


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ([], []),
        ([20.0, 90.0], [20.0, 90.0]),
        ([50.0, 50.0], [45.0, 55.0]),
        ([50.0, 50.0, 50.0, 90.0], [40.0, 50.0, 60.0, 90.0]),
        ([0.0, 1.0], [0.0, 10.0]),
        ([100.0, 99.0], [100.0, 90.0]),
    ],
    ids=["none", "far apart", "a pair", "a crowd beside one alone", "at the top", "at the bottom"],
)
def test_places_move_as_little_as_they_must(places: list[float], expected: list[float]) -> None:
    assert spread_out(places, 10.0, 0.0, 100.0) == pytest.approx(expected)


def test_a_name_goes_to_the_nearest_free_line_or_nowhere() -> None:
    taken = [Box(0.0, 50.0, 100.0)]
    assert free_place(60.0, 40.0, 100.0, taken, top=0.0, bottom=200.0) == 100.0
    moved = free_place(10.0, 40.0, 100.0, taken, top=0.0, bottom=200.0)
    assert moved is not None
    assert 12.5 <= abs(moved - 100.0) <= 15.0
    assert free_place(10.0, 40.0, 100.0, taken, top=95.0, bottom=105.0) is None


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=12))
def test_the_frontier_is_what_nothing_beats(points: list[tuple[int, int]]) -> None:
    found = frontier(points, key=lambda p: p)
    beaten = {p for p in points if any(q != p and q[0] <= p[0] and q[1] >= p[1] for q in points)}
    assert set(found) == set(points) - beaten
    assert found == sorted(found)
