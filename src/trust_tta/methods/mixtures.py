"""Several domains at once: images of a mixed stream told apart, so that each kind has statistics of its own.

Descriptions of one domain's images (`domains.py`) vary by about the same amount whatever the domain: 0.07 to 0.18 per
feature for photographs, paintings and drawings, clean or corrupted. Where they vary by more, several domains come
together, and k-means on the descriptions finds them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from trust_tta.methods.state import StateModule

GROUPS = 8
MIXED = 0.25  # mean variance of the descriptions above which they are of several domains
QUEUE = 128  # descriptions that are kept, to begin with
HALF_LIFE = 2560.0  # images after which half of a group's center is new
# Each new center is as far from those before as this quantile of the images; the best beginning is kept.
STARTS = (0.7, 0.8, 0.9, 0.95)


class Mixture(StateModule):
    """The groups of a mixed stream.

    `queue` (128, features): the last descriptions, `seen` () of them so far. `centers` (groups, features) and how many
    images they stand for, `weight` (groups,): none while the stream is of one domain. `scale` (features,): the
    deviation of the images of one domain. `active`: whether there are groups.
    """

    MEMORY = ("queue", "centers", "weight", "seen")
    LIMITS = {"queue": {}, "centers": {}}  # noqa: RUF012
    queue: Tensor
    centers: Tensor
    weight: Tensor
    seen: Tensor
    scale: Tensor

    def __init__(self, variances: Sequence[float], like: Tensor) -> None:
        super().__init__()
        self.register_buffer("scale", like.new_tensor(variances).sqrt(), persistent=False)
        features = len(variances)
        shapes = ((QUEUE, features), (GROUPS, features), (GROUPS,), ())
        for name, shape in zip(self.MEMORY, shapes, strict=True):
            self.register_buffer(name, like.new_zeros(shape), persistent=False)
        self.active = False

    @torch.no_grad()
    def restore_source(self) -> None:
        for name in self.MEMORY:
            getattr(self, name).zero_()
        self.active = False

    @torch.no_grad()
    def take(self, descriptions: Tensor, variance: Tensor) -> Tensor:
        """Keep descriptions (n, features); whether they are of several domains (), as their `variance` () says."""
        self.queue.copy_(torch.cat([self.queue, descriptions])[-QUEUE:])
        self.seen.add_(len(descriptions))
        mixed = variance > MIXED
        self.weight.mul_(mixed)
        return mixed

    @torch.no_grad()
    def sort(self, descriptions: Tensor, *, mixed: bool) -> Tensor | None:
        """The group (n,) of each description (n, features) that was taken last; None where they are not `mixed`."""
        began, self.active = self.active, mixed
        if not mixed:
            return None
        if not began:
            self._begin(self.queue[-min(QUEUE, int(self.seen)) :])
        else:
            self.weight.mul_(2 ** (-len(descriptions) / HALF_LIFE))
            self._move(descriptions)
        return self.nearest(descriptions)

    def nearest(self, descriptions: Tensor) -> Tensor:
        """(n, features) -> (n,)."""
        return self._distances(descriptions).argmin(1)

    def _distances(self, descriptions: Tensor) -> Tensor:
        return ((descriptions[:, None] - self.centers) / self.scale).square().sum(2)

    def _begin(self, descriptions: Tensor) -> None:
        """The best of several beginnings, each of centers far from each other, then k-means."""
        found = []
        for far in STARTS:
            self.centers.copy_(self._spread_out(descriptions, far))
            for _ in range(10):
                self.weight.zero_()
                self._move(descriptions)
            apart = self._distances(descriptions).amin(1).mean()
            found.append((float(apart), self.centers.clone(), self.weight.clone()))
        _, centers, weight = min(found, key=lambda one: one[0])
        self.centers.copy_(centers)
        self.weight.copy_(weight)

    def _spread_out(self, descriptions: Tensor, far: float) -> Tensor:
        """(groups, features) of the descriptions: a usual one, then one after the other far from those before."""
        points = descriptions / self.scale
        chosen = [(points - points.mean(0)).square().sum(1).argmin()]
        for _ in range(GROUPS - 1):
            away = torch.stack([(points - points[center]).square().sum(1) for center in chosen]).amin(0)
            chosen.append(away.argsort()[int(far * (len(points) - 1))])
        return descriptions[torch.stack(chosen)]

    def _move(self, descriptions: Tensor) -> None:
        """One step of k-means, in which the centers so far count for their weight."""
        members = F.one_hot(self.nearest(descriptions), GROUPS).to(descriptions)
        weight = self.weight + members.sum(0)
        sums = self.centers * self.weight[:, None] + members.T @ descriptions
        self.centers.copy_(torch.where(weight[:, None] > 0, sums / weight.clamp_min(1e-6)[:, None], self.centers))
        self.weight.copy_(weight)

    def load(self, state: dict[str, Tensor]) -> None:
        super().load(state)
        self.active = bool(self.weight.sum() > 0)
