"""Digital changes: brightness, contrast, saturation, JPEG and pixelation."""

from __future__ import annotations

from io import BytesIO

import numpy as np
from PIL import Image

from trust_tta.data.corruptions.colour import hsv_to_rgb, rgb_to_hsv
from trust_tta.data.corruptions.pixels import Generators, Images, to_bytes, to_unit
from trust_tta.data.corruptions.table import Level


def brightness(images: Images, generators: Generators, level: Level) -> Images:
    """Add to the HSV value."""
    (shift,) = level
    hue, saturation, value = rgb_to_hsv(to_unit(images))
    return to_bytes(hsv_to_rgb(hue, saturation, np.clip(value + shift, 0, 1)))


def saturate(images: Images, generators: Generators, level: Level) -> Images:
    """Scale and shift the HSV saturation."""
    factor, shift = level
    hue, saturation, value = rgb_to_hsv(to_unit(images))
    return to_bytes(hsv_to_rgb(hue, np.clip(saturation * factor + shift, 0, 1), value))


def contrast(images: Images, generators: Generators, level: Level) -> Images:
    """Draw every value towards the mean of its channel."""
    (factor,) = level
    # whole-number sums: the mean must not depend on how the batch is cut
    sums = images.sum(axis=(1, 2), keepdims=True, dtype=np.int64)
    means = sums / (255.0 * images.shape[1] * images.shape[2])
    return to_bytes((to_unit(images) - means) * factor + means)


def jpeg_compression(images: Images, generators: Generators, level: Level) -> Images:
    """Write and read a JPEG of the given quality."""
    quality = int(level[0])
    out = np.empty_like(images)
    for image, result in zip(images, out, strict=True):
        with BytesIO() as file:
            Image.fromarray(image).save(file, "JPEG", quality=quality)
            result[...] = np.asarray(Image.open(file))
    return out


def pixelate(images: Images, generators: Generators, level: Level) -> Images:
    """Shrink by area and enlarge again."""
    (share,) = level
    height, width = images.shape[1:3]
    small = (max(int(width * share), 1), max(int(height * share), 1))
    out = np.empty_like(images)
    for image, result in zip(images, out, strict=True):
        shrunk = Image.fromarray(image).resize(small, Image.Resampling.BOX)
        result[...] = np.asarray(shrunk.resize((width, height), Image.Resampling.BOX))
    return out
