"""Statistics of the stream: what a batch counts for, and what the memory then holds."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.methods.networks import batches, convnet, make, run
from trust_tta.methods.statistics import HALF_LIFE, SOURCE_WORTH, Statistics, StreamNorm, divergence


def norm_of(channels: int = 4, *, known: bool = True) -> tuple[Statistics, StreamNorm]:
    model = nn.Sequential(nn.BatchNorm2d(channels, track_running_stats=known)).eval()
    statistics = Statistics(model, "stream", observing_without_grad=True)
    return statistics, statistics.norms["0"]


def feed(statistics: Statistics, norm: StreamNorm, x: Tensor) -> None:
    statistics.begin(len(x))
    with torch.no_grad():
        norm(x)


def draw(count: int, n: int, *, shift: float = 0.0, scale: float = 1.0, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [shift + scale * torch.randn(n, 4, 8, 8, generator=generator) for _ in range(count)]


def test_the_first_batches_are_averaged_with_the_source_as_so_many_images() -> None:
    """The mean and the variance of a pool in which training stands as 32 images of mean 0 and variance 1."""
    statistics, norm = norm_of()
    stream = draw(3, 32, shift=0.01)
    for x in stream:
        feed(statistics, norm, x)
    seen = torch.cat(stream)
    share = len(seen) / (len(seen) + SOURCE_WORTH)
    mean = share * seen.mean((0, 2, 3))
    square = share * seen.square().mean((0, 2, 3)) + (1 - share)
    assert torch.allclose(norm.mean, mean, atol=1e-5)
    assert torch.allclose(norm.variance, square - mean.square(), atol=1e-4)
    assert float(norm.images) == pytest.approx(len(seen) + SOURCE_WORTH)


def test_without_statistics_of_training_the_stream_is_all_there_is() -> None:
    statistics, norm = norm_of(known=False)
    (x,) = draw(1, 16, shift=5.0)
    feed(statistics, norm, x)
    assert torch.allclose(norm.mean, x.mean((0, 2, 3)), atol=1e-5)


def test_the_memory_fades_with_its_half_life() -> None:
    statistics, norm = norm_of()
    for x in draw(40, 64):
        feed(statistics, norm, x)
    assert float(norm.images) == pytest.approx(64 / (1 - 2 ** (-64 / HALF_LIFE)), rel=1e-4)


def test_a_change_of_domain_starts_the_memory_anew_and_the_next_batches_average() -> None:
    statistics, norm = norm_of()
    for x in draw(20, 32):
        feed(statistics, norm, x)
    after = draw(3, 32, shift=4.0, scale=2.0, seed=1)
    feed(statistics, norm, after[0])
    assert float(norm.images) < 34
    for x in after[1:]:
        feed(statistics, norm, x)
    assert torch.allclose(norm.mean, torch.cat(after).mean((0, 2, 3)), atol=0.1)


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


def test_batches_that_always_differ_are_usual_and_a_new_domain_is_not() -> None:
    """Two kinds take turns, as classes do in a correlated stream; then something else comes."""
    statistics, norm = norm_of()
    kinds = [draw(60, 32, shift=0.6, seed=2), draw(60, 32, shift=-0.6, seed=3)]
    shares = []
    for i in range(60):
        feed(statistics, norm, kinds[i % 2][i])
        shares.append(32 / float(norm.images))
    assert max(shares[30:]) < 0.1
    assert norm.mean.abs().max() < 0.2
    feed(statistics, norm, draw(1, 32, shift=6.0, seed=4)[0])
    assert 32 / float(norm.images) > 0.9


def test_several_passes_over_a_batch_change_the_memory_once() -> None:
    one, other = (
        make("tent", convnet(), statistics="stream", steps=1, lr=0.0),
        make("tent", convnet(), statistics="stream", steps=3, lr=0.0),
    )
    run(one, batches(3))
    run(other, batches(3))
    for name, norm in one.statistics.norms.items():
        assert torch.allclose(norm.mean, other.statistics.norms[name].mean)
        assert torch.equal(norm.usual, other.statistics.norms[name].usual)


def test_the_divergence_is_that_of_torch() -> None:
    m, v, m2, v2 = torch.rand(4, 6, dtype=torch.float64) + 0.1
    p, q = torch.distributions.Normal(m, v.sqrt()), torch.distributions.Normal(m2, v2.sqrt())
    expected = (torch.distributions.kl_divergence(p, q) + torch.distributions.kl_divergence(q, p)).mean()
    assert float(divergence(m, v, m2, v2, eps=0.0)) == pytest.approx(float(expected), rel=1e-12)
