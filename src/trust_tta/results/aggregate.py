"""Mean, standard deviation and confidence interval over seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Aggregate:
    """Mean over `n` seeds; None if a value is missing."""

    mean: float | None = None
    std: float | None = None  # over seeds, None below two
    half_width: float | None = None  # of the 95 % t-interval of the mean
    n: int = 0


def aggregate(values: Sequence[float]) -> Aggregate:
    """Mean, standard deviation and 95 % t-interval over seeds."""
    n = len(values)
    if n == 0:
        return Aggregate()
    mean = math.fsum(values) / n
    if n == 1:
        return Aggregate(mean, n=1)
    from scipy import special

    std = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1))
    return Aggregate(mean, std, float(special.stdtrit(n - 1, 0.975)) * std / math.sqrt(n), n)
