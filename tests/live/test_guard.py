"""The guard: streams that ruin a method do not ruin the stream, benign ones keep their gain, every action is done."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

from tests.live.toys import RUINOUS, accuracy, clean, draw, make, ruin, states_equal
from trust_tta.data.sample import load_sample
from trust_tta.errors import ConfigError
from trust_tta.live.calibration import Reference, calibrate
from trust_tta.live.guard import Event, Guard
from trust_tta.live.session import MAX_UPDATE_INTERVAL, StreamCounters
from trust_tta.live.stream import Stream
from trust_tta.methods.registry import create_method
from trust_tta.models.typed import create_model

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
    return serve_clean(Stream(make("source"), guard=None))


@pytest.mark.parametrize("calibrated", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", LEARNERS)
@pytest.mark.parametrize("kind", RUINOUS)
def test_after_a_ruinous_stream_clean_images_are_predicted_as_by_the_source(
    kind: str, name: str, calibrated: bool
) -> None:
    stream = Stream(make(name, lr=LEARNERS[name]), reference=reference(name) if calibrated else None)
    for i in range(RUIN):
        stream(ruin(kind, i))
    assert serve_clean(stream) >= source_accuracy() - 0.5


@pytest.mark.parametrize("name", LEARNERS)
@pytest.mark.parametrize("kind", ["noise", "one class"])
def test_ruinous_streams_ruin_unguarded_methods(kind: str, name: str) -> None:
    stream = Stream(make(name, lr=LEARNERS[name]), guard=None)
    for i in range(RUIN):
        stream(ruin(kind, i))
    assert serve_clean(stream) < source_accuracy() - 3


def serve_shifted(stream: Stream) -> float:
    """Accuracy on images with other colors, which batch statistics make up for, in per cent."""
    right = 0
    for i in range(40):
        images, labels = draw(32, seed=95_000 + i)
        right += int((stream(-1.5 * images + 3).logits.argmax(1) == labels).sum())
    return 100 * right / (32 * 40)


@pytest.mark.parametrize("name", LEARNERS)
def test_where_adaptation_helps_its_gain_is_kept(name: str) -> None:
    alone = serve_shifted(Stream(make(name, lr=1e-3), guard=None))
    guarded = Stream(make(name, lr=1e-3))
    source = serve_shifted(Stream(make("source"), guard=None))
    assert alone > source + 10  # else this tests nothing
    assert serve_shifted(guarded) > alone - 1
    assert guarded.reading is not None
    assert guarded.reading.weight == 1


# Broken images


def test_images_that_are_not_finite_get_nan_and_spoil_nothing() -> None:
    stream, alone = Stream(make(lr=1e-2)), Stream(make(lr=1e-2))
    images = draw(20, seed=2)[0]
    images[3], images[7, 0, 0, 0] = float("nan"), float("inf")
    result = stream(images)
    bad = torch.zeros(20, dtype=torch.bool)
    bad[[3, 7]] = True
    assert torch.equal(result.logits.isnan().all(1), bad)
    assert torch.equal(result.logits[~bad], alone(images[~bad]).logits)
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
    stream = Stream(make("tent", lr=1e-3))
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


class Ruined:
    """Streams whose method forgets classes after some batches."""

    def __init__(self, guard: Guard, *, name: str = "shot", lr: float = 1e-3) -> None:
        self.stream = Stream(make(name, lr=lr), guard=guard)
        for images in clean(3):
            self.stream(images)
        self.learned = self.stream.method.state_dict()

    def collapse(self) -> None:
        """Change the weights as a ruinous update would: every image is predicted as the same class."""
        with torch.no_grad():
            self.stream.method.weights.vector.zero_()
        self.stream._take_fingerprint()

    def until_alarm(self) -> tuple[Tensor, Tensor, Event]:
        """Images and logits of the call that raised the alarm, and its event."""
        for images in clean(60, seed=7):
            self.collapse()
            result = self.stream(images)
            for event in result.events:
                if event.kind == "alarm":
                    return images, result.logits, event
        raise AssertionError("no alarm was raised")


@pytest.mark.parametrize("action", ["source", "rollback"])
def test_an_alarm_restores_the_source_or_the_last_good_snapshot(action: str) -> None:
    ruined = Ruined(Guard(on_alarm=action))  # type: ignore[arg-type]
    _, logits, event = ruined.until_alarm()
    assert event.evidence["e_value"] >= 100
    fresh = make("shot", lr=1e-3).state_dict()
    assert states_equal(ruined.stream.method.state_dict()["adapted"], fresh["adapted"])  # the only good snapshot
    assert bool(logits.isfinite().all())


def test_pause_on_alarm_keeps_the_state() -> None:
    ruined = Ruined(Guard(on_alarm="pause"))
    ruined.until_alarm()
    assert ruined.stream.paused
    assert not ruined.stream(clean(1)[0]).adapted


def test_action_none_only_reports() -> None:
    ruined = Ruined(Guard(on_alarm="none"))
    ruined.until_alarm()
    assert accuracy(ruined.stream.method) < accuracy(make("bn")) - 3


def test_a_lower_level_needs_more_evidence() -> None:
    batches = [Ruined(Guard(alpha=alpha)).until_alarm()[2].batch for alpha in (0.2, 0.0001)]
    assert batches[0] < batches[1]


def test_while_the_source_leads_its_predictions_are_served() -> None:
    ruined = Ruined(Guard(alpha=1e-9))
    right = []
    for i in range(20):
        images, labels = draw(32, seed=95_000 + i)
        ruined.collapse()
        result = ruined.stream(images)
        right.append(float((result.logits.argmax(1) == labels).float().mean()))
    reading = ruined.stream.reading
    assert reading is not None
    assert reading.weight < 0.05
    assert reading.leading_since is not None
    assert 100 * sum(right[4:]) / len(right[4:]) > source_accuracy() - 4


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


# Few classes


@pytest.mark.parametrize("name", ["bn", "tent"])
def test_one_class_is_predicted_by_the_source_until_others_come(name: str) -> None:
    """Statistics of one class make any network predict all of them; those of training do not."""
    options = {} if name == "bn" else {"lr": 1e-3}
    stream, right = Stream(make(name, **options)), []
    for i in range(12):
        images, labels = draw(32, seed=50_000 + i, only=1)
        result = stream(images)
        right.append(float((result.logits.argmax(1) == labels).float().mean()))
    assert sum(right[4:]) / len(right[4:]) > 0.85
    assert serve_clean(stream) >= source_accuracy() - 0.5


@pytest.mark.parametrize("label", [3, 8])
def test_photographs_of_one_class_are_predicted_by_the_source(label: int) -> None:
    """The toy has too few classes for tide: how even its predictions are depends on the drawn images."""
    source, model = (create_model("vmamba_nano", checkpoint="vmamba_nano_cifar10").eval() for _ in range(2))
    stream = Stream(create_method("tide", model))
    images, labels = load_sample()
    right = torch.zeros(2)
    for batch in torch.from_numpy(images[labels == label]).split(32):
        with torch.no_grad():
            predictions = stream(batch).logits, source(batch)
        right += torch.stack([(logits.argmax(1) == label).float().sum() for logits in predictions])
    assert right[1] > 150
    assert right[0] >= right[1] - 4


@pytest.mark.parametrize("kind", ["noise", pytest.param("one class", marks=pytest.mark.slow), "mixed"])
@pytest.mark.parametrize("name", LEARNERS)
def test_ruinous_images_after_a_long_clean_stream_do_not_last(name: str, kind: str) -> None:
    stream = Stream(make(name, lr=LEARNERS[name] / 5))
    for images in clean(QUIET, seed=14):
        stream(images)
    for i in range(RUIN):
        stream(ruin(kind, i))
    assert serve_clean(stream) >= source_accuracy() - 0.5


# Labels


@pytest.mark.parametrize("labeled", [0, 4])
def test_labels_reveal_harm_that_predictions_do_not_show(labeled: int) -> None:
    """The adapted network confuses classes in pairs: it predicts all of them as often as the source."""
    stream = Stream(make("tent", lr=1e-3), guard=Guard(on_alarm="source"))
    adapt, events = stream.method.adapt, list[Event]()
    stream.method.adapt = lambda images: adapt(images)[:, [1, 0, 3, 2, 5, 4]]  # type: ignore[method-assign,index]
    for i in range(24):
        images, labels = draw(32, seed=97_000 + i)
        result = stream(images)
        told = torch.full((32,), -1)
        told[:labeled] = labels[:labeled]
        events += [*result.events, *stream.feedback(result, told)]
        if any(e.kind == "alarm" for e in events):
            break
    assert any(e.kind == "alarm" for e in events) is bool(labeled)
    if labeled:
        assert states_equal(stream.method.state_dict()["adapted"], make("tent", lr=1e-3).state_dict()["adapted"])
        test = stream._session.monitor.comparison.test  # type: ignore[union-attr]
        stream.feedback(result, labels)  # of the state that was undone
        assert test.steps == 0


def test_labels_that_speak_for_adaptation_raise_its_weight() -> None:
    told, silent = (Stream(make("bn")) for _ in range(2))
    images, labels = draw(32, seed=95_001)
    results = [stream(-1.5 * images + 3) for stream in (told, silent)]
    assert told.feedback(results[0], labels) == ()
    weights = [stream._session.monitor.comparison.weight for stream in (told, silent)]  # type: ignore[union-attr]
    assert weights[0] > weights[1]


@pytest.mark.parametrize("labels", [[1, 2], [0.5] * 32, 3])
def test_labels_of_another_shape_or_type_are_refused(labels: object) -> None:
    stream = Stream(make("bn"))
    result = stream(clean(1)[0])
    with pytest.raises(ConfigError, match="one class number for each of the 32 images"):
        stream.feedback(result, labels)
