"""Digital changes: brightness, contrast, saturation, elastic distortion, JPEG and pixelation."""

from __future__ import annotations

from io import BytesIO

import numpy as np
from PIL import Image

from trust_tta.data.corruptions.blur import smooth
from trust_tta.data.corruptions.common import Floats, Generators, Pixels, draw_uniform, to_bytes, to_unit
from trust_tta.data.corruptions.loops import sample
from trust_tta.data.corruptions.table import Level


def brightness(images: Pixels, generators: Generators, level: Level) -> Pixels:
    """Add to the HSV value."""
    (shift,) = level
    hue, saturation, value = rgb_to_hsv(to_unit(images))
    return to_bytes(hsv_to_rgb(hue, saturation, np.clip(value + shift, 0, 1)))


def saturate(images: Pixels, generators: Generators, level: Level) -> Pixels:
    """Scale and shift the HSV saturation."""
    factor, shift = level
    hue, saturation, value = rgb_to_hsv(to_unit(images))
    return to_bytes(hsv_to_rgb(hue, np.clip(saturation * factor + shift, 0, 1), value))


def contrast(images: Pixels, generators: Generators, level: Level) -> Pixels:
    """Draw every value toward the mean of its channel."""
    (factor,) = level
    # whole-number sums: the mean must not depend on how the batch is cut
    sums = images.sum(axis=(1, 2), keepdims=True, dtype=np.int64)
    means = sums / (255.0 * images.shape[1] * images.shape[2])
    return to_bytes((to_unit(images) - means) * factor + means)


def jpeg_compression(images: Pixels, generators: Generators, level: Level) -> Pixels:
    """Write and read a JPEG of the given quality."""
    quality = int(level[0])
    out = np.empty_like(images)
    for image, result in zip(images, out, strict=True):
        with BytesIO() as file:
            Image.fromarray(image).save(file, "JPEG", quality=quality)
            result[...] = np.asarray(Image.open(file, formats=("JPEG",)))
    return out


def pixelate(images: Pixels, generators: Generators, level: Level) -> Pixels:
    """Shrink by area and enlarge again."""
    (share,) = level
    height, width = images.shape[1:3]
    small = (max(int(width * share), 1), max(int(height * share), 1))
    out = np.empty_like(images)
    for image, result in zip(images, out, strict=True):
        shrunk = Image.fromarray(image).resize(small, Image.Resampling.BOX)
        result[...] = np.asarray(shrunk.resize((width, height), Image.Resampling.BOX))
    return out


def elastic_transform(images: Pixels, generators: Generators, level: Level) -> Pixels:
    """Move three points at random, warp accordingly, then displace every pixel by smoothed noise."""
    height, width = images.shape[1:3]
    displacement, sigma, jitter = (share * min(height, width) for share in level)
    moves = draw_uniform(generators, (3, 2), -jitter, jitter)
    rows, columns = affine_places(moves, height=height, width=width)
    clean = to_unit(images)
    warped, moved = np.empty_like(clean), np.empty_like(clean)
    sample(clean, rows, columns, 0, warped)
    noise = draw_uniform(generators, (2, height, width), -1, 1)
    dx, dy = (displacement * smooth(noise[:, k], sigma, mode="reflect", truncate=3) for k in range(2))
    y, x = np.mgrid[:height, :width]
    sample(warped, y + dy, x + dx, 1, moved)
    return to_bytes(moved)


def affine_places(moves: Floats, *, height: int, width: int) -> tuple[Floats, Floats]:
    """Source rows and columns (n, h, w) of each pixel of the warped images.

    moves: (n, 3, 2), how far (x, y) the corners bottom right, top right and top left of the middle square go.
    """
    center_x, center_y, reach = width // 2, height // 2, max(min(height, width) // 3, 1)
    signs = np.array([(1, 1), (1, -1), (-1, -1)])
    corners = np.array([center_x, center_y]) + reach * signs
    goals = corners + moves
    along_x, along_y = (goals[:, 1] - goals[:, 2]) / (2 * reach), (goals[:, 0] - goals[:, 1]) / (2 * reach)
    start = goals[:, 1] - along_x * corners[1, 0] - along_y * corners[1, 1]
    area = along_x[:, 0] * along_y[:, 1] - along_x[:, 1] * along_y[:, 0]
    inverse = np.where(area == 0, 0.0, 1 / np.where(area == 0, 1.0, area))[:, None, None]
    y, x = np.mgrid[:height, :width]
    from_x, from_y = (axis - start[:, k, None, None] for k, axis in enumerate((x, y)))
    columns = (along_y[:, 1, None, None] * from_x - along_y[:, 0, None, None] * from_y) * inverse
    rows = (along_x[:, 0, None, None] * from_y - along_x[:, 1, None, None] * from_x) * inverse
    return rows, columns


def rgb_to_hsv(rgb: Floats) -> tuple[Floats, Floats, Floats]:
    """(..., 3) to hue, saturation and value, (...) each; gray has hue and saturation 0."""
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
