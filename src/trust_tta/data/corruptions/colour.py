"""Hue, saturation and value of RGB images, all in 0..1."""

from __future__ import annotations

import numpy as np

from trust_tta.data.corruptions.pixels import Floats


def rgb_to_hsv(rgb: Floats) -> tuple[Floats, Floats, Floats]:
    """(..., 3) to hue, saturation and value, (...) each; grey has hue and saturation 0."""
    red, green, blue = (np.ascontiguousarray(rgb[..., c]) for c in range(3))
    value = np.maximum(np.maximum(red, green), blue)
    spread = value - np.minimum(np.minimum(red, green), blue)
    divisor = np.where(spread == 0, 1.0, spread)
    sector = np.where(
        value == blue,
        4 + (red - green) / divisor,
        np.where(value == green, 2 + (blue - red) / divisor, (green - blue) / divisor),
    )
    hue = np.where(spread == 0, 0.0, (sector / 6) % 1.0)
    return hue, spread / np.where(value == 0, 1.0, value), value


def hsv_to_rgb(hue: Floats, saturation: Floats, value: Floats) -> Floats:
    """Hue, saturation and value, (...) each, to (..., 3)."""
    sector = np.floor(hue * 6)
    within = hue * 6 - sector
    low = value * (1 - saturation)
    falling = value * (1 - within * saturation)
    rising = value * (1 - (1 - within) * saturation)
    sector = sector.astype(np.uint8) % 6
    red = np.choose(sector, (value, falling, low, low, rising, value))
    green = np.choose(sector, (rising, value, value, falling, low, low))
    blue = np.choose(sector, (low, low, rising, value, value, falling))
    return np.stack([red, green, blue], axis=-1)
