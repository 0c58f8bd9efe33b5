"""Alarms of a reading, by calibrated limits and absolute bounds.

Drift: the images changed (the statistics of the input moved). Class shift: the images did not change, but the source
network predicts other classes than before. Few classes: the images are of few classes. Collapse: what was learned is
wrong (the adapted network and the source disagree on images where they should not).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from torch import Tensor

from trust_tta.live.monitors import CLASS_WINDOW, MAX_FEW_CLASSES, NormReference, Reading
from trust_tta.schema import Count, Fraction, Positive, Schema

Tail: TypeAlias = Literal["bootstrap", "gumbel", "student"]
Kind: TypeAlias = Literal["drift", "class_shift", "few_classes", "collapse"]

MIN_MANY_CLASSES = 0.75  # `trained_classes` above which images are no longer of few classes
MIN_TRAINED_LEAD = 0.22  # `trained_lead` above which, without a reference, few classes are believed


class Limits(Schema):
    """The values above which a reading is an alarm; None: never. The defaults are for a stream without a reference.

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
    """Statistics of clean images: input statistics (2, c), mean prediction (classes,), canary images, and limits."""

    inputs: Tensor
    classes: Tensor
    canary: Tensor
    limits: Limits
    depths: NormReference | None = None

    def state(self) -> dict[str, Any]:
        """State as tensors and plain values."""
        limits = self.limits.model_dump()
        state = {"inputs": self.inputs, "classes": self.classes, "canary": self.canary, "limits": limits}
        return state if self.depths is None else {**state, "depths": vars(self.depths)}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Reference:
        depths = NormReference(**state["depths"]) if "depths" in state else None
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
    if reading.trained_classes is None or reading.trained_classes >= (MIN_MANY_CLASSES if few else MAX_FEW_CLASSES):
        return False
    if reading.depth_ratio is not None:
        return reading.depth_ratio > 1
    return not drift and _above(reading.trained_lead, MIN_TRAINED_LEAD)


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
    # A source that itself predicts hardly more than one class is no reference.
    if reading.agreement < agreement and reading.source_classes > 2:
        return "the source predicts other classes"
    return ""


def _above(value: float | None, limit: float | None) -> bool:
    return value is not None and limit is not None and value > limit
