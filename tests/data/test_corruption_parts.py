"""Noise, blur and digital changes against a closed form or a slow, plain version of the same definition."""

from __future__ import annotations

import colorsys
import io
import math

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from scipy import ndimage

from tests.data.image_files import make_pictures
from trust_tta.data.corruptions.apply import corrupt
from trust_tta.data.corruptions.blur import blur_along, disk_kernel, streak_weights, zoom_places
from trust_tta.data.corruptions.digital import affine_places, hsv_to_rgb, rgb_to_hsv
from trust_tta.data.corruptions.loops import gather_neighbors, sample
from trust_tta.data.corruptions.table import CIFAR_LEVELS, IMAGENET_LEVELS, SEVERITIES, TABLES, level_of


def grey(value: int, count: int = 4, side: int = 32) -> NDArray[np.uint8]:
    return np.full((count, side, side, 3), value, np.uint8)


@pytest.mark.parametrize("severity", SEVERITIES)
def test_gaussian_noise_has_its_deviation(severity: int) -> None:
    noise = corrupt(grey(128, side=64), "gaussian_noise", severity, table="cifar") - 128.0
    (deviation,) = CIFAR_LEVELS["gaussian_noise"][severity - 1]
    assert noise.std() == pytest.approx(255 * deviation, rel=0.02)
    assert noise.mean() == pytest.approx(-0.5, abs=0.4)  # bytes are cut off, not rounded


@pytest.mark.parametrize(("value", "rate"), [(200, 50), (40, 50), (120, 500)])
def test_shot_noise_varies_as_its_mean(value: int, rate: int) -> None:
    severity = {500: 1, 50: 5}[rate]
    noisy = corrupt(grey(value, side=64), "shot_noise", severity, table="cifar") / 255
    unclipped = noisy < 0.99
    assert unclipped.mean() > 0.85
    assert np.var(noisy) == pytest.approx(value / 255 / rate, rel=0.12)


def test_speckle_noise_grows_with_the_brightness() -> None:
    spread = [corrupt(grey(v, side=64), "speckle_noise", 1).astype(np.float64).std() for v in (0, 50, 100)]
    assert spread[0] == 0
    assert spread[1:] == pytest.approx([50 * 0.15, 100 * 0.15], rel=0.04)


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("severity", SEVERITIES)
def test_impulse_noise_replaces_its_share(severity: int, table: str) -> None:
    noisy = corrupt(grey(77, side=96), "impulse_noise", severity, table=table)
    (amount,) = level_of("impulse_noise", severity, table)
    assert set(np.unique(noisy)) == {0, 77, 255}
    assert (noisy == 0).mean() == pytest.approx(amount / 2, rel=0.12)
    assert (noisy == 255).mean() == pytest.approx(amount / 2, rel=0.12)


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize(
    "name", ["defocus_blur", "gaussian_blur", "zoom_blur", "motion_blur", "glass_blur", "pixelate"]
)
def test_blur_keeps_a_plain_surface(name: str, table: str) -> None:
    for severity in SEVERITIES:
        result = corrupt(grey(200), name, severity, table=table).astype(np.int64)
        loosest = 3 if name == "defocus_blur" and table == "imagenet" else 2 if name == "glass_blur" else 1
        assert np.abs(result - 200).max() <= loosest


@pytest.mark.parametrize("level", CIFAR_LEVELS["defocus_blur"] + IMAGENET_LEVELS["defocus_blur"][:3], ids=str)
def test_disk_is_round_and_sums_to_one(level: tuple[float, float]) -> None:
    kernel = disk_kernel(*level)
    assert kernel.sum() == pytest.approx(1)
    assert np.allclose(kernel, kernel.T)
    assert np.allclose(kernel, kernel[::-1])
    far = np.hypot(*np.indices(kernel.shape) - kernel.shape[0] // 2) > level[0] + math.sqrt(2)
    assert np.all(kernel[far] == 0)


def test_defocus_spreads_a_point_into_its_disk() -> None:
    point = np.zeros((1, 41, 41, 3), np.uint8)
    point[0, 20, 20] = 255
    expected = 255 * np.pad(disk_kernel(6, 0.5), 12)
    assert np.abs(corrupt(point, "defocus_blur", 3)[0, ..., 1] - expected).max() < 1


@pytest.mark.parametrize("level", CIFAR_LEVELS["motion_blur"] + IMAGENET_LEVELS["motion_blur"], ids=str)
def test_motion_weights_sum_to_one_and_fall(level: tuple[float, float]) -> None:
    weights = streak_weights(*level)
    assert len(weights) == 2 * level[0] + 1
    assert weights.sum() == pytest.approx(1)
    assert np.all(np.diff(weights) < 0)
    assert weights[2] / weights[0] == pytest.approx(math.exp(-2 / level[1] ** 2))


@pytest.mark.parametrize("angle", [0.0, -30.0, 45.0, -90.0, 117.0])
def test_motion_blur_equals_a_plain_walk(angle: float) -> None:
    images = make_pictures(1, 13, 19)
    weights = streak_weights(4, 2.5)
    expected = np.zeros(images.shape[1:])
    for y, x in np.ndindex(13, 19):
        for i, weight in enumerate(weights):
            row = y + math.ceil(i * math.sin(math.radians(angle)) - 0.5)
            column = x + math.ceil(i * math.cos(math.radians(angle)) - 0.5)
            expected[y, x] += weight * images[0, min(max(row, 0), 12), min(max(column, 0), 18)]
    result = blur_along(images, np.array([angle]), radius=4, sigma=2.5)
    assert np.array_equal(result[0], np.floor(expected + 0.5).astype(np.uint8))


@pytest.mark.parametrize(("side", "factor"), [(32, 1.0), (32, 1.13), (32, 2.25), (31, 1.26), (224, 1.31), (17, 4.5)])
def test_zoom_reads_where_scipy_does(side: int, factor: float) -> None:
    line = np.random.default_rng(0).random(side)
    crop = math.ceil(side / factor)
    start = (side - crop) // 2
    zoomed = ndimage.zoom(line[start : start + crop], factor, order=1)
    first = (len(zoomed) - side) // 2
    places = zoom_places(side, factor)
    assert np.allclose(np.interp(places, np.arange(side), line), zoomed[first : first + side])


def test_glass_takes_colours_from_near_pixels() -> None:
    places = np.arange(20 * 24, dtype=np.int64).reshape(1, 20, 24, 1)
    moved = places.copy()
    shifts = np.random.default_rng(0).integers(-3, 3, (1, 1, 14, 18, 2), dtype=np.int8)
    gather_neighbors(moved, shifts, 3)
    right, down = np.abs(moved % 24 - places % 24), np.abs(moved // 24 - places // 24)
    assert down.max() <= 9  # a colour may be handed on, three pixels at a time
    assert right.max() <= 9
    assert np.array_equal(moved[:, :4], places[:, :4])
    assert np.array_equal(moved[:, :, :4], places[:, :, :4])
    assert (moved != places).mean() > 0.5
    before = make_pictures(1, 20, 24)
    after = corrupt(before, "glass_blur", 1, table="cifar")  # sigma 0.05 blurs nothing
    colours = {tuple(pixel) for pixel in before.reshape(-1, 3)}
    assert {tuple(pixel) for pixel in after.reshape(-1, 3)} <= colours


@pytest.mark.parametrize(("repeat_edge", "mode"), [(1, "reflect"), (0, "mirror")])
def test_sampling_equals_scipy(repeat_edge: int, mode: str) -> None:
    rng = np.random.default_rng(0)
    images = rng.random((2, 11, 7, 3))
    rows, columns = rng.uniform(-30, 40, (2, 11, 7)), rng.uniform(-20, 25, (2, 11, 7))
    result = np.empty_like(images)
    sample(images, rows, columns, repeat_edge, result)
    for i, c in np.ndindex(2, 3):
        expected = ndimage.map_coordinates(images[i, ..., c], (rows[i], columns[i]), order=1, mode=mode)
        assert np.allclose(result[i, ..., c], expected)


def test_affine_map_brings_the_corners_to_their_goals() -> None:
    height, width = 30, 42
    moves = np.random.default_rng(0).integers(-4, 5, (5, 3, 2)).astype(np.float64)
    rows, columns = affine_places(moves, height=height, width=width)
    for k, (sx, sy) in enumerate(((1, 1), (1, -1), (-1, -1))):
        x, y = 21 + 10 * sx, 15 + 10 * sy
        for i in range(5):
            gx, gy = (np.array([x, y]) + moves[i, k]).astype(int)
            assert rows[i, gy, gx] == pytest.approx(y)
            assert columns[i, gy, gx] == pytest.approx(x)


def test_colours_agree_with_the_standard_library() -> None:
    rgb = np.random.default_rng(0).integers(0, 6, (200, 3)) / 5.0
    hsv = np.stack(rgb_to_hsv(rgb), axis=-1)
    assert np.allclose(hsv, [colorsys.rgb_to_hsv(*colour) for colour in rgb])
    assert np.allclose(hsv_to_rgb(*hsv.T), rgb)
    shifted = np.clip(hsv * [1, 0.5, 0.7], 0, 1)
    assert np.allclose(hsv_to_rgb(*shifted.T), [colorsys.hsv_to_rgb(*colour) for colour in shifted])


@pytest.mark.parametrize(("severity", "expected"), [(1, 112), (3, 138), (5, 176)])
def test_brightness_shifts_grey(severity: int, expected: int) -> None:
    assert np.all(corrupt(grey(100), "brightness", severity) == expected)
    assert np.all(corrupt(grey(250), "brightness", 5) == 255)


def test_saturate_leaves_grey_and_drains_colour() -> None:
    assert np.all(corrupt(grey(100), "saturate", 2) == 100)
    red = np.zeros((1, 8, 8, 3), np.uint8)
    red[..., 0] = 200
    drained = corrupt(red, "saturate", 1).astype(np.int64)
    assert np.abs(drained - [200, 140, 140]).max() <= 1  # value kept, saturation 0.3


@pytest.mark.parametrize("severity", SEVERITIES)
def test_contrast_draws_halves_to_their_mean(severity: int) -> None:
    halves = np.zeros((1, 8, 8, 3), np.uint8)
    halves[:, :4] = [200, 100, 40]
    (factor,) = CIFAR_LEVELS["contrast"][severity - 1]
    result = corrupt(halves, "contrast", severity)
    means = np.array([100, 50, 20])
    assert np.abs(result[0, 0, 0] - means * (1 + factor)).max() <= 1
    assert np.abs(result[0, 7, 7] - means * (1 - factor)).max() <= 1


@pytest.mark.parametrize(("table", "severity", "quality"), [("cifar", 5, 40), ("cifar", 1, 80), ("imagenet", 5, 7)])
def test_jpeg_equals_pillow(table: str, severity: int, quality: int) -> None:
    images = make_pictures(2, 31, 17)
    result = corrupt(images, "jpeg_compression", severity, table=table)
    for image, own in zip(images, result, strict=True):
        file = io.BytesIO()
        Image.fromarray(image).save(file, "JPEG", quality=quality)
        assert np.array_equal(own, np.asarray(Image.open(file)))


def test_pixelate_makes_blocks_of_means() -> None:
    images = make_pictures(1, 64, 64)
    result = corrupt(images, "pixelate", 5).reshape(16, 4, 16, 4, 3)
    means = images.reshape(16, 4, 16, 4, 3).mean(axis=(1, 3))
    assert np.ptp(result, axis=(1, 3)).max() == 0
    assert np.abs(result[:, 0, :, 0] - means).max() <= 1  # rows and columns are rounded one after the other
