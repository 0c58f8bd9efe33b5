"""Pictures for the tests of the corruptions: smooth noise at three scales, like nothing but with edges and colours."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage


def make_pictures(count: int, height: int, width: int, seed: int = 0) -> NDArray[np.uint8]:
    """uint8 (count, height, width, 3), each from darkest 0 to brightest 255."""
    rng = np.random.default_rng(seed)
    total = np.zeros((count, height, width, 3))
    for sigma in (1.0, 3.0, 8.0):
        noise = ndimage.gaussian_filter(rng.standard_normal(total.shape), (0, sigma, sigma, 0), mode="reflect")
        total += noise / noise.std() * np.sqrt(sigma)
    total -= total.min(axis=(1, 2, 3), keepdims=True)
    total *= 255 / total.max(axis=(1, 2, 3), keepdims=True)
    return total.astype(np.uint8)
