"""A quiet stream learns from a batch while its images are looked at; a broken one leaves no trace all the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.live.test_guard import QUIET, reference
from tests.live.toys import clean, make, ruin, states_equal
from trust_tta.errors import StateError
from trust_tta.live.guard import Guard
from trust_tta.live.session import WARY
from trust_tta.live.stream import CHECKED_EVERY, Stream
from trust_tta.methods.base import Method


def broken(kind: str, i: int = 0) -> Tensor:
    images = clean(1, seed=60 + i)[0]
    match kind:
        case "one not finite":
            images[3, 1, 2, 2] = float("inf")
        case "half not finite":
            images[::2] = float("nan")
        case "all not finite":
            images[:] = float("nan")
        case "too large":
            images[5] *= 1e30
        case "one channel blank":
            images[4, 1] = 0.5
        case "blank":
            images[:20] = 0.25
        case "the same":
            images = images[:1].expand_as(images).clone()
    return images


KINDS = ("one not finite", "half not finite", "all not finite", "too large", "one channel blank", "blank", "the same")


class Passes:
    """Counts the calls of a method."""

    def __init__(self, method: Method) -> None:
        self.count, self._adapt = 0, method.adapt
        vars(method)["adapt"] = self

    def __call__(self, images: Tensor) -> Tensor:
        self.count += 1
        return torch.as_tensor(self._adapt(images))


def quiet(guarded: bool, name: str = "tent", folder: Path | None = None) -> Stream:
    stream = Stream(
        make(name, lr=1e-3),
        guard=Guard() if guarded else None,
        reference=reference("tent") if guarded else None,
        snapshots=folder,
    )
    for images in clean(QUIET, seed=31):
        stream(images)
    return stream


@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_broken_batch_ends_as_if_it_had_been_looked_at_first(kind: str, guarded: bool) -> None:
    at_once, looking = quiet(guarded), quiet(guarded)
    for i in range(6):
        looking._session._wary = 1
        images = broken(kind, i) if i in (1, 2, 4) else clean(1, seed=80 + i)[0]
        first, second = at_once(images), looking(images)
        assert torch.equal(first.logits.nan_to_num(1e3), second.logits.nan_to_num(1e3))
        assert (first.adapted, [e.reason for e in first.events]) == (second.adapted, [e.reason for e in second.events])
        assert states_equal(at_once.method.state_dict(), looking.method.state_dict())
        assert vars(at_once._session.books) == vars(looking._session.books)
    at_once.close()
    looking.close()


@pytest.mark.parametrize("name", ["tide", "shot", "eta", "sar", "rotta", "cotta", "deyo", "roid"])
def test_every_method_takes_back_what_it_learned_from_a_broken_batch(name: str) -> None:
    stream = Stream(make(name), guard=None)
    for images in clean(3):
        stream(images)
    before = stream.method.state_dict()
    result = stream(broken("all not finite"))
    assert not result.adapted
    assert result.logits.isnan().all()
    assert states_equal(before, stream.method.state_dict())
    assert stream(clean(1, seed=9)[0]).adapted


@pytest.mark.parametrize("guarded", [False, True])
def test_sound_images_are_learned_from_once(guarded: bool) -> None:
    stream = quiet(guarded)
    passes = Passes(stream.method)
    for images in clean(3, seed=4):
        stream(images)
    assert passes.count == 3


def test_after_a_broken_batch_images_are_looked_at_first_for_a_while() -> None:
    stream = quiet(guarded=False)
    passes = Passes(stream.method)
    for i in range(WARY):
        stream(broken("all not finite", i))
    assert passes.count == 1


def test_broken_batches_do_not_hide_a_drift() -> None:
    stream = quiet(guarded=True)
    events = [
        event for i in range(24) for event in stream(broken("one not finite", i) if i % 3 else ruin("noise", i)).events
    ]
    assert {"drift", "broken_input"} <= {event.kind for event in events}
    stream.close()


def test_an_error_that_is_not_about_the_images_is_raised_and_nothing_is_learned() -> None:
    stream = quiet(guarded=True)
    before = stream.method.state_dict()

    def fail(images: Tensor) -> Tensor:
        raise RuntimeError("no memory left")

    vars(stream.method)["adapt"] = fail
    with pytest.raises(RuntimeError, match="no memory left"):
        stream(clean(1)[0])
    assert states_equal(before, stream.method.state_dict())
    del vars(stream.method)["adapt"]
    assert stream(clean(1)[0]).adapted


def test_a_method_beside_a_quiet_stream_is_noticed_when_it_next_compares() -> None:
    stream = quiet(guarded=True)
    stream.method.detach()  # writes the same values
    for images in clean(80 - QUIET, seed=3):
        stream(images)
    assert stream.batches % CHECKED_EVERY == 0
    with torch.no_grad():
        next(iter(stream.method.adapted.values())).add_(1.0)
    with pytest.raises(StateError, match="the adapted weights changed between two calls"):
        stream(clean(1, seed=5)[0])


def test_a_training_of_the_callers_network_is_noticed_at_once() -> None:
    stream = quiet(guarded=True)
    stream(clean(1, seed=3)[0])
    assert stream.batches % CHECKED_EVERY  # the weights themselves are not due
    with torch.no_grad():
        stream.method.caller.network.get_parameter(next(iter(stream.method.adapted))).add_(1.0)
    with pytest.raises(StateError, match="the adapted weights changed between two calls"):
        stream(clean(1, seed=5)[0])


def test_batches_of_changing_shape_and_mode_are_predicted_as_by_the_method_alone() -> None:
    """The memory for what is found in one is that of the next."""
    stream, alone = quiet(guarded=False), quiet(guarded=False).method
    for i, size in enumerate((8, 8, 20, 8, 20)):
        images = clean(1, size=size, seed=90 + i)[0].requires_grad_(i % 2 == 0)
        with torch.inference_mode(i > 1):
            assert torch.equal(stream(images).logits, alone(images))
    result = stream(broken("one not finite"))
    assert result.logits.isnan().any(1).nonzero().tolist() == [[3]]
