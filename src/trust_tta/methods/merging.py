"""Merging adapted weights: pure functions from K snapshots (lists of tensors) to one.

Means move by differences, from the first snapshot on: equal weights then stay as they are, to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trust_tta.methods.state import clone

Snapshot = Sequence[Tensor]


def mean(snapshots: Sequence[Snapshot]) -> list[Tensor]:
    """The plain mean: the paper's merge."""
    first, *rest = [list(snapshot) for snapshot in snapshots]
    mean: list[Tensor] = clone(first)
    for count, snapshot in enumerate(rest, start=2):  # the elementwise kernels take all weights at once
        torch._foreach_lerp_(mean, snapshot, 1 / count)
    return mean


def weighted(snapshots: Sequence[Snapshot], weights: Tensor) -> list[Tensor]:
    """The mean with weights (K,) that sum to one."""
    return [
        first + torch.tensordot(weights.to(first), torch.stack((first, *rest)) - first, 1)
        for first, *rest in zip(*snapshots, strict=True)
    ]


def slerp(snapshots: Sequence[Snapshot], weights: Tensor) -> list[Tensor]:
    """Spherical interpolation, taken in one snapshot after the other by its share of the weight so far."""
    merged, total = list(snapshots[0]), weights[0]
    for snapshot, weight in zip(snapshots[1:], weights[1:], strict=True):
        total = total + weight
        merged = [_slerp(a, b, weight / total) for a, b in zip(merged, snapshot, strict=True)]
    return merged


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
