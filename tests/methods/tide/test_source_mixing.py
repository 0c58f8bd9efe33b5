"""Source mixing: which statistics a norm uses, and how the share of the stream is learned."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from tests.methods.networks import batches, convnet, make, run, same
from trust_tta.methods.flat_parameters import FlatParameters, OptimizerConfig
from trust_tta.methods.statistics import Statistics, StreamNorm
from trust_tta.methods.tide.constants import TIDE
from trust_tta.methods.tide.source_mixing import SourceMixing

UNIT, RATE, START = int(TIDE.unit), TIDE.mixing_rate, TIDE.stream_share


def mixing_norm() -> tuple[Statistics, StreamNorm, SourceMixing]:
    source = nn.BatchNorm2d(4).eval()
    source.running_mean.copy_(torch.tensor([0.5, -1.0, 0.0, 2.0]))  # type: ignore[union-attr]
    source.running_var.copy_(torch.tensor([1.0, 0.5, 2.0, 1.5]))  # type: ignore[union-attr]
    statistics = Statistics(nn.Sequential(source), "stream", mix_source=True)
    assert statistics.source_mixing is not None
    return statistics, statistics.norms["0"], statistics.source_mixing


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_mixed_statistics_are_those_of_a_pool_of_stream_and_source(share: float) -> None:
    """Of two groups of values, in the proportion of the share, drawn with exactly these means and variances."""
    _, norm, mixing = mixing_norm()
    norm.mean.copy_(torch.tensor([1.0, 0.0, -1.0, 2.0]))
    norm.variance.copy_(torch.tensor([2.0, 1.0, 1.0, 0.5]))
    with torch.no_grad():
        mixing.value.fill_(share)
    assert norm.source_mean is not None
    assert norm.source_variance is not None
    mean = share * norm.mean + (1 - share) * norm.source_mean
    then = norm.source_variance + norm.source_mean**2
    square = share * (norm.variance + norm.mean**2) + (1 - share) * then
    used = norm.used()
    assert torch.allclose(used[0], mean, atol=1e-6)
    assert torch.allclose(used[1], square - mean**2, atol=1e-6)


def test_gradient_of_the_share_matches_finite_differences() -> None:
    """In float64, with the statistics of the batch held as they are."""
    statistics, norm, mixing = mixing_norm()
    norm.double()
    x = torch.randn(8, 4, 5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weights = torch.randn(8, 4, 5, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def loss(value: float) -> Tensor:
        statistics.restore_source()
        statistics.begin(x)
        with torch.no_grad():
            mixing.value.fill_(value)
        outputs: Tensor = norm(x)
        return (outputs.tanh() * weights).sum()

    (slope,) = torch.autograd.grad(loss(0.6), mixing.value)
    step = 1e-6
    differences = (loss(0.6 + step) - loss(0.6 - step)).detach() / (2 * step)
    assert slope.item() == pytest.approx(differences.item(), rel=1e-6)


def update(mixing: SourceMixing, gradients: Tensor, images: int = UNIT) -> None:
    for gradient in gradients:
        mixing.update(gradient, images, finite=torch.tensor(True))


def noise(batches: int, norms: int, seed: int = 0) -> Tensor:
    return torch.randn(batches, norms, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_steady_slope_moves_the_share_and_chance_hardly_does() -> None:
    steady, chance = (SourceMixing(20, torch.empty(0, dtype=torch.float64)) for _ in range(2))
    update(steady, 3e-4 * (1 + noise(8, 20)))
    update(chance, 3e-4 * noise(8, 20))
    assert float(steady.value.detach()[0]) < START - 5 * RATE
    assert abs(float(chance.value.detach()[0]) - START) < 4 * RATE


def test_equal_slopes_move_the_share_by_the_rate_per_128_images() -> None:
    mixing = SourceMixing(3, torch.empty(0, dtype=torch.float64))
    update(mixing, torch.full((1, 3), 2e-4, dtype=torch.float64), images=32)
    assert mixing.value.tolist() == pytest.approx([START - RATE * 32 / UNIT] * 3)


def test_non_finite_gradient_changes_nothing() -> None:
    mixing = SourceMixing(2, torch.empty(0))
    update(mixing, torch.tensor([[1.0, -0.5]]), images=32)
    before = copy.deepcopy(mixing.values())
    mixing.update(torch.tensor([float("nan"), float("inf")]), 32, finite=torch.tensor(False))
    assert same(mixing.values(), before)


def test_non_finite_slope_of_the_share_skips_the_step() -> None:
    """The loss and the weights' gradient are finite: the root of 0 has no slope."""
    weights = FlatParameters({"w": nn.Parameter(torch.ones(2))}, OptimizerConfig())
    share = torch.zeros(1, requires_grad=True)
    assert not weights.backward(weights.named["w"].sum() + share.sqrt().sum(), extra=share)
    assert weights.backward(weights.named["w"].sum() + share.sum(), extra=share)


def test_shift_restores_the_initial_share() -> None:
    mixing = SourceMixing(2, torch.empty(0))
    update(mixing, torch.tensor([[1.0, -0.5]]), images=512)
    mixing.forget(torch.tensor(0.5))
    assert float(mixing.images) == 256
    mixing.forget(torch.tensor(0.0))
    assert mixing.value.tolist() == [START, START]
    assert not any(float(getattr(mixing, name)) for name in ("slope", "square", "images"))


def test_share_reaches_the_minimum_of_the_loss() -> None:
    mixing = SourceMixing(8, torch.empty(0, dtype=torch.float64))
    for _ in range(60):
        (gradient,) = torch.autograd.grad((mixing.value - 0.3).square().sum(), mixing.value)
        mixing.update(gradient, UNIT, finite=torch.tensor(True))
    assert float(mixing.value.detach()[0]) == pytest.approx(0.3, abs=0.15)


def test_tide_learns_the_share_unless_told_otherwise() -> None:
    method = make("tide", convnet())
    mixing = method.statistics.source_mixing
    assert mixing is not None
    run(method, batches(3))
    assert float(mixing.images) == sum(len(x) for x in batches(3))
    assert float(mixing.square) > 0
    twin = method.fork()
    before = method.state_dict()
    run(twin, batches(2))
    assert same(method.state_dict(), before)  # a fork has a share of its own
    method.reset()
    assert float(mixing.images) == 0
    plain = make("tide", convnet(), source_mixing=False)
    assert plain.statistics.source_mixing is None
    norm = next(iter(plain.statistics.norms.values()))
    assert norm.used()[0] is norm.mean
    assert float(norm.images) == TIDE.source_images
