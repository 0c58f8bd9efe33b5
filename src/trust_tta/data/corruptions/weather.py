"""Weather: snow, frost and fog."""

from __future__ import annotations

import numpy as np

from trust_tta.data.corruptions.blur import blur_along, zoom_places
from trust_tta.data.corruptions.ice import ICES, frost_picture
from trust_tta.data.corruptions.loops import add_zoomed
from trust_tta.data.corruptions.pixels import Generators, Images, draw_normal, draw_uniform, to_bytes, to_unit
from trust_tta.data.corruptions.plasma import plasma
from trust_tta.data.corruptions.table import Level


def snow(images: Images, generators: Generators, level: Level) -> Images:
    """Flakes from thresholded noise, blurred downwards, over a whitened image."""
    mean, deviation, zoom, threshold, radius, sigma, share = level
    height, width = images.shape[1:3]
    noise = mean + deviation * draw_normal(generators, (height, width, 1))
    flakes = np.zeros_like(noise)
    add_zoomed(noise, zoom_places(height, zoom), zoom_places(width, zoom), flakes)
    flakes[flakes < threshold] = 0
    angles = draw_uniform(generators, (1,), -135, -45)[:, 0]
    layer = to_unit(blur_along(to_bytes(flakes), angles, radius=radius, sigma=sigma))
    clean = to_unit(images)
    grey = 0.299 * clean[..., :1] + 0.587 * clean[..., 1:2] + 0.114 * clean[..., 2:]
    whitened = share * clean + (1 - share) * np.maximum(clean, grey * 1.5 + 0.5)
    return to_bytes(whitened + layer + layer[:, ::-1, ::-1])


def frost(images: Images, generators: Generators, level: Level) -> Images:
    """Lay a random part of one of the ice pictures over the image."""
    image_weight, ice_weight, shrinking = level
    height, width = images.shape[1:3]
    out = np.empty_like(images)
    for image, generator, result in zip(images, generators, out, strict=True):
        variant = int(generator.integers(len(ICES)))
        picture = frost_picture(variant, shrinking=int(shrinking), height=height, width=width)
        top = generator.integers(picture.shape[0] - height)
        left = generator.integers(picture.shape[1] - width)
        ice = picture[top : top + height, left : left + width]
        result[...] = np.clip(image_weight * image + ice_weight * ice, 0, 255).astype(np.uint8)
    return out


def fog(images: Images, generators: Generators, level: Level) -> Images:
    """Add a plasma fractal and scale back to the brightness the image had."""
    strength, decay = level
    height, width = images.shape[1:3]
    side = 1 << (max(height, width) - 1).bit_length()
    clouds = plasma(draw_uniform(generators, (side * side,), -1, 1), decay=decay)[:, :height, :width, None]
    clean = to_unit(images)
    brightest = clean.max(axis=(1, 2, 3), keepdims=True)
    return to_bytes((clean + strength * clouds) * brightest / (brightest + strength))
