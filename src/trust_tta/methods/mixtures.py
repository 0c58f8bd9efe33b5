"""Several domains at once: images of a mixed stream told apart, so that each kind has statistics of its own.

Descriptions of one domain's images (`domains.py`) vary by about the same amount whatever the domain: 0.04 to 0.17 per
feature for photographs, paintings and drawings, clean or corrupted. Where they vary by more, several domains come
together, and k-means on the descriptions finds them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trust_tta.methods.state import Array, Spec, clone

GROUPS = 6
MIXED = 0.25  # mean variance of the descriptions above which they are of several domains
QUEUE = 128  # descriptions that are kept, to begin with
HALF_LIFE = 2560.0  # images after which half of a group's center is new
LEAST_SPREAD = 0.01
FAR = 0.9  # a new center is as far from the others as this quantile of the images: farther ones are outliers


class Mixture(nn.Module):
    """The groups of a mixed stream.

    `queue` (128, features): the last descriptions, `seen` () of them so far. `centers` (groups, features) and what they
    stand for, `weight` (groups,) images, none while the stream is of one domain; `spread` (features,): the variance
    within groups. `active`: whether there are groups.
    """

    MEMORY = ("queue", "centers", "weight", "spread", "seen")
    queue: Tensor
    centers: Tensor
    weight: Tensor
    spread: Tensor
    seen: Tensor

    def __init__(self, features: int, like: Tensor) -> None:
        super().__init__()
        shapes = ((QUEUE, features), (GROUPS, features), (GROUPS,), (features,), ())
        for name, shape in zip(self.MEMORY, shapes, strict=True):
            self.register_buffer(name, like.new_zeros(shape), persistent=False)
        self.active = False

    @torch.no_grad()
    def restore_source(self) -> None:
        for name in self.MEMORY:
            getattr(self, name).zero_()
        self.active = False

    @torch.no_grad()
    def observe(self, descriptions: Tensor, variance: Tensor) -> Tensor | None:
        """The group (n,) of each description (n, features); None while their `variance` () is that of one domain."""
        self.queue.copy_(torch.cat([self.queue, descriptions])[-QUEUE:])
        self.seen.add_(len(descriptions))
        began, self.active = self.active, bool(variance > MIXED)
        if not self.active:
            self.weight.zero_()
            return None
        if not began:
            self._begin(self.queue[-min(QUEUE, int(self.seen)) :])
        else:
            self.weight.mul_(2 ** (-len(descriptions) / HALF_LIFE))
            self._move(descriptions)
        return self.nearest(descriptions)

    def nearest(self, descriptions: Tensor) -> Tensor:
        """(n, features) -> (n,)."""
        away = (descriptions[:, None] - self.centers).square() / self.spread.clamp_min(LEAST_SPREAD)
        return away.sum(2).argmin(1)

    def _begin(self, descriptions: Tensor) -> None:
        """Centers far from each other, then k-means."""
        self.spread.copy_(descriptions.var(0, correction=0))
        scale = self.spread.clamp_min(LEAST_SPREAD).sqrt()
        points = descriptions / scale
        chosen = [points[(points - points.mean(0)).square().sum(1).argmin()]]
        for _ in range(GROUPS - 1):
            away = torch.stack([(points - center).square().sum(1) for center in chosen]).amin(0)
            chosen.append(points[away.argsort()[int(FAR * (len(points) - 1))]])
        self.centers.copy_(torch.stack(chosen) * scale)
        for _ in range(10):
            self.weight.zero_()
            self._move(descriptions)

    def _move(self, descriptions: Tensor) -> None:
        """One step of k-means, in which the centers so far count for their weight."""
        near = self.nearest(descriptions)
        members = F.one_hot(near, GROUPS).to(descriptions)
        weight, before = self.weight + members.sum(0), self.weight.sum()
        sums = self.centers * self.weight[:, None] + members.T @ descriptions
        self.centers.copy_(torch.where(weight[:, None] > 0, sums / weight.clamp_min(1e-6)[:, None], self.centers))
        within = (descriptions - self.centers[near]).square().mean(0)
        self.spread.lerp_(within, len(descriptions) / (before + len(descriptions)))
        self.weight.copy_(weight)

    def state(self) -> dict[str, Tensor]:
        state: dict[str, Tensor] = clone({name: getattr(self, name) for name in self.MEMORY})
        return state

    def spec(self) -> dict[str, Spec]:
        values = {name: getattr(self, name) for name in self.MEMORY}
        return {n: Array.like(v) if n in ("queue", "centers") else Array.like(v, least=0) for n, v in values.items()}

    def load(self, state: dict[str, Tensor]) -> None:
        for name in self.MEMORY:
            getattr(self, name).copy_(state[name])
        self.active = bool(self.weight.sum() > 0)
