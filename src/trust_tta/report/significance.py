"""Whether two lines differ beyond chance: over seeds, over images, and at equal cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from trust_tta.report.model import Cost, Group, Variant
from trust_tta.results import Aggregate, discordant, format_percent
from trust_tta.results.select import aggregate

LEVEL = 0.05  # below this probability a difference over images counts as real
FEWEST = 6  # images ahead: with fewer, no test over images is significant, however the seeds agree
SAME_COST = 0.02  # numbers of updates, or times, within two percent count as equal

T = TypeVar("T")


@dataclass(frozen=True)
class ImageTest:
    """McNemar's exact test on the images of shared streams: how many only one of two lines has right.

    Counts are means over seeds, since seeds may show the same images again: more seeds do not make it surer.
    """

    first_only: int
    second_only: int
    p: float


@dataclass(frozen=True)
class Difference:
    """How far the mean of one line is above that of another, and the evidence for it."""

    first: Variant
    second: Variant
    gain: float
    seeds: Aggregate  # of the differences of shared seeds
    ahead: float  # images by which the first is ahead, per seed
    images: ImageTest | None

    @property
    def level(self) -> bool:
        """Whether the two are the same as shown."""
        return format_percent(self.gain) in ("0.0", "-0.0")

    @property
    def told(self) -> bool | None:
        """Whether the two differ beyond chance: by images if they were kept, else by seeds; None: unknown."""
        if self.images is not None:
            return self.images.p < LEVEL
        mean, half = self.seeds.mean, self.seeds.half_width
        return None if mean is None or half is None else abs(mean) > half and abs(self.ahead) >= FEWEST - 0.5

    @property
    def tie(self) -> bool:
        return self.level or self.told is False


@dataclass(frozen=True)
class Duel:
    """A line of TRUST and the best other line at equal cost."""

    trust: Cost
    other: Cost
    difference: Difference


def difference(group: Group, first: Variant, second: Variant) -> Difference:
    """Two complete lines of a group; `gain` is the first's mean less the second's, over the seeds that both have."""
    reached = group.means()
    seeds = paired(seed_means(group, first.label), seed_means(group, second.label))
    gain = reached[first.label] - reached[second.label] if seeds.mean is None else seeds.mean
    cells = group.cells_of(first.label)
    ahead = gain * sum(cell.result.samples for cell in cells) / len({cell.key.seed for cell in cells})
    return Difference(first, second, gain, seeds, ahead, _over_images(group, first, second))


def ranking(group: Group) -> list[Variant]:
    """The complete lines, the best first."""
    reached = group.means()
    return sorted((v for v in group.variants if v.label in reached), key=lambda v: -reached[v.label])


def leaders(group: Group) -> list[Variant]:
    """The line with the highest mean, then those that do not differ from it beyond chance."""
    best, *others = ranking(group)
    return [best, *(other for other in others if difference(group, best, other).tie)]


def paired(first: Mapping[int, float], second: Mapping[int, float]) -> Aggregate:
    """Values by seed: `first` less `second` over the seeds that both have."""
    return aggregate([first[seed] - second[seed] for seed in sorted(first.keys() & second.keys())])


def seed_means(group: Group, label: str, value: str = "accuracy") -> dict[int, float]:
    """The mean over domains of each seed that has them all."""
    found = [domain_seeds(group, label, domain, value) for domain in group.domains]
    shared = sorted(set.intersection(*map(set, found)))
    return {seed: math.fsum(numbers[seed] for numbers in found) / len(found) for seed in shared}


def domain_seeds(group: Group, label: str, domain: str, value: str = "accuracy") -> dict[int, float]:
    """A value on one domain by seed."""
    found = {cell.key.seed: getattr(cell.result, value) for cell in group.at.get((label, domain), [])}
    return {seed: number for seed, number in found.items() if number is not None and math.isfinite(number)}


def mcnemar(first_only: int, second_only: int) -> float:
    """The exact two-sided probability of so uneven a split if both outcomes were equally likely."""
    from scipy import special

    n = first_only + second_only
    return min(1.0, 2 * float(special.bdtr(min(first_only, second_only), n, 0.5))) if n else 1.0


def equal_updates(group: Group) -> list[Duel]:
    """At each number of updates that both sides have, the best of TRUST and the best of the others, by updates."""
    duels: dict[float, Duel] = {}
    ours = [c for c in group.costs if _is_trust(c) and c.updates > 0]
    for trust in sorted(ours, key=lambda c: (c.updates, -c.accuracy)):
        near = [c for c in group.costs if not _is_trust(c) and abs(c.updates / trust.updates - 1) <= SAME_COST]
        if near:
            duels.setdefault(round(trust.updates, 2), _duel(group, trust, near))
    return list(duels.values())


def equal_time(group: Group) -> list[Duel]:
    """Each line of TRUST that no faster line of TRUST matches, and the best other that takes no more time."""
    timed = [(c, c.milliseconds) for c in group.costs if c.milliseconds is not None]
    ours = pareto_front([(c, ms) for c, ms in timed if _is_trust(c)], key=lambda pair: (pair[1], pair[0].accuracy))
    duels = []
    for trust, limit in ours:
        within = [c for c, ms in timed if not _is_trust(c) and ms <= limit * (1 + SAME_COST)]
        if within:
            duels.append(_duel(group, trust, within))
    return duels


def pareto_front(items: Iterable[T], key: Callable[[T], tuple[float, float]]) -> list[T]:
    """The items that no other beats in both cost and value, by cost; `key` gives the two."""
    best: list[T] = []
    for item in sorted(items, key=lambda i: (key(i)[0], -key(i)[1])):
        if not best or key(item)[1] > key(best[-1])[1]:
            best.append(item)
    return best


def _duel(group: Group, trust: Cost, others: Sequence[Cost]) -> Duel:
    other = max(others, key=lambda c: c.accuracy)
    return Duel(trust, other, difference(group, trust.variant, other.variant))


def _is_trust(cost: Cost) -> bool:
    return cost.variant.method == "trust"


def _over_images(group: Group, first: Variant, second: Variant) -> ImageTest | None:
    """The test over every stream of the group, where all of them kept which images were right."""
    ours, theirs = ({(c.key.domain, c.key.seed): c for c in group.cells_of(v.label)} for v in (first, second))
    shared = [stream for stream in ours if stream in theirs]
    counts = [discordant(ours[stream], theirs[stream]) for stream in shared]
    found = [count for count in counts if count is not None]
    domains, seeds = {domain for domain, _ in shared}, {seed for _, seed in shared}
    if not found or len(found) < len(counts) or len(domains) < len(group.domains):
        return None
    first_only, second_only = (round(sum(count[k] for count in found) / len(seeds)) for k in (0, 1))
    return ImageTest(first_only, second_only, mcnemar(first_only, second_only))
