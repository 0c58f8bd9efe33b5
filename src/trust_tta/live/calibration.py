"""Calibration of the guard on clean batches: the source's confidence there, and how much evidence is harmless."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from trust_tta.errors import ConfigError, StateError
from trust_tta.live.comparison import BLOCK, TEST_TOLERANCE, spread_difference
from trust_tta.live.source_reference import SourceReference
from trust_tta.live.stream_statistics import probability_rows
from trust_tta.methods.base import Method
from trust_tta.schema import show

MIN_BATCHES = 4
MAX_TOLERANCE = 0.5  # nats


@dataclass(frozen=True)
class Reference:
    """The guard's reference values, measured on clean images.

    `confidence`: a mean log confidence of the source that windows of such images exceed; `tolerance`: evidence (nats)
    that adaptation on them, which can do neither good nor harm, stays below.
    """

    confidence: float
    tolerance: float

    def state(self) -> dict[str, Any]:
        return {"confidence": self.confidence, "tolerance": self.tolerance}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Reference | None:
        """None for a reference of an earlier version, which held limits of alarms."""
        if "limits" in state:
            return None
        values = [state.get(name) for name in ("confidence", "tolerance")]
        if any(not isinstance(v, float) or not math.isfinite(v) for v in values):
            raise StateError(f"the reference holds {show(values)}; a confidence and a tolerance are wanted")
        return cls(state["confidence"], state["tolerance"])


def calibrate(method: Method, batches: Iterable[Tensor]) -> Reference:
    """Learn from clean batches how confident the source is, and how much evidence adaptation on them gives.

    A copy of `method` adapts on them as the stream will.
    """
    twin = method.fork()
    twin.reset()
    source, confidences, pairs = SourceReference(twin), list[float](), list[tuple[int, int]]()
    count, classes = 0, 0
    for images in batches:
        count += 1
        known = probability_rows(source(images))
        adapted = probability_rows(twin(images), probabilities=twin.probabilities)
        classes = known.shape[1]
        confidences += known.amax(1).log().tolist()
        pairs += zip(adapted.argmax(1).tolist(), known.argmax(1).tolist(), strict=True)
    if count < MIN_BATCHES:
        raise ConfigError(f"{count} batches are no reference; give at least {MIN_BATCHES} of clean images")
    blocks = [np.array(pairs[i : i + BLOCK]) for i in range(0, len(pairs) - BLOCK + 1, BLOCK)]
    evidence = np.array([spread_difference(block, classes) for block in blocks] or [0.0])
    tolerance = evidence.mean() + 2 * evidence.std() / math.sqrt(len(evidence))
    error = 2 * float(np.std(confidences)) / math.sqrt(min(len(confidences), 2 * BLOCK))
    return Reference(float(np.mean(confidences)) - error, float(min(max(tolerance, TEST_TOLERANCE), MAX_TOLERANCE)))
