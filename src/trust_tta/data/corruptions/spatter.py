"""Spatter: drops of water or splashes of mud on the lens."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from trust_tta.data.corruptions.blur import smooth
from trust_tta.data.corruptions.loops import chamfer_distance
from trust_tta.data.corruptions.pixels import Floats, Generators, Images, draw_normal, to_bytes, to_unit
from trust_tta.data.corruptions.table import Level

_WATER = np.array([175, 238, 238]) / 255  # pale turquoise
_MUD = np.array([63, 42, 20]) / 255  # brown
_RELIEF = np.array([[-2, -1, 0], [-1, 1, 1], [0, 1, 2]])
_FARTHEST = 20.0  # pixels from an edge beyond which a drop is flat
_TAN_22 = np.sqrt(2) - 1
_WEAK_EDGE, _STRONG_EDGE = 50, 150


def spatter(images: Images, generators: Generators, level: Level) -> Images:
    """Threshold smooth noise into drops, then shade them as water or paint them as mud."""
    mean, deviation, sigma, threshold, strength, mud = level
    liquid = smooth(mean + deviation * draw_normal(generators, images.shape[1:3]), sigma)
    liquid[liquid < threshold] = 0
    clean = to_unit(images)
    if mud:
        cover = smooth((liquid > threshold).astype(np.float64), strength)
        cover[cover < 0.8] = 0
        return to_bytes(clean * (1 - cover[..., None]) + _MUD * cover[..., None])
    drops = np.stack([_shade_drops(layer) for layer in (np.clip(liquid, 0, 1) * 255).astype(np.uint8)])
    return to_bytes(clean + strength * drops[..., None] * _WATER)


def _shade_drops(liquid: NDArray[np.uint8]) -> Floats:
    """Light and shadow of drops of the given depth (h, w), in 0..1."""
    distance = np.empty(liquid.shape)
    chamfer_distance(find_edges(liquid), distance)
    flat = _mean_of_nine(np.minimum(distance, _FARTHEST)).astype(np.uint8)
    relief = ndimage.correlate(equalise(flat).astype(np.int64), _RELIEF, mode="mirror")
    shaded = liquid.astype(np.float64) * np.rint(_mean_of_nine(np.clip(relief, 0, 255)))
    brightest = shaded.max()
    return shaded / brightest if brightest > 0 else shaded


def _mean_of_nine(values: NDArray[Any]) -> Floats:
    """Box filter (h, w) that keeps whole numbers whole, which a running sum would not."""
    sums: Floats = ndimage.correlate(values.astype(np.float64), np.ones((3, 3)), mode="mirror")
    return sums / 9


def equalise(grey: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Spread the grey levels (h, w) so that each is as common as the next; one level alone stays."""
    counts = np.bincount(grey.ravel(), minlength=256)
    darkest = int(np.flatnonzero(counts)[0])
    others = grey.size - counts[darkest]
    if others == 0:
        return grey
    below = np.cumsum(counts) - counts[darkest]
    below[:darkest] = 0
    levels: NDArray[np.uint8] = np.rint(below * (255 / others)).astype(np.uint8)[grey]
    return levels


def find_edges(grey: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Canny's edges of (h, w): ridges of the gradient that are strong or touch a strong one."""
    values = grey.astype(np.int64)
    dx, dy = (ndimage.sobel(values, axis=axis, mode="nearest") for axis in (1, 0))
    size = np.abs(dx) + np.abs(dy)
    ridges = _is_ridge(dx, dy, size) & (size > _WEAK_EDGE)
    labels, count = ndimage.label(ridges, np.ones((3, 3)))
    strong = np.zeros(count + 1, dtype=bool)
    strong[labels[ridges & (size > _STRONG_EDGE)]] = True
    strong[0] = False
    edges: NDArray[np.bool_] = strong[labels]
    return edges


def _is_ridge(dx: NDArray[np.int64], dy: NDArray[np.int64], size: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether the gradient is larger than at both neighbours across the edge."""
    padded = np.pad(size, 1)
    height, width = size.shape

    def at(down: int, right: int) -> NDArray[np.int64]:
        return padded[1 + down : 1 + down + height, 1 + right : 1 + right + width]

    flat, steep = np.abs(dy) < _TAN_22 * np.abs(dx), np.abs(dy) > (_TAN_22 + 2) * np.abs(dx)
    across = (size > at(0, -1)) & (size >= at(0, 1))
    down = (size > at(-1, 0)) & (size >= at(1, 0))
    falling = (size > at(-1, -1)) & (size > at(1, 1))
    rising = (size > at(-1, 1)) & (size > at(1, -1))
    diagonal = np.where((dx < 0) == (dy < 0), falling, rising)
    return np.where(flat, across, np.where(steep, down, diagonal)).astype(np.bool_)
