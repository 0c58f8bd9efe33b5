"""Statistics of the stream: what a batch counts for, and what the memory then holds."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune
from torch.utils._python_dispatch import TorchDispatchMode

from tests.methods.networks import batches, convnet, make, run, same, vmamba
from trust_tta.errors import ConfigError, TrustWarning
from trust_tta.methods.registry import list_methods
from trust_tta.methods.statistics import Statistics
from trust_tta.methods.stream_norm import StreamNorm
from trust_tta.methods.tide.constants import TIDE
from trust_tta.methods.tide.shift_detector import describe


def norm_of(channels: int = 4, *, known: bool = True) -> tuple[Statistics, StreamNorm]:
    model = nn.Sequential(nn.BatchNorm2d(channels, track_running_stats=known)).eval()
    statistics = Statistics(model, "stream", updating_without_grad=True)
    return statistics, statistics.norms["0"]


def feed(statistics: Statistics, norm: StreamNorm, x: Tensor) -> None:
    statistics.start_batch(x)
    with torch.no_grad():
        norm(x)


def draw(count: int, n: int, *, shift: float = 0.0, scale: float = 1.0, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [shift + scale * torch.randn(n, 4, 8, 8, generator=generator) for _ in range(count)]


def test_stream_statistics_are_those_of_all_images_so_far() -> None:
    statistics, norm = norm_of()
    stream = draw(3, 32, shift=0.01)
    for x in stream:
        feed(statistics, norm, x)
    seen = torch.cat(stream)
    assert torch.allclose(norm.mean, seen.mean((0, 2, 3)), atol=1e-5)
    assert torch.allclose(norm.variance, seen.var((0, 2, 3), correction=0), atol=1e-4)
    assert float(norm.images) == pytest.approx(len(seen))


def test_without_statistics_of_training_the_stream_is_all_there_is() -> None:
    statistics, norm = norm_of(known=False)
    (x,) = draw(1, 16, shift=5.0)
    feed(statistics, norm, x)
    assert torch.allclose(norm.mean, x.mean((0, 2, 3)), atol=1e-5)


def test_the_memory_fades_with_its_half_life() -> None:
    statistics, norm = norm_of()
    norm.images.fill_(1e9)
    (x,) = draw(1, 64)
    feed(statistics, norm, x)
    assert float(norm.images) == pytest.approx(64 / (1 - 2 ** (-64 / TIDE.stream_memory)), rel=1e-4)


def test_a_change_of_domain_starts_the_memory_anew_and_the_next_batches_average() -> None:
    statistics, norm = norm_of()
    for x in draw(20, 32):
        feed(statistics, norm, x)
    after = draw(3, 32, shift=4.0, scale=2.0, seed=1)
    feed(statistics, norm, after[0])
    assert float(norm.images) < 32 + TIDE.recent_images / 2 + 1
    for x in after[1:]:
        feed(statistics, norm, x)
    assert torch.allclose(norm.mean, torch.cat(after).mean((0, 2, 3)), atol=0.15)


@pytest.mark.parametrize("memory", [100.0, 10_000.0])
def test_shift_shrinks_the_memory_by_the_squared_probability_of_none(memory: float) -> None:
    statistics, norm = norm_of()
    for x in draw(20, 32):
        feed(statistics, norm, x)
    norm.images.fill_(memory)
    detector = statistics.shift_detector
    assert detector is not None
    new = draw(1, 32, shift=0.9, seed=1)[0]
    change = float(copy.deepcopy(detector).observe(describe(new)))
    assert 0.2 < change < 0.95
    feed(statistics, norm, new)
    kept = max(memory * (1 - change) ** 2, TIDE.recent_images / 2)
    assert float(norm.images) - 32 == pytest.approx(kept, rel=1e-3)


def test_single_images_that_always_differ_are_no_change() -> None:
    """Each has a brightness and a contrast of its own; an average over all of them is what is wanted."""
    statistics, norm = norm_of(64)
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        shift = 0.7 * torch.randn(1, 64, 1, 1, generator=generator)
        feed(statistics, norm, torch.randn(1, 64, 8, 8, generator=generator) + shift)
    assert float(norm.images) > 200
    assert norm.mean.abs().mean() < 0.1
    assert float(norm.variance.mean()) == pytest.approx(1.49, abs=0.15)  # of the pool, not of an image


def test_a_change_shrinks_the_memory_of_every_norm() -> None:
    """One that the images show; what only a later map shows is no change."""
    model = nn.Sequential(nn.BatchNorm2d(4), nn.BatchNorm2d(4)).eval()
    statistics = Statistics(model, "stream", updating_without_grad=True)
    first, second = statistics.norms.values()

    def feed_both(x: Tensor, y: Tensor) -> None:
        statistics.start_batch(x)
        with torch.no_grad():
            first(x)
            second(y)

    for x, y in zip(draw(10, 32), draw(10, 32, seed=1), strict=True):
        feed_both(x, y)
    feed_both(draw(1, 32, seed=2)[0], draw(1, 32, shift=5.0, seed=3)[0])
    assert float(second.images) > 300
    feed_both(draw(1, 32, shift=5.0, seed=4)[0], draw(1, 32, seed=5)[0])
    assert max(float(first.images), float(second.images)) < 32 + TIDE.recent_images / 2 + 1


def test_several_passes_over_a_batch_change_the_memory_once() -> None:
    one, other = (
        make("tent", convnet(), statistics="stream", steps=1, lr=0.0),
        make("tent", convnet(), statistics="stream", steps=3, lr=0.0),
    )
    run(one, batches(3))
    run(other, batches(3))
    for name, norm in one.statistics.norms.items():
        assert torch.allclose(norm.mean, other.statistics.norms[name].mean)
    watch, theirs = one.statistics.shift_detector, other.statistics.shift_detector
    assert watch is not None
    assert theirs is not None
    assert all(torch.equal(getattr(watch, name), getattr(theirs, name)) for name in watch.STATE)


class Norm(nn.Module):
    """One BatchNorm over two channels; the logits are its mean outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(2, dtype=torch.float64)
        self.norm.running_mean = torch.tensor([0.5, -1.0], dtype=torch.float64)
        self.norm.running_var = torch.tensor([2.0, 0.3], dtype=torch.float64)
        self.norm.weight.data = torch.tensor([1.5, 0.7], dtype=torch.float64)
        self.norm.bias.data = torch.tensor([0.1, -0.2], dtype=torch.float64)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.norm(images).mean((2, 3))
        return logits


def pixels(counts: list[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [1 + 2 * torch.randn(n, 2, 3, 3, dtype=torch.float64, generator=generator) for n in counts]


def test_the_gradient_flows_through_the_statistics_of_the_batch() -> None:
    """As if the normalized batch were scaled and shifted by constants: test-time batch renormalization."""
    (images,) = pixels([6])
    statistics = Statistics(Norm(), "stream")
    norm = statistics.norms["norm"]
    statistics.start_batch(images)
    x = images.clone().requires_grad_()
    target = torch.randn(images.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    parameters = [p for p in (norm.weight, norm.bias) if p is not None]
    ours = torch.autograd.grad((norm(x) * target).sum(), [x, *parameters])

    y = images.clone().requires_grad_()
    mean, variance = y.mean((0, 2, 3), keepdim=True), y.var((0, 2, 3), keepdim=True, correction=0)
    moving_mean, moving_variance = (t[:, None, None] for t in norm.prediction_statistics())
    ratio = ((variance + 1e-5) / (moving_variance + 1e-5)).sqrt().detach()
    offset = ((mean - moving_mean) / (moving_variance + 1e-5).sqrt()).detach()
    normal = (y - mean) / (variance + 1e-5).sqrt() * ratio + offset
    weight, bias = (p.detach().clone().requires_grad_() for p in parameters)
    value = (normal * weight[:, None, None] + bias[:, None, None]) * target
    for a, b in zip(ours, torch.autograd.grad(value.sum(), [y, weight, bias]), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", ["bn", "tent", "trust", "foa", "lame"])
def test_evaluate_leaves_the_memory_alone(name: str) -> None:
    method = make(name, vmamba(), statistics="stream")
    first, second = batches(2)
    method(first)
    before = method.state_dict()
    outputs = method.evaluate(second)
    assert same(outputs, method.evaluate(second))
    assert same(method.state_dict(), before)


@pytest.mark.parametrize("statistics", ["batch", "stream", "source"])
@pytest.mark.parametrize("name", ["bn", "tide"])
def test_images_evaluated_as_the_next_batch_are_normalized_as_such(name: str, statistics: str) -> None:
    options = {} if name == "bn" else {"lr": 0.0, "views": "none", "source_mixing": False, "correct_prior": False}
    method = make(name, vmamba(), statistics=statistics, **options)
    first, second = batches(2)
    method(first)
    second = 3 * second + 1
    before, memory = method.state_dict(), {n: b.clone() for n, b in method.model.named_buffers()}
    outputs = method.evaluate(second, include_in_stats=True)
    assert same(method.state_dict(), before)
    of_the_batch = ("previous_", "batch_weight", "count")  # which the next one sets anew
    kept = [n for n in memory if not n.rpartition(".")[2].startswith(of_the_batch)]
    assert all(same(method.model.get_buffer(n), memory[n]) for n in kept)
    torch.testing.assert_close(outputs, method.fork()(second), rtol=1e-4, atol=1e-5)
    if statistics == "stream":
        assert not torch.allclose(outputs, method.evaluate(second), rtol=1e-2, atol=1e-2)


def test_the_prediction_of_a_stream_does_not_depend_on_the_other_images() -> None:
    method = make("tent", vmamba(), statistics="stream")
    first, second = batches(2)
    method(first)
    alone = torch.cat([method.evaluate(image[None]) for image in second])
    torch.testing.assert_close(method.evaluate(second), alone, rtol=1e-4, atol=1e-4)


def test_a_network_without_running_statistics_starts_from_nothing() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm2d(2, track_running_stats=False, affine=False)
            self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

        def forward(self, images: Tensor) -> Tensor:
            logits: Tensor = self.norm(images).mean((2, 3)) * self.scale
            return logits

    (images,) = pixels([9])
    method = make("bn", Plain(), statistics="stream")
    torch.testing.assert_close(method(images), make("bn", Plain())(images))
    assert float(method.statistics.norms["norm"].images) == 9


def test_a_network_of_layer_norms_is_the_same_with_all_of_them() -> None:
    stream = batches(2)
    outputs = [run(make("tent", vmamba("layer"), statistics=s), stream) for s in ("batch", "stream", "source")]
    assert same(outputs[0], outputs[1])
    assert same(outputs[0], outputs[2])


@pytest.mark.parametrize("name", list_methods())
def test_few_images_are_warned_of_once_with_a_way_out(name: str) -> None:
    few = batches(2, images=4)
    method = make(name, vmamba())
    if name in ("source", "tide", "rotta", "neo", "t3a", "dpcore", "bn_alpha", "bn_ema"):
        run(method, few)
        return
    with pytest.warns(TrustWarning, match='poor for a batch of 4 .* use statistics="stream"') as found:
        method(few[0])
    assert found[0].filename == __file__  # the caller's line, not one of ours
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "without BatchNorm, TRUST's pseudo-labels collapse")
        method(few[1])
        run(make(name, vmamba(), statistics="stream"), few)
        run(make(name, vmamba("layer")), few)


def test_the_small_rest_of_a_stream_is_not_warned_of() -> None:
    method = make("tent", vmamba())
    rest = batches(2, images=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(method, [*batches(1), rest[0]])
    with pytest.warns(TrustWarning):
        method(rest[1])


class Kernels(TorchDispatchMode):
    """Counts operators that compute or copy."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not (func.is_view or "empty" in str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("parts", [False, True])
def test_the_work_beside_the_passes_does_not_grow_with_the_norms(parts: bool) -> None:
    """A few dozen norms would cost the host more than their passes do."""
    counts = []
    for norms in (2, 20):
        model = nn.Sequential(*(nn.BatchNorm2d(3) for _ in range(norms)))
        statistics = Statistics(model, "stream", mix_source=parts, cluster_domains=parts)
        images = torch.randn(8, 3, 8, 8)
        statistics.start_batch(images)
        with Kernels() as kernels:  # type: ignore[no-untyped-call]
            before = statistics.state()
            statistics.start_batch(images)
            statistics.load(before)
        counts.append(kernels.count)
    assert counts[0] == counts[1]


def test_norms_of_several_dtypes_follow_the_stream() -> None:
    model = nn.Sequential(nn.BatchNorm2d(3), nn.BatchNorm2d(3).double(), nn.BatchNorm2d(3))
    statistics = Statistics(model, "stream", mix_source=True)
    statistics.start_batch(torch.randn(8, 3, 8, 8))
    state = statistics.state()
    assert [value.dtype for value in state["mean"].values()] == [torch.float32, torch.float64, torch.float32]
    for norm in statistics.norms.values():
        norm.variance.zero_()
    statistics.load(state)
    assert all(torch.equal(norm.variance, torch.ones_like(norm.variance)) for norm in statistics.norms.values())


FOLLOWING = ("tide", "rotta", "bn_ema", "bn_alpha")


@pytest.mark.parametrize("name", FOLLOWING)
def test_hooks_on_batch_norms_still_run(name: str) -> None:
    model, seen = convnet(), list[str]()
    norm = next(module for module in model.modules() if isinstance(module, nn.BatchNorm2d))
    norm.register_forward_pre_hook(lambda *_: seen.append("before"))
    norm.register_forward_hook(lambda *_: seen.append("after"))
    make(name, model)(batches(1)[0])
    assert {"before", "after"} <= set(seen)


class CustomNorm(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize("name", FOLLOWING)
def test_batch_norms_with_a_forward_of_their_own_are_refused(name: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), CustomNorm(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5))
    with pytest.raises(ConfigError, match="the layer '1' is a CustomNorm with a forward of its own"):
        make(name, model)
    assert make("tent", model)(batches(1)[0]).shape == (len(batches(1)[0]), 5)


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


@pytest.mark.parametrize("name", FOLLOWING)
@pytest.mark.parametrize("computed", ["parametrized", "pruned"])
def test_batch_norms_with_computed_weights_are_refused(name: str, computed: str) -> None:
    norm = nn.BatchNorm2d(4)
    if computed == "parametrized":
        parametrize.register_parametrization(norm, "weight", Doubled())
    else:
        prune.l1_unstructured(norm, "weight", amount=0.5)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5))
    with pytest.raises(ConfigError, match="the layer '1' is computed from other parameters"):
        make(name, model.eval())
    assert make("bn", model)(batches(1)[0]).shape == (len(batches(1)[0]), 5)
