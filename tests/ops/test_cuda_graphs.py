"""Replayed CUDA graphs give the numbers of direct calls, and are not used where they cannot be right."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

import trust_tta as tt
from tests.export.networks import SMALL
from tests.export.networks import small as small_network
from tests.models.networks import BACKBONES
from trust_tta.errors import ConfigError
from trust_tta.methods.registry import create_method
from trust_tta.models.config import VMambaConfig
from trust_tta.models.vmamba import VMamba
from trust_tta.ops import cuda_graphs
from trust_tta.ops.cuda_graphs import GraphedNetwork
from trust_tta.orders import ScanOrder

TINY = VMambaConfig(depths=(1, 2), dims=(16, 32), num_classes=5, norm="batch", drop_path=0.0)
FAMILIES = (*SMALL, *BACKBONES)


def small(family: str) -> Any:
    """A network of the family, in evaluation mode."""
    if family in SMALL:
        return small_network(family)
    torch.manual_seed(0)
    return tt.create_model(family, num_classes=5, **BACKBONES[family]).eval()


def make_model(device: str = "cuda") -> VMamba:
    torch.manual_seed(0)
    return VMamba(TINY).to(device).eval()


def batches(count: int, size: int = 8, device: str = "cuda") -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(size, 3, 32, 32, generator=draw).to(device) for _ in range(count)]


def test_no_graph_is_captured_on_a_cpu() -> None:
    method = create_method("tent", make_model("cpu"))
    for images in batches(3, device="cpu"):
        method(images)
    assert method._forward.graphed.graphs == {}


def test_given_gradient_flows_back_without_slow_imports() -> None:
    code = """
import sys, torch
from trust_tta.ops.cuda_graphs import gradients
used, unused, dy = torch.randn(3, requires_grad=True), torch.randn(2, requires_grad=True), torch.randn(3)
given, nothing = gradients(used.tanh(), [used, unused], dy)
assert nothing is None
assert "sympy" not in sys.modules
assert torch.equal(given, *torch.autograd.grad(used.tanh(), used, dy))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_network_without_orders_is_called_directly() -> None:
    network = nn.Conv2d(3, 4, 1)
    images = torch.randn(2, 3, 5, 5)
    assert torch.equal(GraphedNetwork(network, list(network.parameters()))(images), network(images))


def test_casts_of_weights_do_not_outlive_an_update() -> None:
    """Under autocast PyTorch keeps casts of weights until the context ends; an update inside must still be seen."""
    images = batches(1, device="cpu")[0]
    outside = create_method("trust_naive", make_model("cpu"), lr=0.05)
    with torch.autocast("cpu", torch.bfloat16):
        first = outside(images)
        unchanged = outside.logits_before
    assert unchanged is not None
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        after = outside.model(images)
    assert torch.equal(first, after)
    assert not torch.equal(first, unchanged)


@pytest.mark.parametrize("name", FAMILIES)
def test_weights_cast_together_change_nothing(name: str) -> None:
    """Under autocast the layers that name them read these parameters cast, and nothing else reads them."""
    model, images = small(name).eval(), torch.randn(2, 3, 32, 32)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        cast = cuda_graphs.cast_together(cuda_graphs.cast_parameters(model), torch.bfloat16)
        assert torch.equal(functional_call(model, cast, (images,)), model(images))
    assert {t.dtype for t in cast.values()} <= {torch.bfloat16}
    assert ("layers.0.blocks.0.op.in_proj.weight" in cast) == isinstance(model, VMamba)


def test_the_callers_network_sees_an_update_within_one_autocast() -> None:
    images = batches(1, device="cpu")[0]
    model = make_model("cpu")
    method = create_method("trust_naive", model, lr=0.05)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model(images)
        method(images)
        inside = model(images)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(images), inside)


def test_an_order_is_refused_where_there_are_none() -> None:
    network = nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(48, 2))
    method = create_method("tent", network)
    with pytest.raises(ConfigError, match="Sequential has no traversal orders"):
        method.predict(torch.randn(2, 3, 4, 4), order=ScanOrder("badc"))


def test_weights_may_change_their_layout_between_batches() -> None:
    """SHOT adapts convolutions, whose gradients and moments follow the layout of the weights."""
    found = []
    for moved in (False, True):
        method = create_method("shot", make_model("cpu"), lr=1e-3)
        first, second = batches(2, device="cpu")
        method(first)
        if moved:
            method.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        found.append(method(second))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_may_be_replaced_by_tensors(family: str) -> None:
    """A graph has leaves of its own over the weights, which are no parameters."""
    network = small(family)
    images, directions = batches(1, size=2, device="cpu")[0], network.direction_table[-1]
    wanted = torch.autograd.grad(network(images, directions=directions).square().sum(), list(network.parameters()))
    leaves = {name: p.detach().requires_grad_() for name, p in network.named_parameters()}
    logits = functional_call(network, leaves, (images,), {"directions": directions})
    for got, gradient in zip(torch.autograd.grad(logits.square().sum(), list(leaves.values())), wanted, strict=True):
        torch.testing.assert_close(got, gradient)


class Constants(TorchDispatchMode):
    """Counts the tensors that are made of numbers of the host."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.lift_fresh.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", FAMILIES)
def test_forward_and_backward_need_no_host_synchronization(family: str) -> None:
    """A capture allows none. Tensors without values refuse to be read; constants of the host are counted."""
    network = small(family)
    with FakeTensorMode(), Constants() as constants:  # type: ignore[no-untyped-call]
        leaves = {name: torch.empty(p.shape, requires_grad=True) for name, p in network.named_parameters()}
        buffers = {name: torch.empty(b.shape, dtype=b.dtype) for name, b in network.named_buffers()}
        directions = torch.empty(network.direction_table.shape[1:], dtype=torch.int64)
        with torch.autocast("cpu", torch.bfloat16):
            logits = functional_call(
                network, leaves | buffers, (torch.empty(4, 3, 32, 32),), {"directions": directions}
            )
        torch.autograd.grad(logits, list(leaves.values()), torch.empty_like(logits))
        assert constants.count == 0
        torch.empty(3)[[0, 2]]
        assert constants.count == 1


OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("bn", {}),
    ("tent", {"lr": 1e-3}),
    ("sar", {"margin": 9.0}),
    ("shot", {}),
    ("trust", {"steps": 2}),
    ("trust", {"mode": "replicate"}),
    ("trust", {"mode": "split", "k": 3}),
    ("trust", {"mode": "split", "k": 3, "split_statistics": "batch"}),
    ("bn", {"statistics": "stream"}),
    ("tent", {"statistics": "stream", "lr": 1e-3}),
    ("trust", {"statistics": "stream"}),
    ("tent", {"predict": "before", "optimizer": "sgd", "nesterov": True}),
    ("ensemble", {"k": 3}),
    ("augmentation", {}),
    ("tide", {"statistics": "stream"}),
    ("bn_ema", {"statistics": "stream"}),
    ("rotta", {"statistics": "stream", "memory_size": 8, "update_frequency": 8}),
]


@pytest.mark.gpu
@pytest.mark.parametrize("low", [False, True], ids=["float32", "bf16"])
@pytest.mark.parametrize(("name", "options"), OPTIONS, ids=str)
def test_replay_equals_direct_call(
    name: str, options: dict[str, Any], low: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for most in (0, 8):
        monkeypatch.setattr(cuda_graphs, "MAX_GRAPHS", most)
        method = create_method(name, make_model(), **options)
        with torch.autocast("cuda", torch.bfloat16, enabled=low):
            found.append(torch.stack([method(images) for images in batches(4)]).float())
    # Adam takes the sign of gradients that are zero but for rounding, and norms of the stream do not hide it.
    far = 2e-2 if low else 5e-3 if options.get("statistics") == "stream" else 1e-4
    assert (found[0] - found[1]).abs().max() <= far * found[0].abs().max()


@pytest.mark.gpu
@pytest.mark.parametrize("low", [False, True], ids=["float32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_replayed_gradients_of_every_network(family: str, low: bool) -> None:
    network = small(family).cuda()
    parameters = list(network.parameters())
    call = GraphedNetwork(network, parameters)

    def differentiate(forward: Callable[..., Tensor], images: Tensor, directions: Tensor) -> list[Tensor]:
        with torch.autocast("cuda", torch.bfloat16, enabled=low, cache_enabled=False):
            logits = forward(images, directions=directions)
        gradients = torch.autograd.grad(logits.float().square().sum(), parameters)
        return [logits.detach().clone(), *(g.clone() for g in gradients)]

    for images, directions in zip(batches(4), cycle(network.direction_table), strict=False):
        expected = differentiate(network, images, directions)
        zero = 1e-6 * max(float(wanted.abs().max()) for wanted in expected)  # of a bias before a norm: rounding errors
        for got, wanted in zip(differentiate(call, images, directions), expected, strict=True):
            assert (got - wanted).abs().max() <= (2e-2 if low else 1e-3) * wanted.abs().max() + zero
    assert (len(call.graphs), call.failed) == (1, False)


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_fast_captures_every_network(family: str) -> None:
    network = small(family).cuda()
    fast = tt.fast(network)
    for images in batches(4):
        for order in network.scan_orders[:3]:
            with torch.no_grad():
                torch.testing.assert_close(
                    fast(images, order=order), network(images, order=order), rtol=1e-4, atol=1e-5
                )
    assert fast._graphed is not None
    assert len(fast._graphed.graphs) == 1


class Breaking(nn.Module):
    """Breaks off where a tensor stands in for its parameter, having given the device work that reads the order late."""

    def __init__(self) -> None:
        super().__init__()
        self.weight: Tensor = nn.Parameter(torch.ones(()))
        self.read: list[Tensor] = []

    def forward(self, images: Tensor, directions: Tensor) -> Tensor:
        if not isinstance(self.weight, nn.Parameter):
            self.read.append(torch.empty_like(directions))
            torch.cuda._sleep(400_000_000)  # a fifth of a second
            self.read[-1].copy_(directions)
            raise KeyError("no parameter")
        return images.flatten(1) * self.weight + directions.sum()


@pytest.mark.gpu
def test_failed_capture_keeps_its_tensors_until_the_device_has_read_them() -> None:
    network = Breaking().cuda()
    call, directions = GraphedNetwork(network, [network.weight]), torch.arange(4, device="cuda")
    images = torch.randn(2, 3, 4, 4, device="cuda")
    call(images, directions)
    with pytest.warns(UserWarning, match="CUDA graphs are not used"):
        call(images, directions)
    taken = [torch.full((4,), 99, device="cuda") for _ in range(1000)]  # the freed memory is among it
    torch.cuda.synchronize()
    assert len(taken) == 1000
    assert network.read[-1].tolist() == [0, 1, 2, 3]


@pytest.mark.gpu
def test_replays_on_several_streams_are_ordered() -> None:
    network = small("vmamba").cuda()
    fast, given = tt.fast(network), batches(8, size=64)
    with torch.no_grad():
        wanted = [network(images) for images in given]
        found = [fast(images) for images in given[:2]]
        torch.cuda.synchronize()
        for images in given[2:]:
            with torch.cuda.stream(torch.cuda.Stream()):
                found.append(fast(images))
    torch.cuda.synchronize()
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
def test_graph_captured_in_inference_mode_replays_outside_it() -> None:
    network = small("vmamba").cuda()
    fast, (images, *rest) = tt.fast(network), batches(4)
    with torch.no_grad():
        wanted = [network(each) for each in rest]
    with torch.inference_mode():
        fast(images)
        found = [fast(rest[0])]
    found += [fast(each) for each in rest[1:]]
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
def test_kept_gradients_of_a_freed_graph_allow_the_next_capture() -> None:
    model = make_model()
    parameters = list(model.parameters())
    call, directions, (images,) = GraphedNetwork(model, parameters), model.scan_directions(None, 8), batches(1)
    for _ in range(2):
        kept = torch.autograd.grad(call(images, directions).sum(), parameters, allow_unused=True)
    for parameter in parameters:
        parameter.data = parameter.data.clone()
    for _ in range(2):
        torch.autograd.grad(call(images, directions).sum(), parameters, allow_unused=True)
    assert (len(call.graphs), call.failed) == (1, False)
    assert len(kept) == len(parameters)


class Counting:
    """A graph whose replays are counted."""

    def __init__(self, graph: Any) -> None:
        self.graph, self.replays = graph, 0

    def replay(self) -> None:
        self.replays += 1
        if self.graph is not None:
            self.graph.replay()


@pytest.mark.gpu
@pytest.mark.parametrize("low", [False, True], ids=["float32", "bf16"])
def test_stem_and_casts_run_once_per_batch(low: bool) -> None:
    """Of the same tensor alone: what changes in place, in the images or in the weights of a later batch, is seen."""
    model = make_model().requires_grad_(False)
    parameters = [p for name, p in model.named_parameters() if "norm" in name]
    for parameter in parameters:
        parameter.requires_grad_()
    call = GraphedNetwork(model, parameters, cache_stem=True)
    first, second = batches(2)
    (small_batch,) = batches(1, size=5)

    def check(images: Tensor, row: int) -> None:
        with torch.autocast("cuda", torch.bfloat16, enabled=low, cache_enabled=False):
            directions = model.direction_table[row]
            logits, wanted = call(images, directions), model(images, directions=directions)
        got = torch.autograd.grad(logits.float().square().sum(), parameters)
        for a, b in zip(
            (logits, *got), (wanted, *torch.autograd.grad(wanted.float().square().sum(), parameters)), strict=True
        ):
            assert (a - b).abs().max() <= (3e-2 if low else 1e-3) * b.abs().max()

    for images in (first, second, small_batch, small_batch):
        check(images, 0)
    assert (len(call.graphs), len(call.stems), call.failed) == (2, 2, False)
    stem = next(iter(call.stems.values()))
    assert isinstance(stem.network, cuda_graphs.NetworkAfterStem)
    stem.graph = counted = Counting(stem.graph)  # type: ignore[assignment]
    for row in range(4):
        check(second, row)
    assert counted.replays == 1
    second.mul_(2)
    check(second, 1)
    assert counted.replays == 2
    check(small_batch, 2)
    check(second, 1)  # whose stem may lie where the small batch was worked on
    assert counted.replays == 3
    with torch.no_grad():
        model.get_parameter("patch_embed.0.weight").mul_(-1)
        model.get_parameter("layers.0.blocks.0.mlp.fc1.weight").mul_(2)
    check(first, 1)
    assert counted.replays == 4


@pytest.mark.gpu
def test_a_graph_for_each_shape_and_none_in_a_fork() -> None:
    method = create_method("trust", make_model(), k=3)
    for images in (*batches(2), *batches(2, size=5)):
        method(images)
    assert len(method._forward.graphed.graphs) == 4  # two shapes, each with and without gradients
    twin = method.fork()
    assert twin._forward.graphed.graphs == {}
    images = batches(1)[0]
    assert torch.allclose(twin(images), method(images), rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
def test_forward_that_waits_for_its_backward_is_not_overwritten() -> None:
    model = make_model()
    parameters = list(model.parameters())
    call = GraphedNetwork(model, parameters)
    first, second = batches(2)
    directions = model.scan_directions(None, 8)
    for images in (first, second, first):
        torch.autograd.grad(call(images, directions).sum(), parameters, allow_unused=True)
        with torch.no_grad():
            call(images, directions)
    assert len(call.graphs) == 2
    logits = call(first, directions)
    with torch.no_grad():
        call(second, directions)
    call(second, directions)
    got = torch.autograd.grad(logits.square().sum(), parameters, allow_unused=True)
    wanted = torch.autograd.grad(model(first).square().sum(), parameters, allow_unused=True)
    for a, b in zip(got, wanted, strict=True):
        if b is not None:
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4 * float(b.abs().max()))


@pytest.mark.gpu
def test_stochastic_depth_is_not_captured() -> None:
    torch.manual_seed(0)
    model = VMamba(TINY.changed(drop_path=0.5)).cuda().eval()
    method = create_method("trust", model, k=2, stochastic_depth=True)
    for images in batches(3):
        method(images)
    assert [r.backward for r in method._forward.graphed.graphs.values()] == [None]  # passes without gradients alone


@pytest.mark.gpu
def test_training_draws_and_running_statistics_are_those_without_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stochastic depth and running statistics: the forwards of a capture must leave no trace."""
    found = []
    for most in (0, 8):
        monkeypatch.setattr(cuda_graphs, "MAX_GRAPHS", most)
        torch.manual_seed(0)
        model = VMamba(TINY.changed(drop_path=0.5)).cuda().train()
        call = GraphedNetwork(model, list(model.parameters()))
        torch.manual_seed(1)
        logits = []
        for images in batches(5):
            logits.append(call(images, model.scan_directions(None, 8)))
            logits[-1].square().sum().backward()
        assert len(call.graphs) == min(most, 1)
        gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        statistics = [b.flatten().float() for b in model.buffers()]
        drawn = torch.rand(9, device="cuda")
        found.append([torch.cat(parts).detach() for parts in (logits, gradients, statistics, [drawn])])
    for plain, recorded in zip(*found, strict=True):
        torch.testing.assert_close(recorded, plain, rtol=1e-4, atol=1e-4 * float(plain.abs().max()))


@pytest.mark.gpu
def test_failed_capture_leaves_the_direct_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise KeyError("nothing of the kind")

    plain = [create_method("tent", make_model())(images) for images in batches(1)]
    monkeypatch.setattr(cuda_graphs, "PassGraphs", broken)
    method = create_method("tent", make_model())
    first, *rest = batches(4)
    torch.testing.assert_close(method(first), plain[0], rtol=1e-4, atol=1e-4)
    with pytest.warns(UserWarning, match="CUDA graphs are not used"):
        method(rest[0])
    method(rest[1])
    assert method._forward.graphed.failed
    assert method.counters.batches == 3


@pytest.mark.gpu
def test_odd_batch_sizes_do_not_use_up_the_graphs() -> None:
    method = create_method("bn", make_model())
    for size in range(2, 20):
        method(batches(1, size=size)[0])
    for _ in range(3):
        method(batches(1, size=32)[0])
    assert len(method._forward.graphed.graphs) == 1


@pytest.mark.gpu
def test_reallocated_weights_are_captured_again() -> None:
    method = create_method("tent", make_model())
    images = batches(1)[0]
    for _ in range(3):
        method(images)
    for parameter in method.model.parameters():
        parameter.data = parameter.data.clone() * 0
    assert torch.allclose(method(images), method(images), atol=1e-3)
    assert float(method(images).std(0).max()) < 1e-3  # the network of zeros, not the recorded one
