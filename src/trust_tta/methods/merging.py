"""Merging adapted weights: pure functions from K tensors of one shape to one.

Means move by differences, from the first tensor on: equal weights then stay as they are, to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def mean(thetas: Sequence[Tensor], counted: Tensor | None = None) -> Tensor:
    """The plain mean: the paper's merge.

    `counted` (K,) bool: which tensors count; the first does where none is true. No host synchronization.
    """
    first, *rest = thetas
    counted = torch.ones(len(thetas), device=first.device) if counted is None else counted
    shares = counted.to(first.dtype) / counted.cumsum(0).clamp_min(1)
    mean = first.clone()
    for theta, share in zip(rest, shares[1:], strict=True):
        mean.lerp_(theta, share)
    return mean


def weighted(thetas: Sequence[Tensor], weights: Tensor) -> Tensor:
    """The mean with weights (K,) that sum to one."""
    first = thetas[0]
    moved: Tensor = torch.tensordot(weights.to(first), torch.stack(list(thetas)) - first, 1)
    return first + moved


def slerp(thetas: Sequence[Tensor], weights: Tensor) -> Tensor:
    """Spherical interpolation, taken in one tensor after the other by its share of the weight so far."""
    merged, total = thetas[0], weights[0]
    for theta, weight in zip(thetas[1:], weights[1:], strict=True):
        total = total + weight
        merged = _slerp(merged, theta, weight / total)
    return merged


def slerp_released(thetas: Sequence[Sequence[Tensor]], weights: Tensor) -> list[Tensor]:
    """As the authors' code merges K lists of layers: one angle for all of them, from the mean of their cosines, and
    each next network taken in by its weight itself, whatever the number before it."""
    merged = [layer.double() for layer in thetas[0]]
    for theta, weight in zip(thetas[1:], weights[1:].tolist(), strict=True):
        layers = [layer.double() for layer in theta]
        cosines = [(a * b).sum() / (a.norm() * b.norm() + 1e-8) for a, b in zip(merged, layers, strict=True)]
        angle = torch.stack(cosines).mean().clamp(-1, 1).arccos()
        flat = float(angle) < 1e-6
        old, new = ((x if flat else torch.sin(x * angle) / torch.sin(angle)) for x in (1 - weight, weight))
        merged = [old * a + new * b for a, b in zip(merged, layers, strict=True)]
    return [layer.to(like) for layer, like in zip(merged, thetas[0], strict=True)]


def inverse_entropy_weights(entropies: Tensor) -> Tensor:
    """Weights (K,) proportional to 1 / entropy (K,): confident orders count more."""
    inverse = 1 / entropies.double().clamp_min(1e-6)
    return inverse / inverse.sum()


def _slerp(a: Tensor, b: Tensor, t: Tensor) -> Tensor:
    x, y = a.double().flatten(), b.double().flatten()
    norms = x.norm() * y.norm()
    angle = torch.arccos((x @ y / norms.clamp_min(1e-30)).clamp(-1, 1))
    if float(angle) < 1e-6 or float(norms) == 0:  # parallel: the sphere is flat here
        return torch.lerp(a.double(), b.double(), t.to(a.device)).to(a)
    t = t.to(angle)
    return ((torch.sin((1 - t) * angle) * x + torch.sin(t * angle) * y) / torch.sin(angle)).view_as(a).to(a)
