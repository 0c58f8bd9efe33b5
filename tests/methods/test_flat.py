"""Weights as one vector."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.methods.networks import batches, make, run, vmamba
from trust_tta.errors import ConfigError
from trust_tta.methods.flat import Flat


def tensors() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    plain = [torch.randn(shape, generator=generator) for shape in ((3,), (2, 5), (), (2, 3, 4, 4))]
    return [*plain[:3], plain[3].to(memory_format=torch.channels_last), plain[1].to(torch.bfloat16)]


def test_what_was_read_can_be_written_to_the_bit() -> None:
    given = tensors()
    flat = Flat(given)
    before = [t.clone() for t in given]
    vector = flat.read()
    assert torch.equal(vector, torch.cat([t.flatten().float() for t in before]))
    flat.write(vector + 1)
    assert all(torch.equal(t, (b.float() + 1).to(t.dtype)) for t, b in zip(given, before, strict=True))
    flat.write(vector)
    assert all(map(torch.equal, given, before))
    assert given[3].is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(flat.vector(before), vector)


def test_a_gradient_that_is_not_there_is_zero() -> None:
    flat = Flat(tensors())
    gradients = [torch.ones_like(t) for t in flat.tensors]
    flat.gather_gradients(gradients)
    assert torch.equal(flat.gradient, torch.ones_like(flat.gradient))
    flat.gather_gradients([None, *gradients[1:-1], None])
    assert [float(layer.sum()) for layer in flat.layers(flat.gradient)] == [0, 10, 1, 96, 0]


def test_a_copy_works_on_its_own_tensors() -> None:
    flat = Flat(tensors())
    twin = copy.deepcopy(flat)
    twin.write(torch.zeros_like(twin.weights))
    assert not twin.read().any()
    assert flat.read().all()


def test_whoever_holds_the_vector_holds_that_of_the_copy() -> None:
    flat = Flat(tensors())
    twin, vector = copy.deepcopy((flat, flat.weights))
    assert twin.weights is vector


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_a_method_that_is_moved_takes_its_moments_along(optimizer: str) -> None:
    """The second update of either rule depends on what the first left behind."""
    first, second = batches(2)
    moved, stayed, forgetful = (make("tent", vmamba(), lr=1e-2, optimizer=optimizer) for _ in range(3))
    run(moved, [first])
    moved.double()
    after = moved(second.double()).float()
    torch.testing.assert_close(after, run(stayed, [first, second])[1], rtol=1e-4, atol=1e-4)
    assert moved.counters == stayed.counters
    nothing = forgetful.state_dict()["optimizer"]
    forgetful(first)
    forgetful.load_state_dict({**forgetful.state_dict(), "optimizer": nothing})
    assert (forgetful(second) - after).abs().max() > 1e-3


def test_a_method_without_weights_to_adapt_says_so() -> None:
    with pytest.raises(ConfigError, match="adapts no weights"):
        make("bn", vmamba()).snapshot()
