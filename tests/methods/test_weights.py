"""Weights as one vector."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from tests.methods.networks import batches, make, run, vmamba
from trust_tta.errors import ConfigError
from trust_tta.methods.weights import Descent, Weights


def tensors() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    plain = [torch.randn(shape, generator=generator) for shape in ((3,), (2, 5), (), (2, 3, 4, 4))]
    odd = [*plain[:3], plain[3].to(memory_format=torch.channels_last), plain[1].to(torch.bfloat16)]
    return {f"layer {i}": nn.Parameter(tensor) for i, tensor in enumerate(odd)}


def weights() -> Weights:
    return Weights(tensors(), Descent())


def test_what_was_read_can_be_written_to_the_bit() -> None:
    flat = weights()
    given = list(flat.named.values())
    before = [t.detach().clone() for t in given]
    vector = flat.read()
    assert torch.equal(vector, torch.cat([t.flatten().float() for t in before]))
    flat.write(vector + 1)
    assert all(torch.equal(t, (b.float() + 1).to(t.dtype)) for t, b in zip(given, before, strict=True))
    flat.write(vector)
    assert all(map(torch.equal, given, before))
    assert given[3].is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(flat.flatten(before), vector)


def test_a_gradient_that_is_not_there_is_zero() -> None:
    flat = weights()
    loss = torch.stack([t.float().sum() for t in flat.tensors])
    assert bool(flat.differentiate(loss.sum()))
    assert torch.equal(flat.gradient, torch.ones_like(flat.gradient))
    loss = torch.stack([t.float().sum() for t in flat.tensors[1:-1]])
    flat.differentiate(loss.sum())
    assert [float(layer.sum()) for layer in flat.by_name(flat.gradient).values()] == [0, 10, 1, 96, 0]


@pytest.mark.parametrize("way", [copy.deepcopy, lambda flat: pickle.loads(pickle.dumps(flat))], ids=["copy", "pickle"])
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_a_copy_learns_like_the_original_and_apart_from_it(way: Any, optimizer: Any) -> None:
    flat = Weights(tensors(), Descent(optimizer, lr=0.1))
    learn(flat)
    before = flat.read()
    twin = way(flat)
    learn(twin)
    assert torch.equal(flat.read(), before)
    learn(flat)
    assert torch.equal(flat.read(), twin.read())
    assert not torch.equal(flat.read(), before)


def learn(flat: Weights) -> None:
    loss = torch.stack([t.float().square().sum() for t in flat.named.values()]).sum()
    flat.step(flat.differentiate(loss))


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
    method = make("bn", vmamba())
    with pytest.raises(ConfigError, match="adapts no weights"):
        method.update(torch.zeros((), requires_grad=True))
