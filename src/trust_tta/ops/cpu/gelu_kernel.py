"""GELU and its derivative in one pass, as a loop that numba compiles: they share an exponential.

The upper tail of the normal distribution at x >= 0 is exp(-x^2/2) t p(t), with t = 1 / (1 + x/4) and a polynomial p.
"""

# mypy: ignore-errors
from __future__ import annotations

import math

import numpy as np

from trust_tta.ops.cpu.vector_math import fast_exp, jit

FARTHEST = 13.0  # where the fit ends: beyond, the exponential is 0
_QUARTER, _HALF, _ONE = np.float32(0.25), np.float32(0.5), np.float32(1)
_DENSITY = np.float32(1 / math.sqrt(2 * math.pi))


def _fit(degree: int, points: int = 400) -> tuple[np.float32, ...]:
    """The coefficients of p, fitted at Chebyshev's points for a small relative error."""
    least = 1 / (1 + FARTHEST / 4)
    t = least + (1 - least) * (1 - np.cos(np.pi * (np.arange(points) + 0.5) / points)) / 2
    x = 4 * (1 / t - 1)
    p = np.array([math.erfc(each / math.sqrt(2)) / 2 for each in x]) * np.exp(x * x / 2) / t
    return tuple(np.float32(c) for c in np.polynomial.Polynomial.fit(t, p, degree, w=1 / p).convert().coef)


_TAIL = _fit(8)


@jit
def gelu_and_slope(x, out):
    """out = GELU(x), and x becomes its derivative there; both contiguous float32 (n,)."""
    for i in range(x.size):
        value = x[i]
        e = fast_exp(-_HALF * value * value)
        t = _ONE / (_ONE + _QUARTER * abs(value))
        p = ((_TAIL[8] * t + _TAIL[7]) * t + _TAIL[6]) * t + _TAIL[5]
        p = (((p * t + _TAIL[4]) * t + _TAIL[3]) * t + _TAIL[2]) * t + _TAIL[1]
        tail = (p * t + _TAIL[0]) * t * e
        below = _ONE - tail if value >= 0 else tail
        out[i] = value * below
        x[i] = below + value * (_DENSITY * e)
