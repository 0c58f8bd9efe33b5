"""numba options of the CPU kernels, and exp and log1p that vectorize."""

# mypy: ignore-errors
from __future__ import annotations

import math

import numpy as np

from trust_tta.ops.numba_jit import compiled

# Without numba's runtime (_nrt) a slice costs no reference count, which short rows feel; scratch comes from the caller.
_OPTIONS = {"nogil": True, "error_model": "numpy", "_nrt": False, "forceinline": True}
jit = compiled(**_OPTIONS, fastmath={"contract", "nsz", "arcp"})
# For functions that return a slice, which compiled functions cannot without numba's runtime.
inline = compiled(**_OPTIONS, inline="always")
# Sums may be reordered into vector registers; fast_exp must not be, or its range reduction loses bits.
jit_sum = compiled(**_OPTIONS, fastmath={"contract", "nsz", "arcp", "reassoc"})

# exp(r) on |r| <= ln(2)/2 and log(1 + z)/z on [0, 1] as Chebyshev fits: float32 accuracy.
_z = (1 - np.cos(np.pi * (np.arange(64) + 0.5) / 64)) / 2
_r = (_z - 0.5) * math.log(2)
_EXP = tuple(np.float32(c) for c in np.polynomial.Polynomial.fit(_r, np.exp(_r), 6).convert().coef)
_LOG = tuple(np.float32(c) for c in np.polynomial.Polynomial.fit(_z, np.log1p(_z) / _z, 10).convert().coef)
_LOG2E, _LN2_HIGH, _LN2_LOW = np.float32(1 / math.log(2)), np.float32(0.693359375), np.float32(-2.12194440e-4)
_ROUND = np.float32(3 * 2**22 + 127)  # added to a small number it rounds it, and its bits end in the exponent of 2**n


@jit
def fast_exp(x):
    """exp in float32 without a library call, so that loops over it use vector registers."""
    x = max(min(np.float32(x), np.float32(88.0)), np.float32(-88.0))  # at -88 the exponent is all zeros: exactly 0
    rounded = np.float32(x * _LOG2E + _ROUND)
    n = rounded - _ROUND
    r = x - n * _LN2_HIGH - n * _LN2_LOW
    p = ((_EXP[6] * r + _EXP[5]) * r + _EXP[4]) * r + _EXP[3]
    p = ((p * r + _EXP[2]) * r + _EXP[1]) * r + _EXP[0]
    return p * np.int32(rounded.view(np.int32) << np.int32(23)).view(np.float32)


@jit
def fast_log1p(z):
    """log(1 + z) for 0 <= z <= 1 in float32."""
    p = (((_LOG[10] * z + _LOG[9]) * z + _LOG[8]) * z + _LOG[7]) * z + _LOG[6]
    p = ((p * z + _LOG[5]) * z + _LOG[4]) * z + _LOG[3]
    p = ((p * z + _LOG[2]) * z + _LOG[1]) * z + _LOG[0]
    return p * z
