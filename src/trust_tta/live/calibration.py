"""Calibration of the alarms on clean batches: limits with "one false alarm in N batches like these"."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trust_tta.errors import ConfigError
from trust_tta.live.alarms import Limits, Reference, Tail
from trust_tta.live.monitors import (
    CLASS_WINDOW,
    INPUT_WINDOW,
    NormReference,
    StatisticsComparison,
    input_distance,
    input_distances,
)
from trust_tta.live.source_reference import SourceReference, balanced
from trust_tta.methods.base import Method

Values: TypeAlias = NDArray[np.float64]

MIN_BATCHES = 4
MIN_FOR_BOOTSTRAP = 16  # batches or parts; with fewer, resampling does not reach the tail that is asked for
BLOCKS, MIN_PARTS = 64, 4  # parts of batches to draw from, and of each batch, where there are too few batches
RUNS, RUN_LENGTH = 200, 256  # simulated streams and their batches
ALARM_KINDS = 3  # which share the budget of false alarms


def calibrate(
    method: Method, batches: Iterable[Tensor], *, expected_batches_between_false_alarms: float = 1000, seed: int = 0
) -> Reference:
    """Learn from clean batches what the stream should look like, and limits that it rarely exceeds by chance.

    A copy of `method` adapts on them as the stream will. Half of the batches give the reference and a canary, the other
    half the limits: streams are drawn from them with replacement, and a limit is what their largest value stays
    below as often as it takes for one false alarm in so many batches, of all kinds together. Where that is rarer than
    the drawn streams can show, a Gumbel distribution is fitted to their largest values. Where there are too few batches
    to draw from, parts of them are drawn (a block bootstrap); with fewer than 16 of these, Student's t is fitted to the
    cube roots of their values.
    """
    every = expected_batches_between_false_alarms
    if not (isinstance(every, (int, float)) and 2 <= every < math.inf):
        raise ConfigError(f"expected_batches_between_false_alarms is {every!r}; give a number of at least 2")
    twin = method.fork()
    twin.reset()
    source_reference = SourceReference(twin)
    seen = [_Batch.of(images, twin, source_reference) for images in batches]
    if len(seen) < MIN_BATCHES:
        raise ConfigError(f"{len(seen)} batches are no reference; give at least {MIN_BATCHES} of clean images")
    first, second = seen[::2], seen[1::2]
    images = sum(b.size for b in first)
    inputs = sum((b.inputs * b.size for b in first), torch.zeros(())) / images
    source = torch.cat([b.source for b in first])
    canary = balanced(torch.cat([b.images for b in first]), source)
    limits = _limits(second, inputs, source.double().mean(0).cpu(), source_reference, every=float(every), seed=seed)
    return Reference(inputs, source.double().mean(0).cpu(), canary, limits, _depths(first, second))


@dataclass(frozen=True)
class _Batch:
    images: Tensor
    inputs: Tensor  # (2, c)
    source: Tensor  # (n, classes)
    agreement: Values  # (n, 2): the source's confidence, and the same where both agree, else 0
    comparison: StatisticsComparison | None

    @property
    def size(self) -> int:
        return len(self.images)

    @classmethod
    def of(cls, images: Tensor, method: Method, reference: SourceReference) -> _Batch:
        statistics = torch.from_numpy(reference.input_statistics(images))
        served, source = reference.compare(images, method(images))
        weights = source.amax(1)
        agreement = torch.stack([weights, weights * (served.argmax(1) == source.argmax(1))], 1).double().cpu().numpy()
        return cls(images, statistics, source, agreement, reference.compare_statistics(images, source))


def _depths(first: list[_Batch], second: list[_Batch]) -> NormReference | None:
    """The reference of both depths from the first half of the batches, the units from the second."""
    known, others = ([b.comparison.depths for b in half if b.comparison] for half in (first, second))
    if not known or not known[0]:
        return None
    middle, last = (np.mean([d[i] for d in known], 0) for i in range(2))
    near, far = (
        max(1e-12, float(np.mean([input_distance(d[i], reference) for d in others])))
        for i, reference in enumerate((middle, last))
    )
    return NormReference(torch.from_numpy(middle), torch.from_numpy(last), (near, far))


def _limits(
    batches: list[_Batch], inputs: Tensor, classes: Tensor, source: SourceReference, *, every: float, seed: int
) -> Limits:
    size = max(1, round(sum(b.size for b in batches) / len(batches)))
    parts_of_a_batch = min(size, max(MIN_PARTS, -(-BLOCKS // len(batches))))

    def limit(
        values: Callable[[_Batch, int], list[Values]], statistic: Callable[[Values], Values], images: int
    ) -> tuple[float, Tail]:
        """The limit of a statistic over the last `images`; `values`: its vectors for each of the parts of a batch."""
        parts, window = 1, -(-images // size)
        if _too_few(len(batches), window, every * ALARM_KINDS):
            parts, window = parts_of_a_batch, -(-images * parts_of_a_batch // size)
        vectors = np.stack([vector for batch in batches for vector in values(batch, parts)])
        return limit_for(vectors, statistic, window=window, every=every * ALARM_KINDS * parts, seed=seed)

    def input_values(batch: _Batch, parts: int) -> list[Values]:
        images = batch.images.tensor_split(parts)
        return [batch.inputs.flatten().numpy()] if parts == 1 else [source.input_statistics(i).ravel() for i in images]

    found = [
        limit(
            input_values,
            lambda means: input_distances(means.reshape(-1, *inputs.shape), inputs.numpy()),
            INPUT_WINDOW,
        ),
        limit(
            lambda batch, parts: [p.double().mean(0).cpu().numpy() for p in batch.source.tensor_split(parts)],
            lambda means: np.abs(means - classes.numpy()).sum(1) / 2,
            CLASS_WINDOW,
        ),
        limit(
            lambda batch, parts: [p.sum(0) for p in np.array_split(batch.agreement, parts)],
            lambda sums: 1 - sums[:, 1] / sums[:, 0],
            CLASS_WINDOW,
        ),
    ]
    (drift, drift_tail), (shift, shift_tail), (disagreement, _) = found
    # Three images of a window may differ even if no reference image did.
    disagreement = max(disagreement, 3 / CLASS_WINDOW)
    return Limits(
        drift=max(drift, 1e-6),
        class_shift=min(shift, 1.0),
        disagreement=min(disagreement, 1.0),
        tails=(drift_tail, shift_tail),
        every=every,
        batches=len(batches),
    )


def limit_for(
    values: Values, statistic: Callable[[Values], Values], *, window: int, every: float, seed: int = 0
) -> tuple[float, Tail]:
    """The value that `statistic` of the mean of `window` batches exceeds once in `every` batches, and how it was found.

    values: (batches, d), one vector per reference batch; `statistic` takes means (m, d) and gives numbers (m,).
    """
    generator = np.random.default_rng(seed)
    maxima, series = [], []
    for _ in range(RUNS):
        drawn = values[generator.integers(len(values), size=RUN_LENGTH + window - 1)]
        sums = np.cumsum(np.concatenate([np.zeros_like(drawn[:1]), drawn]), axis=0)
        numbers = statistic((sums[window:] - sums[:-window]) / window)
        maxima.append(float(numbers.max()))
        series.append(numbers[:: max(1, window)])
    if _too_few(len(values), window, every):
        from scipy.stats import t

        roots = np.cbrt(np.concatenate(series))  # nearly normal, unlike distances and rates, which are skewed
        spread = float(roots.std()) * math.sqrt(1 + 1 / len(values))
        return float((roots.mean() + t.isf(1 / every, df=len(values) - 1) * spread) ** 3), "student"
    stays = math.exp(-RUN_LENGTH / every)  # the chance that a whole run passes without a false alarm
    if (1 - stays) * RUNS >= 5:
        return float(np.quantile(maxima, stays)), "bootstrap"
    scale = float(np.std(maxima)) * math.sqrt(6) / math.pi
    return float(np.mean(maxima)) - scale * (np.euler_gamma + math.log(-math.log(stays))), "gumbel"


def _too_few(vectors: int, window: int, every: float) -> bool:
    """Whether resampling cannot show what is rarer than the number of different windows it can draw."""
    return vectors < MIN_FOR_BOOTSTRAP or window * math.log(vectors) < math.log(100 * every)
