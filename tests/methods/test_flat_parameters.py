"""Weights as one vector."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.methods.networks import batches, make, run, same, vmamba
from trust_tta.errors import ConfigError
from trust_tta.methods.base import Method
from trust_tta.methods.flat_parameters import FlatParameters, OptimizerConfig


def tensors() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    plain = [torch.randn(shape, generator=generator) for shape in ((3,), (2, 5), (), (2, 3, 4, 4))]
    odd = [*plain[:3], plain[3].to(memory_format=torch.channels_last), plain[1].to(torch.bfloat16)]
    return {f"layer {i}": nn.Parameter(tensor) for i, tensor in enumerate(odd)}


def weights() -> FlatParameters:
    return FlatParameters(tensors(), OptimizerConfig())


def test_what_was_read_can_be_written_to_the_bit() -> None:
    flat = weights()
    given = list(flat.named.values())
    before = [t.detach().clone() for t in given]
    vector = flat.snapshot()
    assert torch.equal(vector, torch.cat([t.flatten().float() for t in before]))
    flat.load(vector + 1)
    assert all(torch.equal(t, (b.float() + 1).to(t.dtype)) for t, b in zip(given, before, strict=True))
    flat.load(vector)
    assert all(map(torch.equal, given, before))
    assert given[3].is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(flat.flatten(before), vector)


def test_a_gradient_that_is_not_there_is_zero() -> None:
    flat = weights()
    loss = torch.stack([t.float().sum() for t in flat.tensors])
    assert bool(flat.backward(loss.sum()))
    assert torch.equal(flat.gradient, torch.ones_like(flat.gradient))
    loss = torch.stack([t.float().sum() for t in flat.tensors[1:-1]])
    flat.backward(loss.sum())
    assert [float(layer.sum()) for layer in flat.unflatten(flat.gradient).values()] == [0, 10, 1, 96, 0]


@pytest.mark.parametrize("way", [copy.deepcopy, lambda flat: pickle.loads(pickle.dumps(flat))], ids=["copy", "pickle"])
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_a_copy_learns_like_the_original_and_apart_from_it(way: Any, optimizer: Any) -> None:
    flat = FlatParameters(tensors(), OptimizerConfig(optimizer, lr=0.1))
    learn(flat)
    before = flat.snapshot()
    twin = way(flat)
    learn(twin)
    assert torch.equal(flat.snapshot(), before)
    learn(flat)
    assert torch.equal(flat.snapshot(), twin.snapshot())
    assert not torch.equal(flat.snapshot(), before)


def learn(flat: FlatParameters) -> None:
    loss = torch.stack([t.float().square().sum() for t in flat.named.values()]).sum()
    flat.step(flat.backward(loss))


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
    with pytest.raises(ConfigError, match="adapts no parameters"):
        method.step(torch.zeros((), requires_grad=True))


def wide() -> nn.Sequential:
    """Every adapted weight can lie in the vector: none of an odd size comes before it."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3, stride=4), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.BatchNorm2d(32)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 5))


WAYS: dict[str, Callable[[Method], Method]] = {
    "made": lambda method: method,
    "forked": lambda method: method.fork(),
    "copied": copy.deepcopy,
    "pickled": lambda method: pickle.loads(pickle.dumps(method)),
    "moved": lambda method: method.double().float(),
    "moved to where it is": lambda method: method.to(method.weights.vector.device, torch.float32),
    "loaded": lambda method: method.load_state_dict(method.state_dict()) or method,
}


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", WAYS)
def test_weights_lie_in_the_vector(way: str, device: str) -> None:
    method = make("tent", wide().to(device), lr=1e-2)
    run(method, [images.to(device) for images in batches(1)])
    method = WAYS[way](method)
    before = method.state_dict()["adapted"]
    method.weights.vector.add_(1)
    assert all(torch.equal(p, before[name] + 1) for name, p in method.adapted.items())
    if way != "moved":  # the caller's network sees what the method does until it is moved
        theirs = dict(method.shared.network.named_parameters())
        assert all(torch.equal(theirs[name], p) for name, p in method.adapted.items())


@pytest.mark.parametrize("device", DEVICES)
def test_the_memory_of_a_method_that_is_gone_is_taken_over(device: str) -> None:
    network = wide().to(device)
    for name in ("tent", "shot", "tent"):
        method = make(name, network)
        start = method.weights.vector.data_ptr()
        inside = range(start, start + method.weights.vector.nbytes)
        assert all(p.data_ptr() in inside for p in method.adapted.values())
        assert all(network.get_parameter(name).data_ptr() in inside for name in method.adapted)
        del method


def test_a_move_to_where_a_method_is_moves_nothing() -> None:
    method = make("tent", wide())
    before = [p.data_ptr() for p in method.model.parameters()]
    method.to("cpu")
    assert [p.data_ptr() for p in method.model.parameters()] == before


@pytest.mark.parametrize("device", DEVICES)
def test_memory_that_others_look_at_is_not_left(device: str) -> None:
    network, given = wide().to(device), [images.to(device) for images in batches(2)]
    outside = {name: p.detach() for name, p in network.named_parameters()}
    alone, method = make("tent", wide().to(device), lr=1e-2), make("tent", network, lr=1e-2)
    assert same(run(method, given), run(alone, given))
    assert same(outside, {name: p.detach() for name, p in alone.detach().named_parameters()})


def test_two_methods_over_one_network_see_each_other() -> None:
    network = wide()
    first, second = make("tent", network, lr=1e-2), make("shot", network, lr=1e-2)
    for method in (first, second):
        run(method, batches(1))
        for other in (first, second):
            assert all(torch.equal(p, other.model.get_parameter(name)) for name, p in method.adapted.items())


@pytest.mark.parametrize("network", [wide, vmamba], ids=["wide", "odd sizes"])
def test_files_hold_no_more_than_the_weights(network: Callable[[], nn.Module]) -> None:
    from safetensors.torch import save

    method = make("tent", network())
    (name, parameter), adapted = next(iter(method.adapted.items())), method.detach()
    for thing in (parameter, parameter.detach(), {name: adapted.state_dict()[name]}):
        assert len(saved(thing)) - len(saved(torch.zeros(1))) < parameter.nbytes + 1000
    fresh = network()
    assert abs(len(pickle.dumps(adapted)) - len(pickle.dumps(fresh))) < 1000
    assert len(pickle.dumps(method)) < len(pickle.dumps(make("tent", network()).model)) * 3
    assert len(save(adapted.state_dict())) == len(save(fresh.state_dict()))


def saved(thing: Any) -> bytes:
    file = io.BytesIO()
    torch.save(thing, file)
    return file.getvalue()


CHANGES: dict[str, Callable[[nn.Parameter], Any]] = {
    "in place": lambda p: p.data.mul_(0.5),
    "elsewhere": lambda p: setattr(p, "data", p.data * 0.5),
    "in another layout": lambda p: setattr(p, "data", torch.stack([p.data, p.data], dim=-1)[..., 0].mul_(0.5)),
    "shared": lambda p: p.data.mul_(0.5) is p.share_memory_(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_the_caller_changes_between_batches_is_seen(change: str) -> None:
    """The next step starts from there, as in a method that was told so by its state."""
    first, second = batches(2)
    method, told = (make("shot", wide(), lr=1e-2, optimizer="sgd") for _ in range(2))
    run(method, [first])
    run(told, [first])
    for parameter in method.adapted.values():
        CHANGES[change](parameter)
    state = told.state_dict()
    told.load_state_dict({**state, "adapted": {name: value * 0.5 for name, value in state["adapted"].items()}})
    torch.testing.assert_close(method(second), told(second), rtol=1e-5, atol=1e-6)
    for name, value in told.state_dict()["adapted"].items():
        torch.testing.assert_close(method.state_dict()["adapted"][name], value, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(
            method.weights.unflatten(method.weights.snapshot())[name], value, rtol=1e-5, atol=1e-6
        )


def test_tensors_that_stay_outside_learn_as_they_did() -> None:
    """Half precision is rounded after each step, and what is rounded goes into the next."""
    flat, given = FlatParameters(tensors(), OptimizerConfig(lr=0.1)), tensors()
    vector = torch.cat([t.detach().float().reshape(-1) for t in given.values()])
    adam = torch.optim.Adam([vector], lr=0.1, betas=(0.9, 0.999), fused=True)
    for _ in range(3):
        learn(flat)
        vector.grad = 2 * (rounded := given_as_vector(given))
        vector.copy_(rounded)
        adam.step()
        for tensor, value in zip(given.values(), vector.split([t.numel() for t in given.values()]), strict=True):
            tensor.data.copy_(value.view(tensor.shape))
    assert torch.equal(flat.snapshot(), given_as_vector(given))


def given_as_vector(given: dict[str, nn.Parameter]) -> Tensor:
    return torch.cat([t.detach().float().reshape(-1) for t in given.values()])


def test_a_gradient_of_weights_that_have_changed_since_is_refused() -> None:
    flat = FlatParameters({"w": nn.Parameter(torch.ones(16))}, OptimizerConfig())
    stale = flat.named["w"].square().sum()
    learn(flat)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        flat.backward(stale)


RULES: dict[str, tuple[OptimizerConfig, Callable[[list[Tensor]], Any]]] = {
    "adam": (
        OptimizerConfig(lr=0.1, momentum=0.8),
        lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.8, 0.999), fused=True),
    ),
    "sgd": (OptimizerConfig("sgd", 0.1), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True)),
    "nesterov": (
        OptimizerConfig("sgd", 0.1, nesterov=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, fused=True),
    ),
    "no momentum": (OptimizerConfig("sgd", 0.1, momentum=0), lambda p: torch.optim.SGD(p, lr=0.1, fused=True)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("rule", RULES)
def test_steps_and_moments_are_those_of_torch_optim_to_the_bit(rule: str, dtype: torch.dtype) -> None:
    """The third step is skipped, as both are told by a flag."""
    config, make_optimizer = RULES[rule]
    start = torch.randn(1000, dtype=dtype, generator=torch.Generator().manual_seed(0))
    flat, theirs = FlatParameters({"w": nn.Parameter(start.clone())}, config), start.clone()
    optimizer = make_optimizer([theirs])
    if config.momentum and config.optimizer == "sgd":
        optimizer.state[theirs] = {"momentum_buffer": torch.zeros_like(theirs)}
    for step in range(6):
        loss = (flat.named["w"].sin() * (float("nan") if step == 2 else 1.0)).sum()
        finite = flat.backward(loss)
        assert bool(finite) == (step != 2)
        theirs.grad = flat.gradient.clone()
        optimizer.found_inf = (~finite).float()
        optimizer.step()
        flat.step(finite)
        assert torch.equal(flat.vector, theirs)
        state = optimizer.state[theirs]
        assert all(torch.equal(value, state[name]) for name, value in flat.optimizer_state.items())
    assert not torch.equal(flat.vector, start)


FIRST_BATCH = """
import sys, torch, trust_tta as tt
method = tt.create_method("tide", tt.create_model("vmamba_nano"))
method(torch.randn(8, 3, 32, 32))
print(method.counters.updates, *sys.modules.keys() & {"numba", "scipy", "sympy", "torch._dynamo", "triton"})
"""


def test_a_first_batch_imports_no_compiler() -> None:
    """PyTorch's compiler and what it brings take seconds of every process."""
    ran = subprocess.run([sys.executable, "-c", FIRST_BATCH], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["1"]
