"""The guard: streams that ruin a method do not ruin the stream, benign ones are left alone, every action is done."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from tests.live.toys import RUINOUS, accuracy, clean, draw, make, noise_like, ruin, states_equal
from trust_tta.live.alarms import Reference
from trust_tta.live.calibration import calibrate
from trust_tta.live.counters import MAX_UPDATE_INTERVAL, StreamCounters
from trust_tta.live.guard import Event, Guard
from trust_tta.live.stream import Stream

LEARNERS = {"tent": 1e-2, "shot": 5e-3}
RUIN, AFTER = 60, 24
QUIET = 70  # batches before a ruinous stream begins


@cache
def reference(name: str) -> Reference:
    return calibrate(make(name, lr=LEARNERS[name]), clean(40, seed=3))


def serve_clean(stream: Stream) -> float:
    """Accuracy of what is served for clean images, in per cent."""
    right = 0
    for i in range(AFTER):
        images, labels = draw(32, seed=90_000 + i)
        right += int((stream(images).logits.argmax(1) == labels).sum())
    return 100 * right / (32 * AFTER)


@cache
def source_accuracy() -> float:
    return serve_clean(Stream(make("bn"), guard=None))


@pytest.mark.parametrize("name", LEARNERS)
@pytest.mark.parametrize("kind", RUINOUS)
def test_after_a_ruinous_stream_clean_images_are_predicted_as_by_the_source(kind: str, name: str) -> None:
    stream = Stream(make(name, lr=LEARNERS[name]), reference=reference(name))
    for i in range(RUIN):
        stream(ruin(kind, i))
    assert serve_clean(stream) >= source_accuracy() - 0.5
    assert accuracy(stream.method) >= accuracy(make("bn")) - 0.5


@pytest.mark.parametrize("name", LEARNERS)
@pytest.mark.parametrize("kind", ["noise", "one class"])
def test_ruinous_streams_ruin_unguarded_methods(kind: str, name: str) -> None:
    stream = Stream(make(name, lr=LEARNERS[name]), guard=None)
    for i in range(RUIN):
        stream(ruin(kind, i))
    assert serve_clean(stream) < source_accuracy() - 3


@pytest.mark.parametrize("name", LEARNERS)
@pytest.mark.parametrize("calibrated", [False, True])
def test_benign_streams_are_left_alone(name: str, calibrated: bool) -> None:
    """The same logits bit for bit, on clean and on shifted images."""
    alone = make(name, lr=1e-3)
    stream = Stream(make(name, lr=1e-3), reference=reference(name) if calibrated else None)
    for i, images in enumerate(clean(40, seed=12)):
        batch = images if i < 15 else 1.3 * images + 0.4
        result = stream(batch)
        assert torch.equal(result.logits, alone(batch))
        assert {event.action for event in result.events} <= {"none"}


def test_without_a_reference_a_ruinous_learning_rate_is_caught_as_well() -> None:
    stream = Stream(make("shot", lr=1e-2))
    events = [e for i in range(RUIN) for e in stream(ruin("noise", i)).events]
    assert "collapse" in {e.kind for e in events}
    assert accuracy(stream.method) > accuracy(make("bn")) - 10  # it would be 35 % without the guard


# Broken images


def test_images_that_are_not_finite_get_nan_and_spoil_nothing() -> None:
    stream, alone = Stream(make(lr=1e-2)), make(lr=1e-2)
    images = draw(20, seed=2)[0]
    images[3], images[7, 0, 0, 0] = float("nan"), float("inf")
    result = stream(images)
    bad = torch.zeros(20, dtype=torch.bool)
    bad[[3, 7]] = True
    assert torch.equal(result.logits.isnan().all(1), bad)
    assert torch.equal(result.logits[~bad], alone(images[~bad]))
    assert result.adapted
    (event,) = result.events
    assert (event.kind, event.evidence) == ("broken_input", {"images": 2})
    assert stream(images).events == ()  # it lasts: said once


def test_nothing_is_learned_from_a_batch_of_which_half_is_broken() -> None:
    stream = Stream(make(lr=1e-2))
    images = draw(20, seed=2)[0]
    images[3] = float("nan")
    assert stream(images).adapted
    images[::2] = float("nan")
    result = stream(images)
    assert not result.adapted
    assert bool(result.logits[5].isfinite().all())
    assert [(e.kind, e.action) for e in result.events] == [("broken_input", "skip")]
    assert not stream(images).adapted
    assert stream(clean(1)[0]).adapted


def test_action_on_broken_images_depends_on_their_share() -> None:
    stream = Stream(make("tent", lr=1e-3), reference=reference("tent"))
    few, half, blank = (clean(1, seed=s)[0] for s in (41, 42, 43))
    few[0], half[::2], blank[:] = float("nan"), float("nan"), 0.5
    stream(clean(1)[0])
    expected = [(few, True, 1), (blank, False, 1), (few, True, 0), (half, False, 1), (few, True, 0), (few, True, 0)]
    for images, adapted, events in expected:
        before = stream.method.state_dict()["adapted"]
        result = stream(images)
        assert (result.adapted, len(result.events)) == (adapted, events)
        assert states_equal(before, stream.method.state_dict()["adapted"]) is not adapted


def test_a_batch_without_a_single_finite_image_is_answered() -> None:
    stream = Stream(make(lr=1e-2))
    state = stream.method.state_dict()
    result = stream(torch.full((4, 3, 12, 12), float("nan")))
    assert result.logits.shape == (4, 6)
    assert bool(result.logits.isnan().all())
    assert not result.adapted
    assert states_equal(stream.method.state_dict(), state)


@pytest.mark.parametrize(
    ("images", "reason"),
    [
        (torch.ones(16, 3, 12, 12), "half of the images or more are blank"),
        (draw(1, seed=0)[0].expand(16, -1, -1, -1), "most images are the same"),
    ],
)
def test_nothing_is_learned_from_a_broken_camera(images: Tensor, reason: str) -> None:
    stream = Stream(make(lr=1e-2))
    state = stream.method.state_dict()
    result = stream(images)
    assert not result.adapted
    assert [(e.kind, e.action, e.reason) for e in result.events] == [("broken_input", "skip", reason)]
    assert states_equal(stream.method.state_dict(), state)
    assert stream(clean(1)[0]).adapted


# Actions


def ruined(guard: Guard, **options: object) -> tuple[Stream, list[Tensor]]:
    """A stream that meets noise until its guard calls a collapse, and the logits of that call."""
    stream = Stream(make("shot", lr=3e-2), guard=guard, **options)  # type: ignore[arg-type]
    for images in clean(3):
        stream(images)
    for i in range(40):
        images = noise_like(i)
        result = stream(images)
        if any(e.kind == "collapse" for e in result.events):
            return stream, [images, result.logits]
    raise AssertionError("no collapse was noticed")


@pytest.mark.parametrize("action", ["source", "rollback"])
def test_the_call_that_rolls_back_predicts_from_the_state_before(action: str) -> None:
    stream, (images, logits) = ruined(Guard(on_collapse=action))  # type: ignore[arg-type]
    assert torch.equal(logits, stream.method.evaluate(images))
    assert torch.equal(logits, make("shot").evaluate(images))  # the only good snapshot is the source


def test_pause_on_collapse_keeps_the_state() -> None:
    stream, _ = ruined(Guard(on_collapse="pause"))
    assert stream.paused
    assert not stream(clean(1)[0]).adapted


def test_action_none_only_reports() -> None:
    stream, _ = ruined(Guard(on_collapse="none"))
    assert accuracy(stream.method) < accuracy(make("bn")) - 3


def test_after_a_collapse_updates_become_fewer_and_each_is_checked() -> None:
    stream, _ = ruined(Guard(), canary=draw(64, seed=40)[0])
    adapted = [stream(images).adapted for images in clean(8, seed=4)]
    assert not adapted[0]
    assert sum(adapted) <= 4
    assert accuracy(stream.method) > accuracy(make("bn")) - 5


def test_drift_can_pause_the_stream() -> None:
    stream = Stream(make("tent"), guard=Guard(on_drift="pause"))
    for images in clean(6):
        stream(3 * images + 4)
    assert stream.paused


@pytest.mark.parametrize("labeled", [True, False])
def test_users_canary_triggers_a_rollback(labeled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trust_tta.live.health.MIN_AGREEMENT", 0.0)  # leaves it to the canary
    images, labels = draw(64, seed=40)
    canary = (images, labels) if labeled else images
    stream, _ = ruined(Guard(check_every=64), canary=canary)
    assert accuracy(stream.method) > accuracy(make("bn")) - 0.5


def test_the_last_good_snapshot_survives_what_came_after_it(tmp_path: object) -> None:
    stream = Stream(make("shot", lr=1e-3), guard=Guard(snapshot_every=64), snapshots=str(tmp_path))
    for images in clean(8):
        stream(images)
    stream.pause()
    for _ in range(6):  # each request writes two snapshots
        stream.resume()
        stream.pause()
    assert stream.rollback().action == "rollback"


def test_update_rate_halves_and_recovers() -> None:
    counters = StreamCounters()
    for interval in (2, 4, 8):
        counters.halve_update_rate()
        assert (counters.update_interval, counters.update_delay) == (interval, interval - 1)
    assert [i for i in range(16) if counters.take_turn()] == [7, 15]
    for interval in (4, 2, 1, 1):
        counters.double_update_rate()
        assert counters.update_interval == interval
    assert counters.update_delay == 0
    for _ in range(10):
        counters.halve_update_rate()
    assert counters.update_interval == MAX_UPDATE_INTERVAL


def test_after_a_collapse_updates_happen_only_during_drift_until_reset(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trust_tta.live.health.DRIFT_TOLERANCE", 0.05)
    guard = Guard(check_every=64)
    stream = Stream(make("shot", lr=LEARNERS["shot"]), guard=guard, reference=reference("shot"))
    events = [event for i in range(RUIN) for event in stream(ruin("noise", i)).events]
    assert "collapse" in {event.kind for event in events}
    after = [stream(images) for images in clean(40, seed=5)]
    over = next(i for i, result in enumerate(after) if any(e.kind == "drift_over" for e in result.events))
    assert not any(result.adapted for result in after[over:])
    stream.reset()
    assert stream(clean(1, seed=6)[0]).adapted


# The end of a drift


@pytest.mark.parametrize("name", ["tent", "tide", "bn_ema"])
@pytest.mark.parametrize("size", [16, 32])
def test_the_first_clean_batch_after_noise_is_predicted_by_the_source(name: str, size: int) -> None:
    options = {"lr": 1e-2} if name != "bn_ema" else {}
    stream = Stream(make(name, **options), reference=calibrate(make(name, **options), clean(40, size=size, seed=3)))
    for i in range(12):
        stream(noise_like(i, size))
    (images,) = clean(1, size=size, seed=8)
    result = stream(images)
    assert [(e.kind, e.action) for e in result.events] == [("drift_over", "source")]
    assert torch.equal(result.logits, make(name, **options).evaluate(images))
    after = stream(clean(1, size=size, seed=9)[0])
    assert (after.events, after.adapted) == ((), False)  # on images like the reference the source is as good as any
    again = [stream(noise_like(i, size)).adapted for i in range(20, 24)]
    assert again[-1]  # but it learns from what differs


def test_distances_around_the_limit_raise_one_drift_alarm() -> None:
    stream = Stream(make("tent", lr=1e-3), reference=reference("tent"))
    limit = reference("tent").limits.drift
    assert limit is not None
    distances, events = [], []
    for images in clean(40, seed=21):
        result = stream(1.08 * images)
        events += [e.kind for e in result.events]
        assert result.reading is not None
        distances.append(result.reading.input_distance or 0.0)
    assert min(distances) < limit < max(distances)  # else this tests nothing
    assert events == ["drift"]


def test_a_drift_that_fades_away_ends() -> None:
    stream = Stream(make("tent", lr=1e-3), reference=reference("tent"))
    for i, images in enumerate(clean(60, seed=22)):
        events = stream((1 + 0.5 * max(0.0, 1 - i / 30)) * images).events
        if any(e.kind == "drift_over" for e in events):
            assert i > 20
            return
    raise AssertionError("the drift never ended")


def test_a_single_outlying_batch_does_not_reset_the_method() -> None:
    stream, alone = Stream(make("tide", lr=1e-3), reference=reference("tent")), make("tide", lr=1e-3)
    events = []
    for i, images in enumerate(clean(8, seed=23)):
        batch = 1.1 * images if i == 4 else images
        result = stream(batch)
        events += [(e.kind, e.action) for e in result.events]
        assert torch.equal(result.logits, alone(batch))
    assert events == [("drift", "none"), ("drift_over", "none")]


def calm() -> Reference:
    """In this network's first layer one class looks like a drift: a reference that does not mind."""
    known = reference("tent")
    return replace(known, limits=known.limits.model_copy(update={"drift": 10.0}))


@pytest.mark.parametrize(("classes", "kind", "action"), [(4, "class_shift", "skip"), (1, "few_classes", "source")])
@pytest.mark.parametrize("name", ["tide", "tent"])
def test_updates_before_a_class_shift_are_undone(name: str, classes: int, kind: str, action: str) -> None:
    stream = Stream(make(name, lr=1e-3), reference=calm())
    events: list[Event] = []
    for i in range(40):
        batch = torch.cat([draw(32 // classes, seed=100 * i + c, only=c)[0] for c in range(classes)])
        events += stream(batch).events
    (shift,) = events
    assert (shift.kind, shift.action) == (kind, action)
    fresh = make(name, lr=1e-3).state_dict()
    state = stream.method.state_dict()
    assert all(states_equal(state[part], fresh[part]) for part in ("adapted", "statistics", "extra"))


@pytest.mark.parametrize("name", ["bn", "lame", "tent", "tide"])
def test_one_class_is_predicted_with_the_statistics_of_training_until_others_come(name: str) -> None:
    """Statistics of one class make any network predict all of them; those of training do not."""
    options = {} if name in ("bn", "lame") else {"lr": 1e-3}
    stream, right, events = Stream(make(name, **options), reference=calm()), [], []
    for i in range(12):
        images, labels = draw(32, seed=50_000 + i, only=1)
        result = stream(images)
        right.append(float((result.logits.argmax(1) == labels).float().mean()))
        events += [(e.kind, e.action) for e in result.events]
    assert events == [("few_classes", "source")]
    assert min(right[4:]) > 0.85
    after = [stream(images) for images in clean(6, seed=13)]
    assert [e.kind for result in after for e in result.events] == ["few_classes_over"]
    assert not any(result.adapted for result in after)  # on images like the reference there is nothing to gain


@pytest.mark.parametrize("kind", ["noise", pytest.param("one class", marks=pytest.mark.slow), "mixed"])
@pytest.mark.parametrize("name", LEARNERS)
def test_ruinous_images_after_a_long_clean_stream_are_undone(name: str, kind: str) -> None:
    stream = Stream(make(name, lr=LEARNERS[name] / 5), reference=reference(name))
    for images in clean(QUIET, seed=14):
        stream(images)
    events = [event for i in range(RUIN) for event in stream(ruin(kind, i)).events]
    assert events
    assert events[0].batch <= QUIET + 16
    assert serve_clean(stream) >= source_accuracy() - 0.5
