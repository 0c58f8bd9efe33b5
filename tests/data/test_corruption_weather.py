"""Fog, frost, snow and spatter against a closed form or a slow, plain version of the same definition."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import ndimage

from trust_tta.data.corruptions.apply import corrupt
from trust_tta.data.corruptions.loops import chamfer_distance
from trust_tta.data.corruptions.weather import ICES, equalize, find_edges, frost_texture, plasma


def grey(value: int, count: int = 4, side: int = 32) -> NDArray[np.uint8]:
    return np.full((count, side, side, 3), value, np.uint8)


def slow_plasma(noise: NDArray[np.float64], side: int, decay: float) -> NDArray[np.float64]:
    """Diamond-square, point by point; squares, then top edges, then left edges draw their noise."""
    heights, draws, wobble, step = np.zeros((side, side)), iter(noise), 100.0, side
    while step >= 2:
        half = step // 2
        grid = [(y, x) for y in range(0, side, step) for x in range(0, side, step)]
        for dy, dx in ((half, half), (0, half), (half, 0)):
            corners = ((-half, -half), (-half, half), (half, -half), (half, half))
            near = corners if dy and dx else ((-half, 0), (half, 0), (0, -half), (0, half))
            for y, x in grid:
                around = sum(heights[(y + dy + a) % side, (x + dx + b) % side] for a, b in near)
                heights[y + dy, x + dx] = around / 4 + wobble**2 * next(draws)
        step, wobble = half, wobble / decay
    heights -= heights.min()
    scaled: NDArray[np.float64] = heights / heights.max()
    return scaled


@pytest.mark.parametrize(("side", "decay"), [(2, 2.0), (8, 3.0), (32, 1.75)])
def test_plasma_equals_a_plain_diamond_square(side: int, decay: float) -> None:
    noise = np.random.default_rng(0).uniform(-1, 1, (3, side * side))
    clouds = plasma(noise, decay=decay)
    for cloud, own in zip(clouds, noise, strict=True):
        assert np.allclose(cloud, slow_plasma(own, side, decay))


def test_fog_on_black_and_on_white() -> None:
    assert np.all(corrupt(grey(0), "fog") == 0)
    white = corrupt(grey(255), "fog")
    assert white.max(axis=(1, 2, 3)).min() >= 254
    assert white.min() == pytest.approx(255 / (1 + 1.5), abs=1)


@pytest.mark.parametrize("variant", range(len(ICES)))
def test_frost_pictures_are_as_bright_as_photographs(variant: int) -> None:
    picture = frost_texture(variant, shrinking=1, height=224, width=224).astype(np.float64)
    assert picture.mean(axis=(0, 1)) == pytest.approx(ICES[variant].color, abs=3)
    assert picture.std(axis=(0, 1)) == pytest.approx([ICES[variant].contrast] * 3, rel=0.1)


@pytest.mark.parametrize(("shrinking", "height", "width"), [(1, 224, 224), (5, 32, 32), (5, 300, 40), (1, 20, 900)])
def test_frost_pictures_cover_any_image(shrinking: int, height: int, width: int) -> None:
    picture = frost_texture(0, shrinking=shrinking, height=height, width=width)
    assert picture.shape[0] > height
    assert picture.shape[1] > width


def test_frost_weighs_image_and_ice() -> None:
    dark, light = (corrupt(grey(value, count=40), "frost", 5).astype(np.float64) for value in (0, 100))
    assert np.abs(light - dark - 75).max() <= 1
    assert dark.mean() == pytest.approx(0.45 * np.mean([ice.color for ice in ICES]), rel=0.1)


def test_snow_is_point_symmetric_and_whitens() -> None:
    black = corrupt(grey(0), "snow", 1, table="cifar")
    assert np.array_equal(black, black[:, ::-1, ::-1])
    assert black.min() >= int(0.05 * 0.5 * 255)
    assert black.max() > 40


def test_edges_of_a_square_are_its_outline() -> None:
    square = np.zeros((20, 20), np.uint8)
    square[5:15, 6:16] = 200
    edges = find_edges(square)
    near_outline = ndimage.morphological_gradient(square, size=(3, 3)) > 0
    assert np.all(near_outline[edges])
    assert edges.sum() >= 30
    assert not find_edges(np.full((9, 9), 80, np.uint8)).any()


def test_equalized_levels_are_evenly_spread() -> None:
    levels = np.repeat(np.array([3, 4, 9, 10], np.uint8), 25).reshape(10, 10)
    assert np.unique(equalize(levels)).tolist() == [0, 85, 170, 255]
    plain = np.full((4, 4), 7, np.uint8)
    assert np.array_equal(equalize(plain), plain)


def test_chamfer_distance_is_close_to_the_true_one() -> None:
    edges = np.random.default_rng(0).random((40, 53)) < 0.01
    distance = np.empty(edges.shape)
    chamfer_distance(edges, distance)
    true = ndimage.distance_transform_edt(~edges)
    assert np.all(np.abs(distance - true) <= 0.03 * true)
    chamfer_distance(np.zeros((3, 4), bool), nothing := np.zeros((3, 4)))
    assert np.all(np.isinf(nothing))


def test_mud_is_brown_and_water_only_brightens() -> None:
    white, black = grey(255, side=64), grey(0, side=64)
    mud = corrupt(white, "spatter", 5)
    covered = mud[mud[..., 0] < 255]
    assert len(covered) > 50
    assert np.all(covered[:, 0] >= covered[:, 1])
    assert np.all(covered[:, 1] >= covered[:, 2])
    water = corrupt(black, "spatter", 3)
    assert water.max() == pytest.approx(0.5 * 238, abs=1)
    assert np.all(water[..., 0] <= water[..., 1])
