"""Weather: snow, frost, fog and spatter."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from scipy import ndimage

from trust_tta.data.corruptions.blur import blur_along, smooth, zoom_places
from trust_tta.data.corruptions.common import Floats, Generators, Pixels, draw_normal, draw_uniform, to_bytes, to_unit
from trust_tta.data.corruptions.loops import add_zoomed, chamfer_distance
from trust_tta.data.corruptions.table import Level

_ICE_HEIGHT, _ICE_WIDTH = 480, 720
_BARB_STEP = 4  # pixels between two pairs of barbs on a stem


@dataclass(frozen=True)
class Ice:
    """One kind of frost: its color, contrast and mix of noise, haze and feathers."""

    color: tuple[float, float, float]  # mean of red, green and blue
    contrast: float  # standard deviation, in bytes
    feathers: int
    length: float  # of a feather, in pixels
    haze: float  # weight of the wide, slow variation
    grain: float  # weight of the finest noise


# color and contrast are those of photographs of frost: a blue pane, two white ones, a gray one and a dark one
ICES = (
    Ice(color=(78, 149, 166), contrast=20, feathers=250, length=90, haze=1.2, grain=0.25),
    Ice(color=(201, 205, 214), contrast=18, feathers=900, length=80, haze=0.4, grain=0.35),
    Ice(color=(204, 207, 212), contrast=18, feathers=1400, length=45, haze=0.6, grain=0.35),
    Ice(color=(138, 153, 165), contrast=28, feathers=1800, length=25, haze=0.8, grain=0.6),
    Ice(color=(112, 123, 135), contrast=43, feathers=1100, length=50, haze=1.1, grain=0.3),
)
_WATER = np.array([175, 238, 238]) / 255  # pale turquoise
_MUD = np.array([63, 42, 20]) / 255  # brown
_RELIEF = np.array([[-2, -1, 0], [-1, 1, 1], [0, 1, 2]])
_FARTHEST = 20.0  # pixels from an edge beyond which a drop is flat
_TAN_22 = np.sqrt(2) - 1
_WEAK_EDGE, _STRONG_EDGE = 50, 150


def snow(images: Pixels, generators: Generators, level: Level) -> Pixels:
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
    gray = 0.299 * clean[..., :1] + 0.587 * clean[..., 1:2] + 0.114 * clean[..., 2:]
    whitened = share * clean + (1 - share) * np.maximum(clean, gray * 1.5 + 0.5)
    return to_bytes(whitened + layer + layer[:, ::-1, ::-1])


def frost(images: Pixels, generators: Generators, level: Level) -> Pixels:
    """Blend a random crop of one of the generated ice textures with the image."""
    image_weight, ice_weight, shrinking = level
    height, width = images.shape[1:3]
    out = np.empty_like(images)
    for image, generator, result in zip(images, generators, out, strict=True):
        variant = int(generator.integers(len(ICES)))
        texture = frost_texture(variant, shrinking=int(shrinking), height=height, width=width)
        top = generator.integers(texture.shape[0] - height)
        left = generator.integers(texture.shape[1] - width)
        ice = texture[top : top + height, left : left + width]
        result[...] = np.clip(image_weight * image + ice_weight * ice, 0, 255).astype(np.uint8)
    return out


def fog(images: Pixels, generators: Generators, level: Level) -> Pixels:
    """Add a plasma fractal and scale back to the brightness the image had."""
    strength, decay = level
    height, width = images.shape[1:3]
    side = 1 << (max(height, width) - 1).bit_length()
    clouds = plasma(draw_uniform(generators, (side * side,), -1, 1), decay=decay)[:, :height, :width, None]
    clean = to_unit(images)
    brightest = clean.max(axis=(1, 2, 3), keepdims=True)
    return to_bytes((clean + strength * clouds) * brightest / (brightest + strength))


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


def spatter(images: Pixels, generators: Generators, level: Level) -> Pixels:
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
    relief = ndimage.correlate(equalize(flat).astype(np.int64), _RELIEF, mode="mirror")
    shaded = liquid.astype(np.float64) * np.rint(_mean_of_nine(np.clip(relief, 0, 255)))
    brightest = shaded.max()
    return shaded / brightest if brightest > 0 else shaded


def _mean_of_nine(values: NDArray[Any]) -> Floats:
    """Box filter (h, w) that keeps whole numbers whole, which a running sum would not."""
    sums: Floats = ndimage.correlate(values.astype(np.float64), np.ones((3, 3)), mode="mirror")
    return sums / 9


def equalize(gray: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Spread the gray levels (h, w) so that each is as common as the next; one level alone stays."""
    counts = np.bincount(gray.ravel(), minlength=256)
    darkest = int(np.flatnonzero(counts)[0])
    others = gray.size - counts[darkest]
    if others == 0:
        return gray
    below = np.cumsum(counts) - counts[darkest]
    below[:darkest] = 0
    levels: NDArray[np.uint8] = np.rint(below * (255 / others)).astype(np.uint8)[gray]
    return levels


def find_edges(gray: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Canny's edges of (h, w): ridges of the gradient that are strong or touch a strong one."""
    values = gray.astype(np.int64)
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
    """Whether the gradient is larger than at both neighbors across the edge."""
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


@lru_cache(maxsize=16)
def frost_texture(variant: int, *, shrinking: int, height: int, width: int) -> NDArray[np.uint8]:
    """An ice texture, subsampled by `shrinking`, and enlarged where it is not larger than height x width."""
    texture = _draw_ice(variant)[shrinking // 2 :: shrinking, shrinking // 2 :: shrinking]
    rows, columns = texture.shape[:2]
    if rows > height and columns > width:
        return texture
    scale = 1.1 * max(height / rows, width / columns)
    size = (math.ceil(columns * scale) + 1, math.ceil(rows * scale) + 1)
    return np.asarray(Image.fromarray(np.ascontiguousarray(texture)).resize(size, Image.Resampling.BICUBIC))


@lru_cache(maxsize=len(ICES))
def _draw_ice(variant: int) -> NDArray[np.uint8]:
    """An ice texture (480, 720, 3), the same in every process."""
    ice, generator = ICES[variant], np.random.Generator(np.random.PCG64(variant))
    layers = (
        0.6 * _ridges(generator),
        ice.haze * _noise(generator, 70.0),
        1.0 * _standard(_feathers(generator, count=ice.feathers, length=ice.length)),
        ice.grain * _noise(generator, 0.6),
    )
    relief = _standard(sum(layers, np.zeros((_ICE_HEIGHT, _ICE_WIDTH))))
    tinted = np.array(ice.color) + ice.contrast * relief[..., None]
    return np.clip(tinted, 0, 255).astype(np.uint8)


def _standard(values: Floats) -> Floats:
    centered: Floats = values - values.mean()
    standard: Floats = centered / centered.std()
    return standard


def _noise(generator: np.random.Generator, sigma: float) -> Floats:
    """Smooth noise of mean 0 and deviation 1."""
    smoothed: Floats = ndimage.gaussian_filter(generator.standard_normal((_ICE_HEIGHT, _ICE_WIDTH)), sigma, mode="wrap")
    return _standard(smoothed)


def _ridges(generator: np.random.Generator) -> Floats:
    """Sharp crests at four scales, where smooth noise changes its sign."""
    crests = [-np.abs(_noise(generator, sigma)) * math.sqrt(sigma) for sigma in (16.0, 8.0, 4.0, 2.0)]
    return _standard(sum(crests, np.zeros((_ICE_HEIGHT, _ICE_WIDTH))))


def _feathers(generator: np.random.Generator, *, count: int, length: float) -> Floats:
    """Feathers of ice grown over each other in random directions, (480, 720) in 0..255."""
    sheet = Image.new("L", (_ICE_WIDTH, _ICE_HEIGHT), 96)
    draw = ImageDraw.Draw(sheet)
    for _ in range(count):
        root = generator.uniform((-20, -20), (_ICE_WIDTH + 20, _ICE_HEIGHT + 20))
        angle, spread = generator.uniform(0, 2 * math.pi), generator.uniform(0.5, 1.0)
        reach = length * math.exp(generator.normal(0, 0.4))
        _draw_feather(draw, root, angle=angle, spread=spread, reach=reach, shade=int(generator.integers(70, 230)))
    return np.asarray(sheet).astype(np.float64)


def _draw_feather(
    draw: ImageDraw.ImageDraw, root: Floats, *, angle: float, spread: float, reach: float, shade: int
) -> None:
    """A bright stem whose barbs, `spread` radians off it, shorten toward the tip, on a darker ground."""
    stem = np.array([math.cos(angle), math.sin(angle)])
    sides = [np.array([math.cos(angle + turn), math.sin(angle + turn)]) for turn in (spread, -spread)]
    tip = root + reach * stem
    wings = [root + 0.3 * reach * side for side in sides]
    draw.polygon([tuple(root), tuple(wings[0]), tuple(tip), tuple(wings[1])], fill=shade // 2 + 30)
    for along in np.arange(0, reach, _BARB_STEP):
        start, barb = root + along * stem, 0.35 * (reach - along)
        for side in sides:
            draw.line([tuple(start), tuple(start + barb * side)], fill=shade)
    draw.line([tuple(root), tuple(tip)], fill=min(shade + 40, 255), width=2)
