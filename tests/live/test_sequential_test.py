"""The test of harm: its e-value is that of a slow computation, it holds its level, and it finds harm."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trust_tta.errors import StateError
from trust_tta.live.sequential_test import STAKES, HarmTest


def e_value_by_definition(evidence: list[float]) -> float:
    """Mean over stakes, sum over all start times, of capital times the product of every bet since."""
    t = len(evidence)
    total = 1 / (t + 1)  # capital that has not started
    for start in range(1, t + 1):
        for stake in STAKES:
            wealth = 1 / (start * (start + 1)) / len(STAKES)
            for x in evidence[start - 1 :]:
                wealth *= 1 + stake * x
            total += wealth
    return total


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-1, 1), min_size=1, max_size=20))
def test_e_value_is_the_sum_over_start_times(evidence: list[float]) -> None:
    test = HarmTest()
    for x in evidence:
        e_value = test.add(x)
    assert e_value == pytest.approx(e_value_by_definition(evidence))


def run(draws: np.ndarray, alpha: float) -> float:
    """Share of streams (streams, steps) with an alarm at any time."""
    alarms = 0
    for stream in draws:
        test = HarmTest()
        alarms += any(test.add(x) >= 1 / alpha for x in stream.tolist())
    return alarms / len(draws)


def test_expected_e_value_is_one_for_evidence_of_mean_zero() -> None:
    """Exactly, over all 2^10 streams of fair coins."""
    values = []
    for bits in range(1024):
        test = HarmTest()
        values += [[test.add(1.0 if bits >> i & 1 else -1.0) for i in range(10)]]
    np.testing.assert_allclose(np.mean(values, 0), 1.0)


@pytest.mark.parametrize("alpha", [0.1, 0.05, 0.01])
def test_false_alarms_are_rarer_than_alpha(alpha: float) -> None:
    generator = np.random.default_rng(0)
    draws = generator.choice([-1.0, -0.2, 0.3, 0.9], size=(400, 300))  # of mean zero
    assert run(draws, alpha) <= alpha + 2 * np.sqrt(alpha / 400)


@pytest.mark.parametrize(("start", "longest"), [(0, 16), (100, 40), (1000, 60)])
def test_harm_is_found_whenever_it_begins(start: int, longest: int) -> None:
    test = HarmTest()
    for _ in range(start):
        test.add(-0.3)
    delay = next(i for i in range(1, 200) if test.add(0.6) >= 100)
    assert delay <= longest
    assert test.certainty >= 0.99


def test_state_round_trip() -> None:
    test, again = HarmTest(), HarmTest()
    for x in (0.5, -0.25, 0.75):
        test.add(x)
    HarmTest.check_state(test.state())
    again.load(test.state())
    assert again.add(0.3) == test.add(0.3)
    for hostile in (
        {},
        {**test.state(), "peak": 0.5},
        {**test.state(), "wealth": [1.0]},
        {**test.state(), "steps": -1},
    ):
        with pytest.raises(StateError, match="the snapshot's test"):
            HarmTest.check_state(hostile)
