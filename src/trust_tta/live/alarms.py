"""When to call a reading an alarm, and how often that will be wrong: "one false alarm in N batches like the reference".

There are three alarms. Drift: the images changed (the statistics of the input moved). Class shift: the images did not
change, but the source network predicts other classes than before. Collapse: what was learned is wrong (the adapted
network and the source disagree on images where they should not).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trust_tta.errors import ConfigError
from trust_tta.live.judge import Canary, Judge, balanced
from trust_tta.live.monitors import (
    CLASS_WINDOW,
    FEW,
    INPUT_WINDOW,
    Depths,
    Opinion,
    Reading,
    input_distance,
    input_distances,
)
from trust_tta.methods.base import Method
from trust_tta.schema import Count, Fraction, Positive, Schema

Tail: TypeAlias = Literal["bootstrap", "gumbel", "student"]
Kind: TypeAlias = Literal["drift", "class_shift", "few_classes", "collapse"]
Values: TypeAlias = NDArray[np.float64]

FEWEST_BATCHES = 4
FEWEST_FOR_BOOTSTRAP = 16  # batches; with fewer, resampling does not reach the tail that is asked for
RUNS, RUN_LENGTH = 200, 256  # simulated streams and their batches
KINDS = 3  # alarms, which share the budget of false ones
MANY = 0.75  # `trained_classes` above which images are no longer of few classes
LEAD = 0.22  # `trained_lead` above which, without a reference, few classes are believed


class Limits(Schema):
    """The value above which a reading is an alarm. None: never. The defaults are for a stream without a reference.

    `drift`: of `input_distance`, against what BatchNorm kept from training. `class_shift`: of `source_shift`.
    `disagreement`: of 1 - `agreement`, where there is neither drift nor class shift. `tails`: how the limits of drift
    and of class shift were found. `every`: the requested number of batches between two false alarms.
    """

    drift: Positive | None = 0.1
    class_shift: Fraction | None = None
    disagreement: Fraction | None = None
    tails: tuple[Tail, ...] = ()
    every: Positive | None = None
    batches: Count | None = None


@dataclass(frozen=True)
class Reference:
    """What the stream should look like: input statistics (2, c), mean prediction (classes,), trusted images, limits."""

    inputs: Tensor
    classes: Tensor
    canary: Tensor
    limits: Limits
    depths: Depths | None = None

    def state(self) -> dict[str, Any]:
        """As tensors and plain values."""
        limits = self.limits.model_dump()
        state = {"inputs": self.inputs, "classes": self.classes, "canary": self.canary, "limits": limits}
        return state if self.depths is None else {**state, "depths": vars(self.depths)}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Reference:
        depths = Depths(**state["depths"]) if "depths" in state else None
        return cls(state["inputs"], state["classes"], state["canary"], Limits(**state["limits"]), depths)


def find_alarms(
    reading: Reading,
    limits: Limits,
    *,
    agreement: float,
    weight_distance: float,
    drifting: bool = False,
    few: bool = False,
) -> dict[Kind, str]:
    """The alarms of a reading, each with its reason; `drifting`: a drift is going on, whatever this reading says.

    `few`: so far the images were of few classes.

    `agreement` and `weight_distance` are absolute bounds for any images, in addition to the calibrated `limits`.
    """
    alarms: dict[Kind, str] = {}
    drift = drifting or _above(reading.input_distance, limits.drift)
    if of_few_classes(reading, drift=drift, few=few):
        alarms["few_classes"] = "the images are of few classes, which their own statistics hide"
    elif drift:
        alarms["drift"] = "the images differ from the reference"
    elif _above(reading.source_shift, limits.class_shift):
        alarms["class_shift"] = "the images are like the reference; the classes are not"
    reason = _collapse(reading, None if alarms else limits.disagreement, agreement, weight_distance)
    if reason:
        alarms["collapse"] = reason
    return alarms


def of_few_classes(reading: Reading, *, drift: bool, few: bool = False) -> bool:
    """Whether the images are of few classes, which their own statistics hide; `few`: so far they were.

    Noise, too, can make the statistics of training see few classes. A reference tells: where the classes changed, the
    network differs most at its end. Without one, the source must be far surer, and the images no drift.
    """
    if reading.trained_classes is None or reading.trained_classes >= (MANY if few else FEW):
        return False
    if reading.depth_ratio is not None:
        return reading.depth_ratio > 1
    return not drift and _above(reading.trained_lead, LEAD)


def _collapse(reading: Reading, disagreement: float | None, agreement: float, weight_distance: float) -> str:
    if reading.weight_distance > weight_distance:
        return "the weights are too far from the source's"
    if reading.agreement is None or reading.source_classes is None or reading.probed_classes is None:
        return ""
    if reading.probed < CLASS_WINDOW // 4:
        return ""
    if reading.probed >= CLASS_WINDOW and _above(1 - reading.agreement, disagreement):
        return "the source predicts other classes, on images like the reference"
    if reading.probed_classes < reading.source_classes / 2 and reading.agreement < (1 + agreement) / 2:
        return "half of the classes that the source predicts are gone"
    # A source that itself predicts hardly more than one class is no judge.
    if reading.agreement < agreement and reading.source_classes > 2:
        return "the source predicts other classes"
    return ""


def _above(value: float | None, limit: float | None) -> bool:
    return value is not None and limit is not None and value > limit


def calibrate(
    method: Method, batches: Iterable[Tensor], *, expected_batches_between_false_alarms: float = 1000, seed: int = 0
) -> Reference:
    """Learn from clean batches what the stream should look like, and limits that it rarely exceeds by chance.

    A copy of `method` adapts on them as the stream will. Half of the batches give the reference and a canary, the other
    half the limits: streams are drawn from them with replacement, and a limit is what their largest value stays
    below as often as it takes for one false alarm in so many batches, of all kinds together. Where that is rarer than
    the drawn streams can show, a Gumbel distribution is fitted to their largest values; where there are too few batches
    to draw from, Student's t to the cube roots of their values.
    """
    every = expected_batches_between_false_alarms
    if not (isinstance(every, (int, float)) and 2 <= every < math.inf):
        raise ConfigError(f"expected_batches_between_false_alarms is {every!r}; give a number of at least 2")
    twin = method.fork()
    twin.reset()
    judge = Judge(twin)
    seen = [_Batch.look(images, twin, judge) for images in batches]
    if len(seen) < FEWEST_BATCHES:
        raise ConfigError(f"{len(seen)} batches are no reference; give at least {FEWEST_BATCHES} of clean images")
    first, second = seen[::2], seen[1::2]
    images = sum(b.size for b in first)
    inputs = sum((b.inputs * b.size for b in first), torch.zeros(())) / images
    source = torch.cat([b.source for b in first])
    canary = balanced(torch.cat([b.images for b in first]), source)
    limits = _limits(second, inputs, source.double().mean(0).cpu(), every=float(every), seed=seed)
    return Reference(inputs, source.double().mean(0).cpu(), canary, limits, _depths(first, second))


@dataclass(frozen=True)
class _Batch:
    images: Tensor
    inputs: Tensor  # (2, c)
    source: Tensor  # (n, classes)
    agreement: tuple[float, float]  # the source's confidence, and that of it where both agree
    opinion: Opinion | None

    @property
    def size(self) -> int:
        return len(self.images)

    @classmethod
    def look(cls, images: Tensor, method: Method, judge: Judge) -> _Batch:
        statistics = judge.input_statistics(images).double().cpu()
        served, source = judge.compare(images, method(images))
        weights = source.amax(1)
        agreeing = float((weights * (served.argmax(1) == source.argmax(1))).sum())
        opinion = judge.second_opinion(images, source)
        return cls(images, statistics, source, (float(weights.sum()), agreeing), opinion)


def _depths(first: list[_Batch], second: list[_Batch]) -> Depths | None:
    """The reference of both depths from the first half of the batches, the units from the second."""
    known, others = ([b.opinion.depths for b in half if b.opinion] for half in (first, second))
    if not known or not known[0]:
        return None
    middle, last = (np.mean([d[i] for d in known], 0) for i in range(2))
    near, far = (
        max(1e-12, float(np.mean([input_distance(d[i], reference) for d in others])))
        for i, reference in enumerate((middle, last))
    )
    return Depths(torch.from_numpy(middle), torch.from_numpy(last), (near, far))


def _limits(batches: list[_Batch], inputs: Tensor, classes: Tensor, *, every: float, seed: int) -> Limits:
    size = max(1, round(sum(b.size for b in batches) / len(batches)))
    share = every * KINDS
    statistics: list[tuple[Values, Callable[[Values], Values], int]] = [
        (
            np.stack([b.inputs.flatten().numpy() for b in batches]),
            lambda means: input_distances(means.reshape(-1, *inputs.shape), inputs.numpy()),
            INPUT_WINDOW,
        ),
        (
            np.stack([b.source.double().mean(0).cpu().numpy() for b in batches]),
            lambda means: np.abs(means - classes.numpy()).sum(1) / 2,
            CLASS_WINDOW,
        ),
        (np.array([b.agreement for b in batches]), lambda sums: 1 - sums[:, 1] / sums[:, 0], CLASS_WINDOW),
    ]
    found = [
        limit_for(values, statistic, window=-(-images // size), every=share, seed=seed)
        for values, statistic, images in statistics
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
    # Resampling cannot show what is rarer than the number of different windows it can draw.
    few = len(values) < FEWEST_FOR_BOOTSTRAP or len(values) ** window < 100 * every
    maxima, series = [], []
    for _ in range(RUNS):
        drawn = values[generator.integers(len(values), size=RUN_LENGTH + window - 1)]
        sums = np.cumsum(np.concatenate([np.zeros_like(drawn[:1]), drawn]), axis=0)
        numbers = statistic((sums[window:] - sums[:-window]) / window)
        maxima.append(float(numbers.max()))
        series.append(numbers[:: max(1, window)])
    if few:
        from scipy.stats import t

        roots = np.cbrt(np.concatenate(series))  # nearly normal, unlike distances and rates, which are skewed
        spread = float(roots.std()) * math.sqrt(1 + 1 / len(values))
        return float((roots.mean() + t.isf(1 / every, df=len(values) - 1) * spread) ** 3), "student"
    stays = math.exp(-RUN_LENGTH / every)  # the chance that a whole run passes without a false alarm
    if (1 - stays) * RUNS >= 5:
        return float(np.quantile(maxima, stays)), "bootstrap"
    scale = float(np.std(maxima)) * math.sqrt(6) / math.pi
    return float(np.mean(maxima)) - scale * (np.euler_gamma + math.log(-math.log(stays))), "gumbel"


def canary_of(reference: Reference, judge: Judge, like: Tensor) -> Canary:
    """The reference's trusted images, as the source predicts them."""
    return Canary.trusted(reference.canary.to(like), judge)
