"""Blur: Gaussian, defocus, frosted glass, motion and zoom."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from trust_tta.data.corruptions.common import Floats, Generators, Pixels, draw_uniform, to_bytes, to_unit
from trust_tta.data.corruptions.loops import add_zoomed, gather_neighbors, streak
from trust_tta.data.corruptions.table import Level


def smooth(values: Floats, sigma: float, *, mode: str = "nearest", truncate: float = 4.0) -> Floats:
    """Gaussian filter over height and width of a stack (n, h, w) or (n, h, w, c)."""
    sigmas = (0.0, sigma, sigma) + (0.0,) * (values.ndim - 3)
    smoothed: Floats = ndimage.gaussian_filter(values, sigmas, mode=mode, truncate=truncate)
    return smoothed


def gaussian_blur(images: Pixels, generators: Generators, level: Level) -> Pixels:
    """A Gaussian filter, edges repeated."""
    (sigma,) = level
    return to_bytes(smooth(to_unit(images), sigma))


def glass_blur(images: Pixels, generators: Generators, level: Level) -> Pixels:
    """Blur, let pixels take the color of near ones, blur again."""
    sigma, reach, rounds = level[0], int(level[1]), int(level[2])
    shuffled = to_bytes(smooth(to_unit(images), sigma))
    height, width = (max(side - 2 * reach, 0) for side in images.shape[1:3])
    shape = (rounds, height, width, 2)
    shifts = np.stack([g.integers(-reach, reach, shape, dtype=np.int8) for g in generators])
    # overwriting, not swapping: the released generator's swap goes through views of one array, which copies one way
    gather_neighbors(shuffled, shifts, reach)
    return to_bytes(smooth(to_unit(shuffled), sigma))


def disk_kernel(radius: float, alias_sigma: float) -> Floats:
    """A disk on a pixel grid (-8..8, wider for wider disks), softened by a small Gaussian."""
    half, taps = (8, 1) if radius <= 8 else (int(radius), 2)
    grid = np.arange(-half, half + 1)
    disk = (grid[:, None] ** 2 + grid**2 <= radius**2).astype(np.float64)
    disk /= disk.sum()
    bell = np.exp(-(np.arange(-taps, taps + 1) ** 2) / (2 * alias_sigma**2))
    bell /= bell.sum()
    softened: Floats = ndimage.correlate1d(ndimage.correlate1d(disk, bell, 0, mode="mirror"), bell, 1, mode="mirror")
    return softened


def defocus_blur(images: Pixels, generators: Generators, level: Level) -> Pixels:
    """A disk-shaped filter, reflected at the border."""
    kernel = disk_kernel(*level)
    half = kernel.shape[0] // 2
    height, width = images.shape[1:3]
    padded = np.pad(to_unit(images), ((0, 0), (half, half), (half, half), (0, 0)), mode="reflect")
    total = np.zeros(images.shape)
    for y, x in np.argwhere(kernel > 0):
        total += kernel[y, x] * padded[:, y : y + height, x : x + width]
    return to_bytes(total)


def streak_weights(radius: float, sigma: float) -> Floats:
    """One-sided Gaussian weights along the motion, which sum to 1; weight i applies to the pixel i steps ahead."""
    steps = np.arange(2 * math.ceil(radius) + 1)
    bell: Floats = np.exp(-(steps**2) / (2 * sigma**2))
    weights: Floats = bell / bell.sum()
    return weights


def blur_along(images: NDArray[np.uint8], angles: Floats, *, radius: float, sigma: float) -> NDArray[np.uint8]:
    """One-sided motion blur of (n, h, w, c) in direction angles (n,) in degrees, 0 = right, 90 = down."""
    weights = streak_weights(radius, sigma)
    steps, radians = np.arange(len(weights)), np.deg2rad(angles)[:, None]
    dy = np.ceil(steps * np.sin(radians) - 0.5).astype(np.int64)
    dx = np.ceil(steps * np.cos(radians) - 0.5).astype(np.int64)
    out = np.empty_like(images)
    streak(images, weights, dy, dx, out)
    return out


def motion_blur(images: Pixels, generators: Generators, level: Level) -> Pixels:
    """Motion to the right, up to 45 degrees up or down."""
    radius, sigma = level
    return blur_along(images, draw_uniform(generators, (1,), -45, 45)[:, 0], radius=radius, sigma=sigma)


def zoom_places(side: int, factor: float) -> Floats:
    """Source coordinates (side,) of a centered zoom of `side` pixels by `factor`."""
    crop = math.ceil(side / factor)
    zoomed = round(crop * factor)
    step = (crop - 1) / (zoomed - 1) if zoomed > 1 else 1.0
    first = (zoomed - side) // 2
    places: Floats = (side - crop) // 2 + np.minimum(np.arange(first, first + side) * step, crop - 1)
    return places


def zoom_blur(images: Pixels, generators: Generators, level: Level) -> Pixels:
    """The mean of the image and its centered zooms."""
    stop, step = level
    factors = np.arange(1, stop, step)
    clean = to_unit(images)
    total = clean.copy()
    for factor in factors:
        add_zoomed(clean, zoom_places(images.shape[1], factor), zoom_places(images.shape[2], factor), total)
    return to_bytes(total / (len(factors) + 1))
