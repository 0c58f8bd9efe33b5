"""The stream as its user sees it: what the method predicts, from several threads, after a restart, and when asked."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import trust_tta as tt
from tests.live.toys import clean, draw, make, states_equal, toy
from trust_tta.errors import ConfigError, ShapeError, StateError, TrustWarning
from trust_tta.live.guard import Event, Guard
from trust_tta.live.stream import Stream

OFTEN = Guard(snapshot_every=64)


@pytest.mark.parametrize("name", ["source", "bn", "tent", "eta", "sar", "shot"])
def test_on_clean_images_the_method_adapts_as_alone(name: str) -> None:
    alone, stream = make(name), Stream(make(name), guard=OFTEN)
    for images in clean(8):
        result = stream(images)
        expected = alone(images)
        assert result.adapted
        if name == "source":
            assert torch.equal(result.logits, expected)
    assert states_equal(stream.method.state_dict(), alone.state_dict())


def test_once_adaptation_helps_the_methods_own_predictions_are_served() -> None:
    alone, stream = make(lr=1e-3), Stream(make(lr=1e-3))
    for i, images in enumerate(clean(20)):
        shifted = 3 * images + 4  # only batch statistics make up for it
        result, expected = stream(shifted), alone(shifted)
        assert i < 8 or torch.equal(result.logits, expected)


def test_without_a_guard_it_only_adapts() -> None:
    alone, stream = make(lr=1e-2), Stream(make(lr=1e-2), guard=None)
    for images in clean(3):
        assert torch.equal(stream(images).logits, alone(images))
    assert stream.reading is None


def test_single_images_and_odd_batches_are_taken() -> None:
    stream = Stream(make(lr=1e-3, statistics="stream"))
    for size in (1, 3, 1, 17, 2, 100):
        assert stream(draw(size, seed=size)[0]).logits.shape == (size, 6)
    assert stream(draw(1, seed=0)[0][0]).logits.shape == (1, 6)
    assert (stream.batches, stream.images) == (7, 125)


def test_inputs_that_are_no_images_are_refused() -> None:
    stream = Stream(make())
    with pytest.raises(ShapeError, match=r"images have shape \(2, 2\)"):
        stream(torch.zeros(2, 2))
    with pytest.raises(ConfigError, match="images are ndarray and this network has no preprocessing"):
        stream(np.zeros((4, 4, 3), dtype=np.uint8))
    assert stream.batches == 0


def test_pictures_go_through_the_networks_preprocessing() -> None:
    model: Any = toy()
    model.preprocessing = lambda pictures: torch.from_numpy(pictures).permute(0, 3, 1, 2) / 255 - 0.5
    stream = Stream(tt.create_method("tent", model))
    pictures = np.random.default_rng(0).integers(0, 256, (5, 12, 12, 3), dtype=np.uint8)
    floats = torch.from_numpy(pictures).permute(0, 3, 1, 2) / 255 - 0.5
    expected = Stream(make())(floats, adapt=False).logits
    assert torch.equal(stream(pictures, adapt=False).logits, expected)
    assert torch.equal(stream(torch.from_numpy(pictures), adapt=False).logits, expected)


def test_predictions_without_adapting_leave_no_trace() -> None:
    stream = Stream(make(lr=1e-2))
    images = clean(2)
    stream(images[0])
    state = stream.method.state_dict()
    result = stream(images[1], adapt=False)
    assert not result.adapted
    assert states_equal(stream.method.state_dict(), state)
    assert stream.batches == 1


@pytest.mark.parametrize("name", ["tent", "bn", "shot", "sar", "roid"])
def test_single_images_are_predicted_by_the_source_where_the_batch_has_no_statistics(name: str) -> None:
    stream, source, events = Stream(make(name)), make("source"), list[Event]()
    images, labels = draw(40, seed=6, noise=1.5)
    state = stream.method.state_dict()
    for image in images:
        result = stream(image)
        torch.testing.assert_close(result.logits, source(image[None]))
        assert not result.adapted
        events += result.events
    assert [(e.kind, e.action) for e in events] == [("single_image", "none")]
    assert states_equal(stream.method.state_dict(), state)
    assert stream(images).adapted


def test_single_images_without_batch_statistics_are_refused_where_nothing_else_can_predict_them() -> None:
    stream = Stream(make("tent"), guard=None)
    with pytest.raises(ConfigError, match='create the method with statistics="stream", or give batches of 8 or more'):
        stream(draw(1, seed=0)[0])
    assert stream(clean(1)[0]).adapted


@pytest.mark.parametrize("statistics", ["stream", "source"])
def test_single_images_are_learned_from_with_other_statistics(statistics: str) -> None:
    stream = Stream(make("tent", statistics=statistics))
    results = [stream(image) for image in draw(4, seed=0)[0]]
    assert all(result.adapted and not result.events for result in results)


def test_predictions_without_adapting_report_broken_images() -> None:
    stream = Stream(make(lr=1e-3))
    images = clean(1)[0]
    images[5] = float("nan")
    result = stream(images, adapt=False)
    assert [e.kind for e in result.events] == ["broken_input"]
    assert result.logits.isnan().any(1).nonzero().tolist() == [[5]]


# Requests


def test_pause_and_resume() -> None:
    stream = Stream(make(lr=1e-2))
    images = clean(4)
    assert stream.pause().action == "pause"
    state = stream.method.state_dict()
    assert not stream(images[0]).adapted
    assert states_equal(stream.method.state_dict(), state)
    assert stream.resume().action == "resume"
    assert stream(images[1]).adapted


def test_reset_goes_back_to_the_source() -> None:
    stream = Stream(make(lr=1e-2))
    start = stream.method.state_dict()
    for images in clean(3):
        stream(images)
    event = stream.reset()
    assert (event.kind, event.action) == ("request", "source")
    assert states_equal(stream.method.state_dict(), start)


def test_rollback_goes_to_the_last_snapshot_that_proved_good() -> None:
    stream = Stream(make(lr=1e-3), guard=OFTEN)
    states = []
    for batch in clean(6):  # snapshots after 2, 4 and 6 batches; that after 4 proves good after 6
        stream(3 * batch + 4)  # on which adaptation helps
        states.append(stream.method.state_dict())
    assert stream.rollback().action == "rollback"
    assert states_equal(stream.method.state_dict(), states[3])


def test_fork_is_independent() -> None:
    stream = Stream(make(lr=1e-2))
    images = clean(6)
    for batch in images[:3]:
        stream(batch)
    twin = stream.fork()
    state = stream.method.state_dict()
    results = [twin(batch).logits for batch in images[3:]]
    assert states_equal(stream.method.state_dict(), state)
    assert all(torch.equal(stream(batch).logits, r) for batch, r in zip(images[3:], results, strict=True))


def test_a_fork_into_a_folder_that_is_in_use_goes_on_from_the_fork(tmp_path: Path) -> None:
    Stream(make(lr=1e-2), snapshots=tmp_path).close()
    stream = Stream(make(lr=1e-2))
    for batch in clean(3):
        stream(batch)
    twin = stream.fork(snapshots=tmp_path)
    assert states_equal(twin.method.state_dict(), stream.method.state_dict())
    assert twin.batches == 3
    twin(clean(1)[0])


def test_events_reach_the_callback_and_round_trip_as_json() -> None:
    heard: list[Event] = []
    stream = Stream(make(), on_event=heard.append)
    stream.pause()
    stream.resume()
    assert [(e.number, e.action) for e in heard] == [(1, "pause"), (2, "resume")]
    assert [Event.from_json(e.to_json()) for e in heard] == heard


# Who adapts which weights


def test_two_streams_over_one_network_are_refused() -> None:
    model = toy()
    first = Stream(tt.create_method("tent", model))
    with pytest.raises(StateError, match="another stream adapts this network; close it"):
        Stream(tt.create_method("shot", model))
    with pytest.raises(StateError, match="another stream"):
        Stream(first.method)
    Stream(first.method.fork())
    first.close()
    Stream(tt.create_method("shot", model))


def test_a_method_beside_the_stream_is_noticed() -> None:
    model = toy()
    stream, other = Stream(tt.create_method("tent", model, lr=1e-2)), tt.create_method("tent", model, lr=1e-2)
    images = clean(2)
    stream(images[0])
    other(images[1])
    with pytest.raises(StateError, match="the adapted weights changed between two calls"):
        stream(images[1])


def test_a_closed_stream_refuses_calls() -> None:
    with Stream(make()) as stream:
        pass
    with pytest.raises(StateError, match="this stream is closed"):
        stream(clean(1)[0])


def test_a_network_in_place_of_a_method_is_refused() -> None:
    with pytest.raises(ConfigError, match="the method is a Toy; give what tt.create_method makes"):
        Stream(toy())  # type: ignore[arg-type]


def test_guard_options_are_validated() -> None:
    with pytest.raises(ConfigError, match="on_alarm is 'rolback'; did you mean 'rollback'"):
        Guard(on_alarm="rolback")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="alpa: there is no such option; did you mean 'alpha'"):
        Guard(alpa=0.01)  # type: ignore[call-arg]
    for alpha in (0.0, 1.0, -1.0, float("nan")):
        with pytest.raises(ConfigError, match="alpha is"):
            Guard(alpha=alpha)


def test_the_contracts_stream_is_made(tmp_path: Path) -> None:
    stream = tt.Stream(make(), guard=tt.Guard(alpha=0.01), snapshots=tmp_path)
    result = stream(clean(1)[0])
    assert result.logits.shape == (32, 6)
    assert (result.adapted, result.events) == (True, ())


def test_removed_guard_options_are_ignored_with_a_warning() -> None:
    with pytest.warns(TrustWarning, match=r"on_collapse \(on_alarm replaces it\); .*keep \(alpha replaces it\)"):
        guard = Guard(on_collapse="pause", keep=2, snapshot_every=64)  # type: ignore[call-arg]
    assert guard == Guard(snapshot_every=64)


# Restarts


def test_after_an_orderly_end_it_goes_on_bit_for_bit(tmp_path: Path) -> None:
    images = clean(12)
    through = Stream(make("shot", lr=1e-3), guard=OFTEN)
    expected = [through(batch).logits for batch in images]
    seen = []
    for start in (0, 3, 4, 9):
        stop = {0: 3, 3: 4, 4: 9, 9: 12}[start]
        with Stream(make("shot", lr=1e-3), guard=OFTEN, snapshots=tmp_path) as stream:
            assert stream.batches == start
            seen += [stream(batch).logits for batch in images[start:stop]]
    assert all(map(torch.equal, seen, expected))
    assert states_equal(stream.method.state_dict(), through.method.state_dict())


def test_a_damaged_newest_snapshot_costs_one_step_back(tmp_path: Path) -> None:
    heard: list[Event] = []
    stream = Stream(make(lr=1e-3), guard=OFTEN, snapshots=tmp_path)
    states = []
    for batch in clean(4):
        stream(batch)
        states.append(stream.method.state_dict())
    del stream
    newest = max(tmp_path.glob("snapshot-*"))
    newest.write_bytes(newest.read_bytes()[:-9])
    again = Stream(make(lr=1e-3), guard=OFTEN, snapshots=tmp_path, on_event=heard.append)
    assert states_equal(again.method.state_dict(), states[1])
    assert [e.reason for e in heard] == ["a damaged snapshot was skipped"]
    assert again.batches == 2
    for batch in clean(4)[2:]:
        again(batch)
    assert states_equal(again.method.state_dict(), states[3])


def test_a_folder_without_a_readable_snapshot_is_refused(tmp_path: Path) -> None:
    Stream(make(), snapshots=tmp_path).close()
    for file in tmp_path.glob("snapshot-*"):
        file.write_bytes(b"")
    with pytest.raises(StateError, match="no snapshot of the folder can be read"):
        Stream(make(), snapshots=tmp_path)


def test_a_method_is_free_again_where_the_folder_is_in_use(tmp_path: Path) -> None:
    method = make()
    with Stream(make(), snapshots=tmp_path), pytest.raises(StateError, match="belongs to a stream") as refused:
        Stream(method, snapshots=tmp_path)
    assert refused.value.__traceback__ is not None  # which keeps the refused stream alive
    Stream(method).close()


def test_the_folder_of_another_method_is_refused(tmp_path: Path) -> None:
    Stream(make("tent"), snapshots=tmp_path).close()
    with pytest.raises(StateError, match="'tent'"):
        Stream(make("shot"), snapshots=tmp_path)
    Stream(make("tent"), snapshots=tmp_path).close()


def test_pausing_is_remembered(tmp_path: Path) -> None:
    stream = Stream(make(), snapshots=tmp_path)
    stream.pause()
    del stream
    assert Stream(make(), snapshots=tmp_path).paused


def test_a_full_disk_is_reported_and_the_stream_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream(make(lr=1e-3), guard=OFTEN, snapshots=tmp_path)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    events = [e for images in clean(2) for e in stream(images).events]
    assert [(e.kind, e.action) for e in events] == [("storage", "none")]
    assert "No space left on device" in events[0].reason
    monkeypatch.undo()
    assert [e for images in clean(2) for e in stream(images).events] == []


# Threads


def test_calls_from_many_threads_are_served_one_after_the_other() -> None:
    stream = Stream(make(lr=1e-3))
    images = clean(24, size=8)
    answers: dict[int, Tensor] = {}

    def serve(numbers: range) -> None:
        for i in numbers:
            answers[i] = stream(images[i]).logits

    threads = [threading.Thread(target=serve, args=(range(k, 24, 4),)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(answers) == list(range(24))
    assert (stream.batches, stream.images) == (24, 192)
