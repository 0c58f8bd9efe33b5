"""How much the stream counts beside the source: what a norm mixes, and how its share learns."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from tests.methods.networks import batches, convnet, make, run, same
from trust_tta.methods.flat_parameters import FlatParameters, OptimizerConfig
from trust_tta.methods.shares import BATCH, RATE, START, Shares
from trust_tta.methods.statistics import SOURCE_WORTH, Statistics, StreamNorm


def mixing_norm() -> tuple[Statistics, StreamNorm, Shares]:
    source = nn.BatchNorm2d(4).eval()
    source.running_mean.copy_(torch.tensor([0.5, -1.0, 0.0, 2.0]))  # type: ignore[union-attr]
    source.running_var.copy_(torch.tensor([1.0, 0.5, 2.0, 1.5]))  # type: ignore[union-attr]
    statistics = Statistics(nn.Sequential(source), "stream", learn_shares=True)
    assert statistics.shares is not None
    return statistics, statistics.norms["0"], statistics.shares


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_the_statistics_are_those_of_a_pool_of_stream_and_source(share: float) -> None:
    """Of two groups of values, in the proportion of the share, drawn with exactly these means and variances."""
    _, norm, shares = mixing_norm()
    norm.mean.copy_(torch.tensor([1.0, 0.0, -1.0, 2.0]))
    norm.variance.copy_(torch.tensor([2.0, 1.0, 1.0, 0.5]))
    with torch.no_grad():
        shares.value.fill_(share)
    assert norm.source_mean is not None
    assert norm.source_variance is not None
    mean = share * norm.mean + (1 - share) * norm.source_mean
    then = norm.source_variance + norm.source_mean**2
    square = share * (norm.variance + norm.mean**2) + (1 - share) * then
    used = norm.used()
    assert torch.allclose(used[0], mean, atol=1e-6)
    assert torch.allclose(used[1], square - mean**2, atol=1e-6)


def test_the_gradient_is_the_slope_of_the_loss() -> None:
    """Against differences of the loss in float64, with the statistics of the batch held as they are."""
    statistics, norm, shares = mixing_norm()
    norm.double()
    x = torch.randn(8, 4, 5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weights = torch.randn(8, 4, 5, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def loss(value: float) -> Tensor:
        statistics.restore_source()
        statistics.begin(x)
        with torch.no_grad():
            shares.value.fill_(value)
        outputs: Tensor = norm(x)
        return (outputs.tanh() * weights).sum()

    (slope,) = torch.autograd.grad(loss(0.6), shares.value)
    step = 1e-6
    differences = (loss(0.6 + step) - loss(0.6 - step)).detach() / (2 * step)
    assert slope.item() == pytest.approx(differences.item(), rel=1e-6)


def learn(shares: Shares, gradients: Tensor, images: int = BATCH) -> None:
    for gradient in gradients:
        shares.learn(gradient, images, finite=torch.tensor(True))


def noise(batches: int, norms: int, seed: int = 0) -> Tensor:
    return torch.randn(batches, norms, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_slopes_that_agree_move_every_share_and_chance_moves_none() -> None:
    steady, chance = (Shares(20, torch.empty(0, dtype=torch.float64)) for _ in range(2))
    learn(steady, 3e-4 * (1 + noise(16, 20)))
    learn(chance, 3e-4 * noise(16, 20))
    assert float(steady.value.detach().mean()) < START - 0.5
    assert float(chance.value.detach().min()) > START - 0.1


def test_at_full_agreement_a_share_falls_by_the_rate_per_128_images() -> None:
    shares = Shares(3, torch.empty(0, dtype=torch.float64))
    shares.images.fill_(1e6)
    shares.slope.fill_(2e-4)
    shares.square.fill_(4e-8)
    learn(shares, torch.full((1, 3), 2e-4, dtype=torch.float64), images=32)
    assert shares.value.tolist() == pytest.approx([START - RATE * 32 / BATCH] * 3)


@pytest.mark.parametrize("images", [1, 8, 512])
def test_the_evidence_does_not_depend_on_the_size_of_batches(images: int) -> None:
    """The same images in other batches: means over them have the same slope, and chance in proportion."""
    pieces = 0.5 + 2 * noise(4096, 40).view(-1, images, 40).mean(1) * BATCH**0.5
    shares = Shares(40, torch.empty(0, dtype=torch.float64))
    for gradient in pieces:
        with torch.no_grad():
            shares.value.fill_(START)
        shares.learn(gradient, images, finite=torch.tensor(True))
    expected = 0.5 / (0.5**2 + 2**2) ** 0.5
    assert float(shares.evidence(images)[0].mean()) == pytest.approx(expected, abs=0.12)


def test_what_is_not_finite_moves_nothing() -> None:
    shares = Shares(2, torch.empty(0))
    shares.learn(torch.tensor([1.0, -1.0]), 32, finite=torch.tensor(True))
    before = copy.deepcopy(shares.values())
    shares.learn(torch.tensor([float("nan"), float("inf")]), 32, finite=torch.tensor(False))
    assert same(shares.values(), before)


def test_a_slope_that_is_not_finite_skips_the_step() -> None:
    """The loss and the weights' gradient are finite: the root of 0 has no slope."""
    weights = FlatParameters({"w": nn.Parameter(torch.ones(2))}, OptimizerConfig())
    share = torch.zeros(1, requires_grad=True)
    assert not weights.backward(weights.named["w"].sum() + share.sqrt().sum(), extra=share)
    assert weights.backward(weights.named["w"].sum() + share.sum(), extra=share)


def test_a_new_domain_begins_where_the_first_did() -> None:
    shares = Shares(2, torch.empty(0))
    shares.learn(torch.tensor([1.0, -1.0]), 512, finite=torch.tensor(True))
    shares.reopen(torch.tensor(0.5))
    assert float(shares.images) == 256
    shares.reopen(torch.tensor(0.0))
    assert shares.value.tolist() == [START, START]
    assert not any(float(getattr(shares, name).abs().sum()) for name in ("slope", "square", "images"))


def test_where_the_source_fits_the_shares_come_to_the_minimum() -> None:
    """The loss of every norm is least at a share of its own."""
    shares, best = Shares(8, torch.empty(0, dtype=torch.float64)), torch.linspace(0.2, 0.8, 8, dtype=torch.float64)
    for _ in range(80):
        (gradient,) = torch.autograd.grad((shares.value - best).square().sum(), shares.value)
        shares.learn(gradient, BATCH, finite=torch.tensor(True))
    assert float((shares.value.detach() - best).abs().mean()) < 0.15


def test_tide_learns_shares_and_says_no_where_told() -> None:
    method = make("tide", convnet())
    shares = method.statistics.shares
    assert shares is not None
    run(method, batches(3))
    assert float(shares.images) == sum(len(x) for x in batches(3))
    assert float(shares.square.min()) > 0
    twin = method.fork()
    before = method.state_dict()
    run(twin, batches(2))
    assert same(method.state_dict(), before)  # a fork has shares of its own
    method.reset()
    assert float(shares.images) == 0
    plain = make("tide", convnet(), shares=False)
    assert plain.statistics.shares is None
    norm = next(iter(plain.statistics.norms.values()))
    assert norm.used()[0] is norm.mean
    assert float(norm.images) == SOURCE_WORTH
