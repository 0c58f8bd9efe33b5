"""Domain clusters: which images of a mixed stream belong together, and how each cluster is normalized."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import trust_tta as tt
from tests.methods.networks import batches, make, run, same, vmamba
from tests.methods.tide.test_shift_detector import as_input, shipped
from trust_tta import corrupt
from trust_tta.data.sample import load_sample
from trust_tta.methods.statistics import Statistics
from trust_tta.methods.stream_norm import StreamNorm
from trust_tta.methods.tide.constants import TIDE
from trust_tta.methods.tide.domain_clusters import DomainClusters
from trust_tta.methods.tide.shift_detector import ShiftDetector, describe

KINDS = ("gaussian_noise", "defocus_blur", "contrast", "pixelate")
MUCH, LITTLE = torch.tensor(1.0), torch.tensor(0.1)


@cache
def mixed_sample() -> tuple[Any, Any, Any]:
    """Shipped images (256, h, w, 3), each with one of four corruptions, their labels, and which."""
    images, labels = (values[:256] for values in load_sample())
    kinds = np.random.default_rng(0).permutation(len(images)) % len(KINDS)
    images = images.copy()
    for kind, name in enumerate(KINDS):
        images[kinds == kind] = corrupt(images[kinds == kind], name, severity=5)
    return images, labels, kinds


def mixed_images() -> tuple[Tensor, Tensor]:
    images, _, kinds = mixed_sample()
    return as_input(images), torch.from_numpy(kinds)


@pytest.mark.parametrize("kind", ["clean", *KINDS, "fog", "glass_blur", "jpeg_compression"])
def test_images_of_one_domain_vary_less_than_mixed_ones(kind: str) -> None:
    images = load_sample()[0][:128]
    one = as_input(images if kind == "clean" else corrupt(images, kind, severity=5))
    assert variance_of(one) < 0.75 * TIDE.mixed_variance
    assert variance_of(mixed_images()[0]) > 1.2 * TIDE.mixed_variance


def variance_of(images: Tensor) -> float:
    detector = ShiftDetector(images)
    for batch in images.split(64):
        detector.observe(describe(batch))
    return float(detector.variance)


def observe(clusters: DomainClusters, descriptions: Tensor, variance: Tensor) -> Tensor | None:
    return clusters.assign(descriptions, mixed=bool(clusters.enqueue(descriptions, variance)))


@pytest.mark.parametrize("size", [1, 8, 64])
def test_mixed_corruptions_are_separated(size: int) -> None:
    images, kinds = mixed_images()
    clusters = DomainClusters(images.new_zeros(()))
    batches = describe(images).split(size)
    waiting = [observe(clusters, batch, LITTLE) for batch in batches[: 64 // size]]
    assert all(groups is None for groups in waiting)
    found = torch.cat([g for batch in batches[64 // size :] if (g := observe(clusters, batch, MUCH)) is not None])
    table = torch.zeros(TIDE.clusters, len(KINDS))
    table.index_put_((found, kinds[64 : 64 + len(found)]), torch.ones(len(found)), accumulate=True)
    assert table.amax(1).sum() / table.sum() > 0.85  # most images of a group have one corruption
    assert table.argmax(1)[table.sum(1) > 0].unique().numel() == len(KINDS)


def test_fewer_images_than_clusters_get_a_cluster_each() -> None:
    images, _ = mixed_images()
    few = describe(images)[:3]
    clusters = DomainClusters(images.new_zeros(()))
    found = observe(clusters, few, MUCH)
    assert found is not None
    assert found.unique().numel() == 3
    torch.testing.assert_close(clusters.centers[found], few)


def test_centers_are_the_means_of_their_images() -> None:
    images, _ = mixed_images()
    found = describe(images)[:128]
    clusters = DomainClusters(images.new_zeros(()))
    observe(clusters, found, MUCH)
    before = clusters.centers.clone(), clusters.weight.clone()
    assert float(clusters.weight.sum()) == len(found)
    near = clusters.nearest(found)
    for group in range(TIDE.clusters):
        if (near == group).any():
            torch.testing.assert_close(clusters.centers[group], found[near == group].mean(0), rtol=0.05, atol=0.05)
    observe(clusters, found, LITTLE)
    assert not clusters.active
    assert not torch.equal(before[1], clusters.weight)


def split_norm() -> tuple[Statistics, StreamNorm]:
    norm = nn.BatchNorm2d(3, dtype=torch.float64).eval()
    with torch.no_grad():
        for values in (norm.running_mean, norm.weight, norm.bias):
            assert values is not None
            values.copy_(torch.randn(3, generator=torch.Generator().manual_seed(1)))
    statistics = Statistics(nn.Sequential(norm), "stream", cluster_domains=True)
    return statistics, statistics.norms["0"]


def come(statistics: Statistics, images: int) -> None:
    """As `start_batch` does within a domain."""
    statistics.weigh_batch(images, 1.0, torch.ones(()))


def test_clusters_are_normalized_like_separate_streams() -> None:
    """Values, gradients and memory, against one norm for each group and one for all of them."""
    statistics, norm = split_norm()
    alone, (of_all, together) = [split_norm() for _ in range(TIDE.clusters)], split_norm()
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        groups = torch.randint(0, 3, (16,), generator=generator)
        x = torch.randn(16, 3, 4, 5, dtype=torch.float64, generator=generator) * (1 + groups)[:, None, None, None]
        x.requires_grad_()
        norm.groups = groups
        come(statistics, 16)
        outputs, slope = norm(x), torch.randn(16, 3, 4, 5, dtype=torch.float64, generator=generator)
        (gradient,) = torch.autograd.grad(outputs, x, slope)
        come(of_all, 16)
        together(x)
        for name in together.STATE:
            torch.testing.assert_close(getattr(norm, name), getattr(together, name), rtol=1e-9, atol=1e-9)
        for group in groups.unique().tolist():
            of_group, own = alone[group]
            part = x[groups == group].detach().requires_grad_()
            come(of_group, len(part))
            expected = own(part)
            (slopes,) = torch.autograd.grad(expected, part, slope[groups == group])
            torch.testing.assert_close(outputs[groups == group], expected, rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(gradient[groups == group], slopes, rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(norm.group_mean[group], own.mean)
            torch.testing.assert_close(norm.group_variance[group], own.variance)
            torch.testing.assert_close(norm.group_images[group], own.images)
            torch.testing.assert_close(norm.group_share[group], own.share)
    with torch.no_grad(), torch.inference_mode(False):
        norm.updating = False
        expected = torch.stack([alone[g][1](image[None])[0] for g, image in zip(groups.tolist(), x, strict=True)])
        assert not torch.allclose(norm(x), expected + 1)


def test_clusters_do_not_change_a_stream_of_one_domain() -> None:
    images, _ = shipped()
    stream = list(images[:64].split(32))
    outputs = [run(tt.create_method("tide", network(), domain_clusters=m), stream) for m in (True, False)]
    assert same(outputs[0], outputs[1])


def network() -> nn.Module:
    return tt.create_model("vmamba_nano", checkpoint="vmamba_nano_cifar10")


def test_clusters_improve_a_mixed_stream() -> None:
    model = network()
    images, labels, _ = mixed_sample()
    stream = model.preprocessing(images[:192]).split(64)  # type: ignore[operator]
    right = {}
    for mixtures in (True, False):
        method = tt.create_method("tide", copy.deepcopy(model), domain_clusters=mixtures)
        outputs = torch.cat([method(batch) for batch in stream])
        right[mixtures] = int((outputs.argmax(1).numpy() == labels[:192]).sum())
    assert right[True] > right[False] + 0.03 * 192


def test_a_mixed_state_is_saved_restored_and_left_alone_by_evaluation() -> None:
    method = make("tide", vmamba())
    first, second, third = batches(3)
    for batch in (first, second, third):
        batch[::2] *= 0.05
    run(method, [first, second])
    assert method.statistics.clusters.active
    state = method.state_dict()
    method.evaluate(third)
    method.evaluate(third, include_in_stats=True)
    assert same(method.state_dict(), state)
    other = make("tide", vmamba())
    other.load_state_dict(state)
    assert other.statistics.clusters.active
    assert same(other.evaluate(third), method.evaluate(third))
    assert same(other(third), method(third))
    assert same(other.state_dict(), method.state_dict())
    method.reset()
    assert not method.statistics.clusters.active
    assert same(method.state_dict(), make("tide", vmamba()).state_dict())
