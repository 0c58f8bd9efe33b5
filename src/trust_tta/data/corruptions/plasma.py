"""Plasma clouds: the height maps that fog is made of."""

from __future__ import annotations

import numpy as np

from trust_tta.data.corruptions.pixels import Floats


def plasma(noise: Floats, *, decay: float) -> Floats:
    """Diamond-square height maps (n, side, side) in 0..1 from uniform noise (n, side * side) in -1..1.

    side is a power of two; the maps wrap around at their borders.
    """
    count, side = noise.shape[0], int(np.sqrt(noise.shape[1]))
    heights = np.zeros((count, side, side))
    step, wobble, used = side, 100.0, 0
    while step >= 2:
        half, cells = step // 2, side // step
        squares, tops, lefts = (
            noise[:, used + k * cells**2 : used + (k + 1) * cells**2].reshape(count, cells, cells) * wobble**2
            for k in range(3)
        )
        corners = heights[:, ::step, ::step]
        pairs = corners + np.roll(corners, -1, axis=1)
        middles = (pairs + np.roll(pairs, -1, axis=2)) / 4 + squares
        heights[:, half::step, half::step] = middles
        heights[:, ::step, half::step] = (
            middles + np.roll(middles, 1, axis=1) + corners + np.roll(corners, -1, axis=2)
        ) / 4 + tops
        heights[:, half::step, ::step] = (
            middles + np.roll(middles, 1, axis=2) + corners + np.roll(corners, -1, axis=1)
        ) / 4 + lefts
        step, wobble, used = half, wobble / decay, used + 3 * cells**2
    heights -= heights.min(axis=(1, 2), keepdims=True)
    highest = heights.max(axis=(1, 2), keepdims=True)
    return heights / np.where(highest == 0, 1.0, highest)
