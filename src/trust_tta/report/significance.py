"""Statistical significance of differences between methods, and comparisons at equal cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from trust_tta.report.model import Aggregate, ResultGroup, Variant, aggregate
from trust_tta.results import discordant, format_percent

ALPHA = 0.05  # significance level of the test over images
MIN_IMAGES = 6  # difference in images; below it McNemar's test is never significant

T = TypeVar("T")


@dataclass(frozen=True)
class ImageTest:
    """McNemar's exact test on the images that only one of two variants classifies correctly.

    Counts are averaged over seeds, because seeds may repeat the same images.
    """

    first_only: int
    second_only: int
    p: float


@dataclass(frozen=True)
class Difference:
    """The difference between the means of two variants, and its significance."""

    first: Variant
    second: Variant
    gain: float
    seeds: Aggregate  # of the differences by seed
    images: ImageTest | None
    significant: bool | None  # by the test over images if they were kept, else by the interval over seeds

    @property
    def equal_as_shown(self) -> bool:
        """Whether the gain rounds to zero."""
        return format_percent(self.gain) in ("0.0", "-0.0")

    @property
    def tie(self) -> bool:
        return self.equal_as_shown or self.significant is False


def difference(group: ResultGroup, first: Variant, second: Variant) -> Difference:
    """The mean of `first` minus that of `second`, over their shared seeds; both have finished all domains."""
    reached = group.means()
    seeds = paired(group.seed_means(first.label), group.seed_means(second.label))
    gain = reached[first.label] - reached[second.label] if seeds.mean is None else seeds.mean
    cells, tested, significant = group.cells_of(first.label), _test_images(group, first, second), None
    if tested is not None:
        significant = tested.p < ALPHA
    elif seeds.mean is not None and seeds.half_width is not None:
        images = gain * sum(cell.result.samples for cell in cells) / len({cell.key.seed for cell in cells})
        significant = abs(seeds.mean) > seeds.half_width and abs(images) >= MIN_IMAGES - 0.5
    return Difference(first, second, gain, seeds, tested, significant)


def ranking(group: ResultGroup) -> list[Variant]:
    """The variants that have finished all domains, best first."""
    reached = group.means()
    return sorted((v for v in group.variants if v.label in reached), key=lambda v: -reached[v.label])


def leaders(group: ResultGroup) -> list[Variant]:
    """The variant with the highest mean, then those that do not differ from it significantly."""
    best, *others = ranking(group)
    return [best, *(other for other in others if difference(group, best, other).tie)]


def paired(first: Mapping[int, float], second: Mapping[int, float]) -> Aggregate:
    """`first` minus `second` over their shared seeds."""
    return aggregate([first[seed] - second[seed] for seed in sorted(first.keys() & second.keys())])


def mcnemar(first_only: int, second_only: int) -> float:
    """The exact two-sided p-value of McNemar's test."""
    from scipy import special

    n = first_only + second_only
    return min(1.0, 2 * float(special.bdtr(min(first_only, second_only), n, 0.5))) if n else 1.0


def pareto_front(items: Iterable[T], key: Callable[[T], tuple[float, float]]) -> list[T]:
    """The items that no other beats in both cost and value, by cost; `key` returns (cost, value)."""
    best: list[T] = []
    for item in sorted(items, key=lambda i: (key(i)[0], -key(i)[1])):
        if not best or key(item)[1] > key(best[-1])[1]:
            best.append(item)
    return best


def _test_images(group: ResultGroup, first: Variant, second: Variant) -> ImageTest | None:
    """McNemar's test over all streams of the group, or None if correctness per image was not stored."""
    ours, theirs = ({(c.key.domain, c.key.seed): c for c in group.cells_of(v.label)} for v in (first, second))
    shared = [stream for stream in ours if stream in theirs]
    counts = [discordant(ours[stream], theirs[stream]) for stream in shared]
    found = [count for count in counts if count is not None]
    domains, seeds = {domain for domain, _ in shared}, {seed for _, seed in shared}
    if not found or len(found) < len(counts) or len(domains) < len(group.domains):
        return None
    first_only, second_only = (round(sum(count[k] for count in found) / len(seeds)) for k in (0, 1))
    return ImageTest(first_only, second_only, mcnemar(first_only, second_only))
