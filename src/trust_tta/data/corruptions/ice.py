"""Pictures of frost on a window, drawn rather than photographed: ridged noise overgrown with feathers of ice."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from scipy import ndimage

from trust_tta.data.corruptions.pixels import Floats

_HEIGHT, _WIDTH = 480, 720
_BARB_STEP = 4  # pixels between two pairs of barbs on a stem


@dataclass(frozen=True)
class Ice:
    """One kind of frost: its colour, contrast and mix of noise, haze and feathers."""

    colour: tuple[float, float, float]  # mean of red, green and blue
    contrast: float  # standard deviation, in bytes
    feathers: int
    length: float  # of a feather, in pixels
    haze: float  # weight of the wide, slow variation
    grain: float  # weight of the finest noise


# colour and contrast are those of photographs of frost: a blue pane, two white ones, a grey one and a dark one
ICES = (
    Ice(colour=(78, 149, 166), contrast=20, feathers=250, length=90, haze=1.2, grain=0.25),
    Ice(colour=(201, 205, 214), contrast=18, feathers=900, length=80, haze=0.4, grain=0.35),
    Ice(colour=(204, 207, 212), contrast=18, feathers=1400, length=45, haze=0.6, grain=0.35),
    Ice(colour=(138, 153, 165), contrast=28, feathers=1800, length=25, haze=0.8, grain=0.6),
    Ice(colour=(112, 123, 135), contrast=43, feathers=1100, length=50, haze=1.1, grain=0.3),
)


@lru_cache(maxsize=16)
def frost_picture(variant: int, *, shrinking: int, height: int, width: int) -> NDArray[np.uint8]:
    """One of the pictures, every `shrinking`-th pixel of it, enlarged where it is not larger than height x width."""
    picture = _draw(variant)[shrinking // 2 :: shrinking, shrinking // 2 :: shrinking]
    rows, columns = picture.shape[:2]
    if rows > height and columns > width:
        return picture
    scale = 1.1 * max(height / rows, width / columns)
    size = (math.ceil(columns * scale) + 1, math.ceil(rows * scale) + 1)
    return np.asarray(Image.fromarray(np.ascontiguousarray(picture)).resize(size, Image.Resampling.BICUBIC))


@lru_cache(maxsize=len(ICES))
def _draw(variant: int) -> NDArray[np.uint8]:
    """A whole picture (480, 720, 3), the same in every process."""
    ice, generator = ICES[variant], np.random.Generator(np.random.PCG64(variant))
    layers = (
        0.6 * _ridges(generator),
        ice.haze * _noise(generator, 70.0),
        1.0 * _standard(_feathers(generator, count=ice.feathers, length=ice.length)),
        ice.grain * _noise(generator, 0.6),
    )
    relief = _standard(sum(layers, np.zeros((_HEIGHT, _WIDTH))))
    tinted = np.array(ice.colour) + ice.contrast * relief[..., None]
    return np.clip(tinted, 0, 255).astype(np.uint8)


def _standard(values: Floats) -> Floats:
    centred: Floats = values - values.mean()
    standard: Floats = centred / centred.std()
    return standard


def _noise(generator: np.random.Generator, sigma: float) -> Floats:
    """Smooth noise of mean 0 and deviation 1."""
    smoothed: Floats = ndimage.gaussian_filter(generator.standard_normal((_HEIGHT, _WIDTH)), sigma, mode="wrap")
    return _standard(smoothed)


def _ridges(generator: np.random.Generator) -> Floats:
    """Sharp crests at four scales: they lie where smooth noise changes its sign."""
    crests = [-np.abs(_noise(generator, sigma)) * math.sqrt(sigma) for sigma in (16.0, 8.0, 4.0, 2.0)]
    return _standard(sum(crests, np.zeros((_HEIGHT, _WIDTH))))


def _feathers(generator: np.random.Generator, *, count: int, length: float) -> Floats:
    """Feathers of ice grown over each other in random directions, (480, 720) in 0..255."""
    sheet = Image.new("L", (_WIDTH, _HEIGHT), 96)
    draw = ImageDraw.Draw(sheet)
    for _ in range(count):
        root = generator.uniform((-20, -20), (_WIDTH + 20, _HEIGHT + 20))
        angle, spread = generator.uniform(0, 2 * math.pi), generator.uniform(0.5, 1.0)
        reach = length * math.exp(generator.normal(0, 0.4))
        _draw_feather(draw, root, angle=angle, spread=spread, reach=reach, shade=int(generator.integers(70, 230)))
    return np.asarray(sheet).astype(np.float64)


def _draw_feather(
    draw: ImageDraw.ImageDraw, root: Floats, *, angle: float, spread: float, reach: float, shade: int
) -> None:
    """A bright stem whose barbs, `spread` radians off it, shorten towards the tip, on a darker ground."""
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
