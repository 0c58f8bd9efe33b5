"""Alarms: as often wrong as promised, and told apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.live.toys import clean, draw, make, states_equal
from trust_tta.errors import ConfigError
from trust_tta.live.alarms import Limits, Reference, find_alarms
from trust_tta.live.calibration import calibrate, limit_for
from trust_tta.live.monitors import Reading
from trust_tta.live.stream import Stream


def run_lengths(limit: float, *, window: int, seed: int, batches: int = 40_000) -> float:
    """Batches between two false alarms of |mean| over a window of normal numbers."""
    values = np.random.default_rng(seed).normal(size=batches)
    sums = np.cumsum(np.concatenate([[0.0], values]))
    passed = np.abs((sums[window:] - sums[:-window]) / window) > limit
    alarms = int((passed[1:] & ~passed[:-1]).sum())  # one alarm lasts while it is passed
    return batches / max(alarms, 1)


@pytest.mark.parametrize(("batches", "every", "tail"), [(400, 100, "bootstrap"), (400, 20_000, "gumbel")])
def test_false_alarms_come_as_often_as_promised(batches: int, every: float, tail: str) -> None:
    found = []
    for seed in range(3):
        reference = np.random.default_rng(100 + seed).normal(size=(batches, 1))
        limit, how = limit_for(reference, lambda m: np.abs(m[:, 0]), window=4, every=every, seed=seed)
        assert how == tail
        found.append(run_lengths(limit, window=4, seed=seed))
    assert every / 4 < np.exp(np.mean(np.log(found))) < 4 * every


def test_few_vectors_get_a_wider_tail() -> None:
    lengths = []
    for seed in range(20):
        reference = np.random.default_rng(seed).normal(size=(8, 1))
        limit, how = limit_for(reference, lambda m: np.abs(m[:, 0]), window=4, every=100, seed=seed)
        assert how == "student"
        lengths.append(run_lengths(limit, window=4, seed=seed, batches=10_000))
    assert np.median(lengths) > 100


@pytest.mark.parametrize("batches", [4, 8, 16])
def test_a_small_reference_has_limits_near_those_of_a_large_one(batches: int) -> None:
    large, small = (calibrate(make("bn"), clean(n, seed=n)).limits for n in (120, batches))
    assert large.drift is not None
    assert small.drift is not None
    assert large.class_shift is not None
    assert small.class_shift is not None
    assert large.drift / 2 < small.drift < 3 * large.drift
    assert large.class_shift / 2 < small.class_shift < 3 * large.class_shift


def test_reference_is_stored_with_the_snapshots(tmp_path: Path) -> None:
    with Stream(make(), snapshots=tmp_path) as stream:
        reference = stream.calibrate(clean(12), expected_batches_between_false_alarms=50)
    assert reference.limits.every == 50
    again = Stream(make(), snapshots=tmp_path)
    assert again.reference is not None
    assert states_equal(again.reference.state(), reference.state())


def test_calibration_leaves_the_method_unchanged() -> None:
    method = make(lr=1e-2)
    state = method.state_dict()
    first, second = calibrate(method, clean(8)), calibrate(method, clean(8))
    assert states_equal(method.state_dict(), state)
    assert states_equal(first.state(), second.state())


def test_too_little_to_calibrate_from_is_refused() -> None:
    with pytest.raises(ConfigError, match="3 batches are no reference; give at least 4"):
        calibrate(make(), clean(3))
    with pytest.raises(ConfigError, match="expected_batches_between_false_alarms is 0"):
        calibrate(make(), clean(4), expected_batches_between_false_alarms=0)


READING = Reading(images=1000, entropy=0.5, confidence=0.8, effective_classes=8.0, effective_classes_change=1.0)
LIMITS = Limits(drift=0.1, class_shift=0.1, disagreement=0.05)


@pytest.mark.parametrize(
    ("changes", "kinds"),
    [
        ({}, set()),
        ({"input_distance": 0.2}, {"drift"}),
        ({"input_distance": 0.2, "source_shift": 0.3}, {"drift"}),
        ({"input_distance": 0.05, "source_shift": 0.3}, {"class_shift"}),
        ({"weight_distance": 2.0}, {"collapse"}),
        ({"probed": 256, "agreement": 0.9, "probed_classes": 8.0, "source_classes": 8.0}, {"collapse"}),
        (
            {"probed": 256, "agreement": 0.9, "probed_classes": 8.0, "source_classes": 8.0, "input_distance": 0.2},
            {"drift"},
        ),
        (
            {"probed": 64, "agreement": 0.4, "probed_classes": 8.0, "source_classes": 8.0, "input_distance": 0.2},
            {"drift", "collapse"},
        ),
        ({"probed": 64, "agreement": 0.7, "probed_classes": 2.0, "source_classes": 8.0}, {"collapse"}),
        ({"probed": 32, "agreement": 0.1, "probed_classes": 2.0, "source_classes": 8.0}, set()),
        ({"probed": 64, "agreement": 0.4, "probed_classes": 8.0, "source_classes": 1.5}, set()),
    ],
)
def test_find_alarms(changes: dict[str, float], kinds: set[str]) -> None:
    reading = Reading(**{**READING.__dict__, **changes})
    assert set(find_alarms(reading, LIMITS, agreement=0.5, weight_distance=1.0)) == kinds


def test_drift_alarm_lasts_while_drifting() -> None:
    changes = {"probed": 256, "agreement": 0.9, "probed_classes": 8.0, "source_classes": 8.0, "source_shift": 0.3}
    reading = Reading(**{**READING.__dict__, **changes, "input_distance": 0.05})
    for drifting, kind in ((False, "class_shift"), (True, "drift")):
        assert set(find_alarms(reading, LIMITS, agreement=0.5, weight_distance=1.0, drifting=drifting)) == {kind}


@pytest.mark.parametrize(
    ("changes", "few"),
    [
        ({"depth_ratio": 2.0}, True),
        ({"depth_ratio": 2.0, "input_distance": 0.5}, True),  # a class of its own looks different, too
        ({"depth_ratio": 0.5}, False),  # noise
        ({"trained_lead": 0.3}, True),
        ({"trained_lead": 0.3, "input_distance": 0.5}, False),
        ({"trained_lead": 0.1}, False),
        ({"trained_lead": 0.3, "depth_ratio": 2.0, "trained_classes": 0.6}, False),
    ],
)
def test_few_classes_are_told_from_images_on_which_the_statistics_of_training_fail(
    changes: dict[str, float], few: bool
) -> None:
    known: dict[str, Any] = {**READING.__dict__, "trained_classes": 0.3, "trained_lead": 0.3, **changes}
    reading = Reading(**known)
    kinds = set(find_alarms(reading, LIMITS, agreement=0.5, weight_distance=1.0))
    assert ("few_classes" in kinds) == few
    assert not (few and "drift" in kinds)


def test_without_a_reference_only_absolute_rules_hold() -> None:
    reading = Reading(**{**READING.__dict__, "source_shift": 0.9, "probed": 256, "agreement": 0.9})
    assert find_alarms(reading, Limits(), agreement=0.5, weight_distance=1.0) == {}


@pytest.fixture(scope="module")
def reference() -> Reference:
    return calibrate(make(lr=1e-3), clean(64, seed=5), expected_batches_between_false_alarms=1000)


def events_of(reference: Reference, batches: list[torch.Tensor]) -> list[str]:
    stream = Stream(make(lr=1e-3), reference=reference)
    return [event.kind for images in batches for event in stream(images).events]


def test_images_like_the_reference_raise_no_alarm(reference: Reference) -> None:
    assert events_of(reference, clean(60, seed=9)) == []


def test_changed_images_are_drift(reference: Reference) -> None:
    shifted = [1.5 * images + 1 for images in clean(10, seed=8)]
    assert events_of(reference, clean(4, seed=7) + shifted + clean(6, seed=6)) == ["drift", "drift_over"]


@pytest.mark.parametrize(("classes", "kind"), [(4, "class_shift"), (2, "few_classes")])
def test_changed_classes_of_the_same_images_are_told_from_a_drift(
    reference: Reference, classes: int, kind: str
) -> None:
    """Some neighboring classes look like all of them to the first layer."""
    limits = reference.limits.changed(drift=1.0)  # here the first layer sees colors, which are the classes
    calm = Reference(reference.inputs, reference.classes, reference.canary, limits)
    some = [torch.cat([draw(8, seed=9 * i + c, only=c % classes)[0] for c in range(4)]) for i in range(30)]
    assert events_of(calm, clean(4, seed=7) + some)[:1] == [kind]
