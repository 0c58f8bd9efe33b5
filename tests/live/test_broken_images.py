"""Broken images: nothing is learned from them, they are answered, and the rest of the stream is as without them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.live.toys import clean, make, states_equal
from trust_tta.errors import StateError
from trust_tta.live.guard import Guard
from trust_tta.live.stream import FINGERPRINT_EVERY, Stream


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
        case "some blank":
            images[[3, 9, 20]] = torch.tensor([0.0, 2.5, -1.0])[:, None, None, None]
        case "blank":
            images[:20] = 0.25
        case "the same":
            images = images[:1].expand_as(images).clone()
    return images


def open_stream(guarded: bool, name: str = "tent") -> Stream:
    return Stream(make(name, lr=1e-3), guard=Guard() if guarded else None)


@pytest.mark.parametrize(
    ("kind", "bad", "guarded"),
    [
        ("one not finite", [3], False),
        ("one not finite", [3], True),
        ("too large", [5], True),
        ("some blank", [3, 9, 20], True),
    ],
)
def test_method_learns_from_the_other_images_of_the_batch(kind: str, bad: list[int], guarded: bool) -> None:
    stream, alone = open_stream(guarded), open_stream(guarded)
    good = [i for i in range(32) if i not in bad]
    for i in range(4):
        images = broken(kind, i) if i % 2 else clean(1, seed=80 + i)[0]
        result = stream(images)
        expected = alone(images[good] if i % 2 else images)
        assert torch.equal(result.logits[good] if i % 2 else result.logits, expected.logits)
        assert result.adapted == expected.adapted
        assert [e.kind for e in result.events if e.kind == "broken_input"] == ["broken_input"] * (i % 2)
    assert states_equal(stream.method.state_dict(), alone.method.state_dict())


@pytest.mark.parametrize("kind", ["half not finite", "all not finite", "blank", "the same"])
def test_nothing_is_learned_from_a_batch_that_is_mostly_broken(kind: str) -> None:
    stream = open_stream(guarded=True)
    stream(clean(1)[0])
    before = stream.method.state_dict()
    result = stream(broken(kind))
    assert not result.adapted
    assert [(e.kind, e.action) for e in result.events] == [("broken_input", "skip")]
    assert states_equal(before, stream.method.state_dict())
    assert stream(clean(1, seed=9)[0]).adapted


def test_blank_images_are_predicted_by_the_source_with_its_training_statistics() -> None:
    stream, images = open_stream(guarded=True), broken("some blank")
    expected = make("source")(images[[3, 9, 20]])
    torch.testing.assert_close(stream(images).logits[[3, 9, 20]], expected)


@pytest.mark.parametrize("name", ["tide", "shot", "eta", "sar", "rotta", "cotta", "deyo", "roid"])
def test_unguarded_methods_skip_batches_without_a_finite_image(name: str) -> None:
    stream = Stream(make(name), guard=None)
    for images in clean(3):
        stream(images)
    before = stream.method.state_dict()
    result = stream(broken("all not finite"))
    assert not result.adapted
    assert result.logits.isnan().all()
    assert states_equal(before, stream.method.state_dict())
    assert stream(clean(1, seed=9)[0]).adapted


def test_errors_of_the_method_are_raised_and_nothing_is_learned() -> None:
    stream = open_stream(guarded=True)
    stream(clean(1)[0])
    before = stream.method.state_dict()

    def fail(images: Tensor) -> Tensor:
        raise RuntimeError("no memory left")

    vars(stream.method)["adapt"] = fail
    with pytest.raises(RuntimeError, match="no memory left"):
        stream(clean(1)[0])
    assert states_equal(before, stream.method.state_dict())
    del vars(stream.method)["adapt"]
    assert stream(clean(1)[0]).adapted


def test_weights_changed_by_another_method_are_noticed_at_the_next_comparison() -> None:
    stream = open_stream(guarded=False)
    stream.method.detach()  # writes the same values
    for images in clean(2 * FINGERPRINT_EVERY, seed=3):
        stream(images)
    with torch.no_grad():
        next(iter(stream.method.adapted.values())).add_(1.0)
    with pytest.raises(StateError, match="the adapted weights changed between two calls"):
        stream(clean(1, seed=5)[0])


def test_training_of_the_callers_network_is_noticed_at_once() -> None:
    stream = open_stream(guarded=False)
    for images in clean(FINGERPRINT_EVERY + 1, seed=3):
        stream(images)  # the weights themselves are not due
    with torch.no_grad():
        stream.method.shared.network.get_parameter(next(iter(stream.method.adapted))).add_(1.0)
    with pytest.raises(StateError, match="the adapted weights changed between two calls"):
        stream(clean(1, seed=5)[0])


def test_batches_of_changing_shape_and_mode_are_predicted_as_by_the_method_alone() -> None:
    stream, alone = open_stream(guarded=False), make("tent", lr=1e-3)
    for i, size in enumerate((8, 8, 20, 8, 20)):
        images = clean(1, size=size, seed=90 + i)[0].requires_grad_(i % 2 == 0)
        with torch.inference_mode(i > 1):
            assert torch.equal(stream(images).logits, alone(images))
