"""Robust averaging of the adapted weights and statistics of replicas in the same domain.

The change of a replica is the difference of its weights from the last merge. Among replicas of one domain, changes far
from the median are left out, and a trimmed mean of the others is applied; the statistics of their norms become those of
all images together. A merge is a function of updates: no cluster is needed here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from pydantic import Field
from torch import Tensor

from trust_tta.live.stream_statistics import input_distance
from trust_tta.schema import Count, Fraction, Positive, Schema

MIN_TO_JUDGE = 3  # updates: with fewer, none can be the odd one out
EARLY_MERGES = 4  # first merges, each after twice as many images as the one before
MAX_STEP = 16.0  # times the mean of what replicas learned, however many there are
MAX_EVIDENCE = 2.0  # times the median: no replica counts for more


class AveragingConfig(Schema):
    """Intervals, domains and robustness of merges."""

    every: Count = Field(default=256, description="images that all replicas together see between two merges")
    domain: Positive = Field(
        default=0.2, description="distance of input statistics below which two replicas share a domain"
    )
    trim: Fraction = Field(default=0.125, description="share of the updates trimmed at either end of every weight")
    outlier: Positive = Field(
        default=3.0, description="multiple of the median distance from the median beyond which a replica is left out"
    )
    power: Fraction = Field(
        default=1.0,
        description="0: the mean of what replicas learned, 1: its sum, as if one had learned it all in turn",
    )

    def interval(self, merges: int) -> int:
        """Images of all replicas between one merge and the next: few at first, when weights change most."""
        return max(1, self.every >> max(0, EARLY_MERGES - merges))


@dataclass(frozen=True, eq=False)
class ReplicaState:
    """The averaged part of a replica: weights (n,), means and mean squares (m,) of all norms, and their image count.

    `domain_means` (p,): other statistics of the domain, as means over `domain_images` images; empty if there are none.
    """

    weights: Tensor
    means: Tensor
    squares: Tensor
    remembered: float = 0.0
    domain_means: Tensor = field(default_factory=lambda: torch.zeros(0))
    domain_images: float = 0.0

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self._tensors()) + 16

    def is_finite(self) -> bool:
        return all(bool(t.isfinite().all()) for t in self._tensors())

    def _tensors(self) -> tuple[Tensor, ...]:
        return self.weights, self.means, self.squares, self.domain_means


@dataclass(frozen=True, eq=False)
class ReplicaUpdate:
    """A replica's state, the merge it started from (0: the source), and its evidence.

    `images`: adapted on since that merge. `signature`: their mean and mean square per input channel (2, c).
    `samples_per_image`: how many times each image was counted in the state's means.
    """

    replica: str
    base: int
    images: int
    state: ReplicaState
    signature: Tensor
    samples_per_image: int = 1

    @property
    def bytes(self) -> int:
        return self.state.bytes + self.signature.numel() * self.signature.element_size() + 16


@dataclass(frozen=True, eq=False)
class MergeResult:
    """The merged state of one domain, for its `members`; the changes of those `left_out` differ too much."""

    number: int
    members: tuple[str, ...]
    left_out: tuple[str, ...]
    images: int
    state: ReplicaState


class Merger:
    """Merges rounds of updates, and keeps the last merged states as bases. `source`: the first base."""

    def __init__(self, source: ReplicaState, policy: AveragingConfig | None = None) -> None:
        self.policy = policy or AveragingConfig()
        self.bases: dict[int, ReplicaState] = {0: source}
        self.number = 0

    def merge(self, updates: Sequence[ReplicaUpdate]) -> list[MergeResult]:
        """The merges of a round, one for each domain with several replicas."""
        source = self.bases[0]
        usable = [update for update in updates if update.images > 0 and fits(update.state, source)]
        merges = []
        for group in group_by_domain(usable, limit=self.policy.domain):
            if len(group) > 1:
                self.number += 1
                merges.append(merge_updates(group, self.bases, self.policy, number=self.number))
        self.bases |= {merge.number: merge.state for merge in merges}
        for old in sorted(self.bases)[1 : -2 * max(1, len(merges))]:  # the source stays
            del self.bases[old]
        return merges


def fits(state: ReplicaState, source: ReplicaState) -> bool:
    """Whether a state can be merged with others of the same source."""
    shapes = [(t.shape, t.dtype) for t in (state.weights, state.means, state.squares)]
    return shapes == [(t.shape, t.dtype) for t in (source.weights, source.means, source.squares)] and state.is_finite()


def group_by_domain(updates: Sequence[ReplicaUpdate], *, limit: float) -> list[list[ReplicaUpdate]]:
    """Groups of updates whose signatures are linked by distances below the limit, in the order they came."""
    groups: list[list[ReplicaUpdate]] = []
    for update in updates:
        near = [g for g in groups if any(distance(update.signature, o.signature) < limit for o in g)]
        joined = [o for group in near for o in group] + [update]
        groups = [g for g in groups if not any(g is other for other in near)] + [joined]
    return groups


def distance(a: Tensor, b: Tensor) -> float:
    """The distance of two signatures; infinite where they are not finite or have different shapes."""
    if a.shape != b.shape:
        return math.inf
    found = max(input_distance(a, b), input_distance(b, a))
    return found if math.isfinite(found) else math.inf


def merge_updates(
    updates: Sequence[ReplicaUpdate], bases: Mapping[int, ReplicaState], policy: AveragingConfig, *, number: int
) -> MergeResult:
    """Add a trimmed, weighted mean of the changes to the mean of the bases."""
    start = [bases.get(update.base, update.state) for update in updates]  # from an unknown base, nothing was learned
    learned = torch.stack([o.state.weights - s.weights for o, s in zip(updates, start, strict=True)])
    kept = find_inliers(learned, factor=policy.outlier)
    chosen = [(update, base) for update, base, keep in zip(updates, start, kept, strict=True) if keep]
    evidence = evidence_weights([update.images for update, _ in chosen])
    length = min(len(chosen) ** policy.power, MAX_STEP)
    weights = weighted_mean([base.weights for _, base in chosen], evidence)
    walked = trimmed_mean(learned[torch.tensor(kept)], evidence, trim=policy.trim)
    means, squares, remembered = merge_statistics(chosen, trim=policy.trim)
    domain_means, domain_images = merge_domain_means(chosen, trim=policy.trim)
    return MergeResult(
        number=number,
        members=tuple(update.replica for update, _ in chosen),
        left_out=tuple(update.replica for update, keep in zip(updates, kept, strict=True) if not keep),
        images=sum(update.images for update, _ in chosen),
        state=ReplicaState(weights + length * walked, means, squares, remembered, domain_means, domain_images),
    )


def find_inliers(learned: Tensor, *, factor: float) -> list[bool]:
    """Mask of the rows of (r, n) within `factor` times the median distance from their median."""
    if len(learned) < MIN_TO_JUDGE:
        return [True] * len(learned)
    far = torch.linalg.vector_norm(learned - learned.median(dim=0).values, dim=1)
    limit = factor * far.median().clamp_min(1e-12)
    alike: list[bool] = (far <= limit).tolist()
    return alike


def evidence_weights(images: Iterable[float]) -> Tensor:
    """Weights (r,) of updates, which sum to 1, from their image counts, cut at twice the median."""
    counts = torch.tensor(list(images), dtype=torch.float64)
    counts = counts.clamp(max=float(MAX_EVIDENCE * counts.median()))
    return counts / counts.sum()


def trimmed_mean(rows: Tensor, evidence: Tensor, *, trim: float) -> Tensor:
    """Mean (n,) of rows (r, n), weighted by evidence (r,), without the fraction `trim` at either end of each column."""
    cut = min(int(trim * len(rows)), (len(rows) - 1) // 2)
    if cut == 0:
        return weighted_mean(list(rows), evidence)
    ordered, places = rows.sort(dim=0)
    values, shares = (part[cut : len(rows) - cut] for part in (ordered.double(), evidence[places]))
    return ((values * shares).sum(0) / shares.sum(0)).to(rows.dtype)


def weighted_mean(rows: Sequence[Tensor], evidence: Tensor) -> Tensor:
    """Mean of tensors of one shape, weighted by evidence."""
    total = torch.zeros_like(rows[0], dtype=torch.float64)
    for row, share in zip(rows, evidence.tolist(), strict=True):
        total += share * row
    return total.to(rows[0].dtype)


@dataclass(frozen=True)
class RunningMeanMerge:
    """Merges running means of several replicas into those of one that saw all images.

    A replica's mean is S + c / (M + c) (s - S): S of its base, which now counts for M images, and s of its k images,
    each counted r = samples_per_image times: c = r k. With K images together, the merged mean is S plus the sum of
    (M + c) / r / (N + K) times each change; if r is the number of replicas, this is the mean of the changes. N is the
    decayed count of the base's W images: W (M / W)^(K / c). Means never move farther than those of replicas did: the
    statistics of deep layers depend on those of earlier ones, and do not hold when these move on.
    """

    evidence: Tensor
    length: float
    images: float

    @classmethod
    def of(cls, updates: Sequence[ReplicaUpdate], counts: Sequence[float], base: float) -> RunningMeanMerge:
        """`counts`: the images that each replica's means count for now. `base`: the same of their base."""
        new = torch.tensor([float(update.images) for update in updates], dtype=torch.float64)
        each = torch.tensor([float(update.samples_per_image) for update in updates], dtype=torch.float64)
        counted = new * each
        kept = (torch.tensor(list(counts), dtype=torch.float64) - counted).clamp_min(0)
        memory, total = min(float(kept.median()), base), float(new.sum())
        left = base * (memory / base) ** float(total / counted.mean()) if base > 0 else 0.0
        evidence = (memory + counted) / each
        length = float(evidence.sum()) / (left + total)
        if length > 1:
            left, total, length = memory, float(counted.mean()), 1.0
        return cls(evidence_weights(evidence.tolist()), length, left + total)

    def __call__(self, bases: Sequence[Tensor], own: Sequence[Tensor], *, trim: float) -> Tensor:
        base = weighted_mean(bases, self.evidence)
        moved = torch.stack([value - start for value, start in zip(own, bases, strict=True)])
        return base + self.length * trimmed_mean(moved, self.evidence, trim=trim)


def merge_statistics(
    chosen: Sequence[tuple[ReplicaUpdate, ReplicaState]], *, trim: float
) -> tuple[Tensor, Tensor, float]:
    """Means and mean squares (m,) of one norm over all images, and the images they count for."""
    updates, bases = zip(*chosen, strict=True)
    base_images = float(torch.tensor([base.remembered for base in bases], dtype=torch.float64).median())
    pool = RunningMeanMerge.of(updates, [o.state.remembered for o in updates], base_images)
    means = pool([base.means for base in bases], [o.state.means for o in updates], trim=trim)
    squares = pool([base.squares for base in bases], [o.state.squares for o in updates], trim=trim)
    return means, torch.maximum(squares, means.square()), pool.images


def merge_domain_means(chosen: Sequence[tuple[ReplicaUpdate, ReplicaState]], *, trim: float) -> tuple[Tensor, float]:
    """The same for the domain means of the replicas that have them in the most common size."""
    size = Counter(update.state.domain_means.numel() for update, _ in chosen).most_common(1)[0][0]
    known = [(update, base) for update, base in chosen if update.state.domain_means.numel() == size > 0]
    if not known:
        return torch.zeros(0), 0.0
    updates, bases = zip(*known, strict=True)
    began = [base.domain_means if base.domain_means.numel() == size else torch.zeros(size) for base in bases]
    base_images = float(torch.tensor([base.domain_images for base in bases], dtype=torch.float64).median())
    pool = RunningMeanMerge.of(updates, [o.state.domain_images for o in updates], base_images)
    return pool(began, [o.state.domain_means for o in updates], trim=trim).clamp_min(0), pool.images
