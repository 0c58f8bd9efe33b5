"""Noise: Gaussian, shot, impulse and speckle."""

from __future__ import annotations

import numpy as np

from trust_tta.data.corruptions.common import Generators, Pixels, draw_normal, draw_uniform, to_bytes, to_unit
from trust_tta.data.corruptions.table import Level


def gaussian_noise(images: Pixels, generators: Generators, level: Level) -> Pixels:
    """Independent normal noise on every value."""
    (deviation,) = level
    return to_bytes(to_unit(images) + deviation * draw_normal(generators, images.shape[1:]))


def shot_noise(images: Pixels, generators: Generators, level: Level) -> Pixels:
    """Poisson counts of photons, `rate` of them at full brightness."""
    (rate,) = level
    expected = to_unit(images) * rate
    counts = np.stack([g.poisson(mean) for g, mean in zip(generators, expected, strict=True)])
    return to_bytes(counts / rate)


def impulse_noise(images: Pixels, generators: Generators, level: Level) -> Pixels:
    """Salt and pepper: a share of the values becomes 0 or 255 with equal chance, each channel by itself."""
    (amount,) = level
    chance = draw_uniform(generators, images.shape[1:])
    # one draw serves both choices: within the flipped share its lower half is pepper
    return np.where(chance >= amount, images, np.where(chance < amount / 2, 0, 255)).astype(np.uint8)


def speckle_noise(images: Pixels, generators: Generators, level: Level) -> Pixels:
    """Normal noise in proportion to the brightness."""
    (deviation,) = level
    clean = to_unit(images)
    return to_bytes(clean + clean * deviation * draw_normal(generators, images.shape[1:]))
