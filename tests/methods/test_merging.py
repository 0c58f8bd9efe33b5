"""Merging snapshots of weights."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from trust_tta.methods import merging


def thetas(count: int, *, spread: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(2, 13, generator=generator)
    return [base + spread * torch.randn(base.shape, generator=generator) for _ in range(count)]


@pytest.mark.parametrize("count", [1, 2, 3, 6, 7])
def test_merging_equal_weights_changes_no_bit(count: int) -> None:
    one = thetas(1)[0]
    entropies = torch.linspace(0.2, 1.5, count)
    for merged in (
        merging.mean([one] * count),
        merging.weighted([one] * count, merging.inverse_entropy_weights(entropies)),
        merging.slerp([one] * count, merging.inverse_entropy_weights(entropies)),
    ):
        assert torch.equal(merged, one)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("counted", [[1, 1, 1, 1], [0, 1, 0, 1], [1, 0, 0, 0], [0, 0, 0, 1], [0, 0, 0, 0]], ids=str)
def test_mean_of_those_that_count(counted: list[int], dtype: torch.dtype) -> None:
    """To the bit what the mean of a list without the others is; the first where none counts."""
    parts = list(torch.randn(4, 50, generator=torch.Generator().manual_seed(2), dtype=dtype))
    kept = [part for part, counts in zip(parts, counted, strict=True) if counts] or parts[:1]
    mean = kept[0]
    for count, part in enumerate(kept[1:], start=2):
        mean = torch.lerp(mean, part, 1 / count)
    assert torch.equal(merging.mean(parts, torch.tensor(counted, dtype=torch.bool)), mean)


def test_mean_and_weighted_against_a_loop() -> None:
    parts = thetas(4)
    weights = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    plain = sum(p.double() for p in parts) / 4
    scaled = sum(float(w) * p.double() for w, p in zip(weights, parts, strict=True))
    torch.testing.assert_close(merging.mean(parts).double(), plain, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(merging.weighted(parts, weights).double(), scaled, rtol=1e-5, atol=1e-6)


def test_inverse_entropy_weights() -> None:
    weights = merging.inverse_entropy_weights(torch.tensor([0.5, 1.0, 2.0]))
    torch.testing.assert_close(weights, torch.tensor([4.0, 2.0, 1.0], dtype=torch.float64) / 7)
    assert merging.inverse_entropy_weights(torch.tensor([0.0, 1.0])).isfinite().all()


def test_slerp_of_two_is_the_point_at_its_share_of_the_angle() -> None:
    angle = 1.1
    a, b = torch.tensor([1.0, 0.0]), torch.tensor([math.cos(angle), math.sin(angle)])
    merged = merging.slerp([a, b], torch.tensor([0.75, 0.25], dtype=torch.float64))
    torch.testing.assert_close(merged, torch.tensor([math.cos(angle / 4), math.sin(angle / 4)]))


@pytest.mark.parametrize("count", [2, 3, 6])
def test_slerp_of_unit_vectors_stays_on_the_sphere(count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    units = [torch.nn.functional.normalize(torch.randn(9, generator=generator), dim=0) for _ in range(count)]
    weights = torch.rand(count, generator=generator, dtype=torch.float64)
    merged = merging.slerp(units, weights / weights.sum())
    assert abs(float(merged.norm()) - 1) < 1e-6


def test_slerp_of_neighbors_is_close_to_the_weighted_mean() -> None:
    parts = thetas(3, spread=1e-4)
    weights = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    close = merging.weighted(parts, weights)
    torch.testing.assert_close(merging.slerp(parts, weights), close, rtol=1e-5, atol=1e-6)


def test_slerp_of_zero_vectors_is_zero() -> None:
    zero = torch.zeros(3)
    assert torch.equal(merging.slerp([zero, zero], torch.tensor([0.5, 0.5])), zero)


def test_slerp_of_opposite_vectors_is_finite() -> None:
    a = torch.tensor([1.0, 2.0, -0.5])
    assert merging.slerp([a, -a], torch.tensor([0.5, 0.5])).isfinite().all()


def released_by_hand(networks: list[list[Tensor]], weights: list[float]) -> list[Tensor]:
    """One angle from the mean cosine of the layers; the i-th network comes in with its own weight."""
    merged = networks[0]
    for network, c in zip(networks[1:], weights[1:], strict=True):
        cosine = sum(
            float(a.flatten() @ b.flatten() / a.norm() / b.norm()) for a, b in zip(merged, network, strict=True)
        )
        angle = math.acos(cosine / len(merged))
        old, new = math.sin((1 - c) * angle) / math.sin(angle), math.sin(c * angle) / math.sin(angle)
        merged = [old * a + new * b for a, b in zip(merged, network, strict=True)]
    return merged


@pytest.mark.parametrize("count", [2, 3, 6])
def test_the_released_slerp_by_hand(count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    networks = [
        [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((4,), (3, 5), (2, 2, 2))]
        for _ in range(count)
    ]
    weights = torch.rand(count, generator=generator, dtype=torch.float64)
    weights = weights / weights.sum()
    ours = merging.slerp_released(networks, weights)
    for a, b in zip(ours, released_by_hand(networks, weights.tolist()), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_the_two_slerps_agree_for_two_networks_of_one_layer_and_not_for_more() -> None:
    parts = thetas(3)
    two = torch.tensor([0.7, 0.3], dtype=torch.float64)
    torch.testing.assert_close(merging.slerp_released([[p] for p in parts[:2]], two)[0], merging.slerp(parts[:2], two))
    three = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    released, ours = merging.slerp_released([[p] for p in parts], three)[0], merging.slerp(parts, three)
    assert not torch.allclose(released, ours, atol=1e-2)


def test_merging_leaves_its_arguments_alone() -> None:
    parts = thetas(3)
    copies = [p.clone() for p in parts]
    weights = torch.tensor([0.5, 0.3, 0.2])
    merging.mean(parts)
    merging.weighted(parts, weights)
    merging.slerp(parts, weights)
    assert all(map(torch.equal, parts, copies))
