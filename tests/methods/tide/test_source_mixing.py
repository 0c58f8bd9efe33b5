"""Source mixing: how much of the stream's statistics a norm uses beside the source's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.methods.networks import batches, convnet, make, run, same
from trust_tta.methods.statistics import Statistics
from trust_tta.methods.stream_norm import StreamNorm
from trust_tta.methods.tide.constants import TIDE

CHANNELS = 32


def mixing_norm(*, mix_source: bool = True) -> tuple[Statistics, StreamNorm]:
    source = nn.BatchNorm2d(CHANNELS).eval().double()
    source.running_mean.copy_(torch.linspace(-1, 2, CHANNELS))  # type: ignore[union-attr]
    source.running_var.copy_(torch.linspace(0.5, 2, CHANNELS))  # type: ignore[union-attr]
    statistics = Statistics(
        nn.Sequential(source), "stream", updating_without_grad=True, mix_source=mix_source, cluster_domains=True
    )
    return statistics, statistics.norms["0"]


def maps(n: int, norm: StreamNorm, *, shift: float = 0.0, scale: float = 1.0, seed: int = 0) -> Tensor:
    """Maps (n, channels, 6, 6) of the source's statistics; means of images vary by half a standard deviation."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(n, CHANNELS, 6, 6, generator=generator, dtype=torch.float64) * 0.75**0.5
    standard = drawn + 0.5 * torch.randn(n, CHANNELS, 1, 1, generator=generator, dtype=torch.float64)
    mean, variance = (value.view(-1, 1, 1) for value in (norm.source_mean, norm.source_variance))
    shifted: Tensor = mean + variance.sqrt() * (shift + scale * standard)
    return shifted


def feed(statistics: Statistics, x: Tensor, batch: int = 32) -> None:
    with torch.no_grad():
        for images in x.split(batch):
            statistics.start_batch(images)
            statistics.norms["0"](images)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_mixed_statistics_are_those_of_a_pool_of_stream_and_source(share: float) -> None:
    """Of two groups of values, in the proportion of the share, drawn with exactly these means and variances."""
    _, norm = mixing_norm()
    norm.mean.copy_(torch.linspace(2, -1, CHANNELS))
    norm.variance.copy_(torch.linspace(3, 1, CHANNELS))
    norm.share.fill_(share)
    source_mean, source_variance = norm.source_mean, norm.source_variance
    mean = share * norm.mean + (1 - share) * source_mean
    square = share * (norm.variance + norm.mean**2) + (1 - share) * (source_variance + source_mean**2)
    used = norm.prediction_statistics()
    assert torch.allclose(used[0], mean, atol=1e-6)
    assert torch.allclose(used[1], square - mean**2, atol=1e-6)


@pytest.mark.parametrize("images", [8, 64, 512])
def test_share_is_near_zero_without_a_shift(images: int) -> None:
    shares = []
    for seed in range(8):
        statistics, norm = mixing_norm()
        feed(statistics, maps(images, norm, seed=seed))
        shares.append(float(norm.share))
    assert sum(shares) / len(shares) < 1 / (1 + TIDE.standard_errors**2) + 0.02  # all of the distance is chance


@pytest.mark.parametrize(("shift", "scale"), [(1.0, 1.0), (0.0, 0.3), (0.0, 2.0)], ids=["mean", "flat", "strong"])
def test_share_is_near_one_after_a_large_shift(shift: float, scale: float) -> None:
    statistics, norm = mixing_norm()
    feed(statistics, maps(64, norm, shift=shift, scale=scale))
    assert float(norm.share) > 0.9


def test_share_grows_with_the_evidence_for_a_small_shift() -> None:
    shares = []
    for images in (8, 64, 512):
        statistics, norm = mixing_norm()
        feed(statistics, maps(images, norm, shift=0.15))
        shares.append(float(norm.share))
    assert shares == sorted(shares)
    distance = float(norm.standard_moments(norm.mean, norm.variance).square().mean())
    assert shares[2] == pytest.approx(distance / (distance + TIDE.clean_distance), abs=0.06)  # of many images
    assert shares[0] < shares[2] / 1.5


def test_share_does_not_depend_on_the_batch_size() -> None:
    """Nor do the statistics and the variance between images: they are those of all images together."""
    found = []
    for batch in (1, 5, 48):
        statistics, norm = mixing_norm()
        x = maps(48, norm, shift=0.3)
        with torch.no_grad():
            for images in x.split(batch):
                statistics.weigh_batch(len(images), 1.0, torch.ones(()))  # as if no shift was detected
                norm(images)
        flat = x.flatten(2)
        images_ = norm.standard_moments(flat.mean(2), flat.var(2, correction=0))
        assert float(norm.image_variance) == pytest.approx(float(images_.var(1, correction=0).mean()), rel=1e-2)
        found.append(float(norm.share))
    assert found == pytest.approx([found[0]] * 3, abs=5e-3)


def test_one_image_is_no_evidence() -> None:
    statistics, norm = mixing_norm()
    x = maps(1, norm, shift=3.0)
    feed(statistics, torch.cat([x, x.flip(-1)]))  # two images, and then one with two views
    assert float(norm.share) > 0.9
    statistics.restore_source()
    statistics.start_batch(x)
    with torch.no_grad():
        outputs = norm(torch.cat([x, x.flip(-1)]))
    assert float(norm.share) == 0
    mean, variance = norm.source_mean, norm.source_variance
    wanted = nn.functional.batch_norm(x, mean, variance, norm.weight, norm.bias, eps=norm.eps)
    assert torch.allclose(outputs[:1], wanted)


def test_each_group_has_a_share_of_its_own() -> None:
    statistics, norm = mixing_norm()
    x = torch.cat([maps(64, norm), maps(64, norm, shift=1.0, seed=1)])
    statistics.start_batch(x)
    norm.groups = torch.arange(128) // 64
    with torch.no_grad():
        norm(x)
    shares = norm.group_share.tolist()
    assert shares[0] < 0.2
    assert shares[1] > 0.9
    assert shares[2:] == [0] * len(shares[2:])


def test_option_turns_mixing_off() -> None:
    statistics, norm = mixing_norm(mix_source=False)
    x = maps(64, norm)
    feed(statistics, x, batch=64)
    assert norm.prediction_statistics()[0] is norm.mean
    assert torch.allclose(norm.mean, x.mean((0, 2, 3)))
    plain = make("tide", convnet(), source_mixing=False)
    assert not any(norm.mix_source for norm in plain.statistics.norms.values())


def test_fork_and_reset_keep_shares_apart() -> None:
    method = make("tide", convnet())
    run(method, batches(3))
    twin = method.fork()
    before = method.state_dict()
    run(twin, batches(2))
    assert same(method.state_dict(), before)
    method.reset()
    assert all(float(norm.share) == 0 for norm in method.statistics.norms.values())


def test_state_saved_with_a_learned_share_is_read() -> None:
    """As the last version saved it: a part `source_mixing`, and neither shares nor variances between images."""
    method = make("bn", convnet(), statistics="stream")
    run(method, batches(2))
    old = method.state_dict()
    old["statistics"] = {k: v for k, v in old["statistics"].items() if not k.endswith(("image_variance", "share"))}
    old["statistics"]["source_mixing"] = {"value": torch.ones(2), "images": torch.zeros(())}
    twin = make("bn", convnet(), statistics="stream")
    twin.load_state_dict(old)
    for norm, other in zip(twin.statistics.norms.values(), method.statistics.norms.values(), strict=True):
        assert torch.equal(norm.mean, other.mean)
        assert float(norm.share) == 1
