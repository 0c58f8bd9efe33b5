"""Domain clusters: k-means on image descriptions, so that each domain of a mixed stream has its own statistics.

The descriptions (`shift_detector.py`) of one domain's images have about the same variance in every domain. Where they
vary more, the stream mixes several domains, and k-means separates them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from trust_tta.methods.state import StateModule
from trust_tta.methods.tide.constants import TIDE
from trust_tta.methods.tide.shift_detector import FEATURES

_QUEUE = int(TIDE.unit)  # descriptions that k-means starts from


class DomainClusters(StateModule):
    """Cluster centers of a mixed stream.

    `queue` (128, features): the last descriptions, `seen` () of them so far. `centers` (clusters, features) and their
    `weight` (clusters,) in images; all zero while the stream has one domain. `active`: whether there are clusters.
    """

    STATE = ("queue", "centers", "weight", "seen")
    LIMITS = {"queue": {}, "centers": {}}  # noqa: RUF012
    queue: Tensor
    centers: Tensor
    weight: Tensor
    seen: Tensor

    def __init__(self, like: Tensor) -> None:
        super().__init__()
        shapes = ((_QUEUE, FEATURES), (TIDE.clusters, FEATURES), (TIDE.clusters,), ())
        for name, shape in zip(self.STATE, shapes, strict=True):
            self.register_buffer(name, like.new_zeros(shape), persistent=False)
        self.active = False

    @torch.no_grad()
    def restore_source(self) -> None:
        for name in self.STATE:
            getattr(self, name).zero_()
        self.active = False

    @torch.no_grad()
    def enqueue(self, descriptions: Tensor, variance: Tensor) -> Tensor:
        """Queue descriptions (n, features); returns whether their `variance` () is that of several domains, ()."""
        self.queue.copy_(torch.cat([self.queue, descriptions])[-_QUEUE:])
        self.seen.add_(len(descriptions))
        mixed = variance > TIDE.mixed_variance
        self.weight.mul_(mixed)
        return mixed

    @torch.no_grad()
    def assign(self, descriptions: Tensor, *, mixed: bool) -> Tensor | None:
        """Cluster (n,) of each description (n, features) that was queued last; None where they are not `mixed`."""
        began, self.active = self.active, mixed
        if not mixed:
            return None
        if not began:
            self._start(self.queue[-min(_QUEUE, int(self.seen)) :])
        else:
            self.weight.mul_(2 ** (-len(descriptions) / TIDE.stream_memory))
            self._step(descriptions)
        return self.nearest(descriptions)

    def nearest(self, descriptions: Tensor) -> Tensor:
        """Index (n,) of the nearest center of each description (n, features)."""
        return (descriptions[:, None] - self.centers).square().sum(2).argmin(1)

    def _start(self, descriptions: Tensor) -> None:
        """k-means on descriptions (n, features), from the middles of 8 equal parts along the principal component."""
        centered = descriptions - descriptions.mean(0)
        component = torch.linalg.eigh(centered.T @ centered).eigenvectors[:, -1]
        order = (centered @ component).argsort()
        middles = (2 * torch.arange(TIDE.clusters, device=order.device) + 1) * len(order) // (2 * TIDE.clusters)
        self.centers.copy_(descriptions[order[middles]])
        for _ in range(10):
            self.weight.zero_()
            self._step(descriptions)

    def _step(self, descriptions: Tensor) -> None:
        """One step of k-means in which each center also counts as `weight` images."""
        members = F.one_hot(self.nearest(descriptions), TIDE.clusters).to(descriptions)
        weight = self.weight + members.sum(0)
        sums = self.centers * self.weight[:, None] + members.T @ descriptions
        self.centers.copy_(torch.where(weight[:, None] > 0, sums / weight.clamp_min(1e-6)[:, None], self.centers))
        self.weight.copy_(weight)

    def load(self, state: dict[str, Tensor]) -> None:
        super().load(state)
        self.active = bool(self.weight.sum() > 0)
