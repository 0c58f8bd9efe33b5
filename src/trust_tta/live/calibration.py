"""Calibration of the guard on clean batches: how much evidence of the test is harmless."""

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
    """Evidence (nats) that adaptation on clean images, which can do neither good nor harm, stays below."""

    tolerance: float

    def state(self) -> dict[str, Any]:
        return {"tolerance": self.tolerance}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Reference | None:
        """None for a reference of an earlier version, which held limits of alarms."""
        if "limits" in state:
            return None
        tolerance = state.get("tolerance")
        if not isinstance(tolerance, float) or not math.isfinite(tolerance):
            raise StateError(f"the reference holds {show(tolerance)}; a tolerance in nats is wanted")
        return cls(tolerance)


def calibrate(method: Method, batches: Iterable[Tensor]) -> Reference:
    """Learn from clean batches how much evidence adaptation on them gives.

    A copy of `method` adapts on them as the stream will.
    """
    twin = method.fork()
    twin.reset()
    source, pairs = SourceReference(twin), list[tuple[int, int]]()
    count, classes = 0, 0
    for images in batches:
        count += 1
        known = probability_rows(source(images))
        adapted = probability_rows(twin(images), probabilities=twin.probabilities)
        classes = known.shape[1]
        pairs += zip(adapted.argmax(1).tolist(), known.argmax(1).tolist(), strict=True)
    if count < MIN_BATCHES:
        raise ConfigError(f"{count} batches are no reference; give at least {MIN_BATCHES} of clean images")
    blocks = [np.array(pairs[i : i + BLOCK]) for i in range(0, len(pairs) - BLOCK + 1, BLOCK)]
    evidence = np.array([spread_difference(block, classes) for block in blocks] or [0.0])
    tolerance = evidence.mean() + 2 * evidence.std() / math.sqrt(len(evidence))
    return Reference(float(min(max(tolerance, TEST_TOLERANCE), MAX_TOLERANCE)))
