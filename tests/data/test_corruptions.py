"""The corruptions as a whole: shapes, seeds, severities, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.data.image_files import make_pictures
from trust_tta.data.corruptions.apply import corrupt
from trust_tta.data.corruptions.table import (
    ALL_CORRUPTIONS,
    CIFAR_LEVELS,
    CORRUPTIONS,
    EXTRA_CORRUPTIONS,
    IMAGENET_LEVELS,
    SEVERITIES,
    TABLES,
    choose_table,
)
from trust_tta.errors import ConfigError, DataError

WITHOUT_CHANCE = {
    "defocus_blur",
    "zoom_blur",
    "brightness",
    "contrast",
    "pixelate",
    "jpeg_compression",
    "gaussian_blur",
    "saturate",
}

# mean |change| at severity 5 of make_pictures(16, 32, 32): a new figure needs a new `generator` in the record
CHANGE_AT_5 = {
    "gaussian_noise": 20.16,
    "shot_noise": 20.22,
    "impulse_noise": 8.83,
    "defocus_blur": 3.92,
    "glass_blur": 9.65,
    "motion_blur": 9.81,
    "zoom_blur": 9.14,
    "snow": 56.94,
    "frost": 42.14,
    "fog": 31.08,
    "brightness": 53.23,
    "contrast": 24.11,
    "elastic_transform": 7.70,
    "pixelate": 4.69,
    "jpeg_compression": 9.18,
    "speckle_noise": 20.76,
    "gaussian_blur": 4.26,
    "spatter": 5.64,
    "saturate": 40.74,
}


def mean_change(before: NDArray[np.uint8], after: NDArray[np.uint8]) -> float:
    return float(np.abs(after.astype(np.int64) - before).mean())


def lost_correlation(before: NDArray[np.uint8], after: NDArray[np.uint8]) -> float:
    """1 - the correlation of each image with its corrupted self, averaged."""
    a, b = (x.reshape(len(x), -1) - x.reshape(len(x), -1).mean(axis=1, keepdims=True) for x in (before, after))
    return float(1 - np.mean((a * b).sum(axis=1) / np.sqrt((a * a).sum(axis=1) * (b * b).sum(axis=1))))


def test_names_are_the_fifteen_and_the_four() -> None:
    assert len(CORRUPTIONS) == 15
    assert len(set(ALL_CORRUPTIONS)) == 19
    assert ALL_CORRUPTIONS == CORRUPTIONS + EXTRA_CORRUPTIONS
    assert set(CIFAR_LEVELS) == set(IMAGENET_LEVELS) == set(ALL_CORRUPTIONS)


@pytest.mark.parametrize("size", [(31, 17), (32, 32), (64, 64), (1, 1), (2, 40)], ids=lambda s: f"{s[0]}x{s[1]}")
@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("name", ALL_CORRUPTIONS)
def test_any_size_gives_bytes_of_the_same_shape(name: str, table: str, size: tuple[int, int]) -> None:
    images = make_pictures(2, *size) if min(size) > 2 else np.full((2, *size, 3), 90, np.uint8)
    before = images.copy()
    for severity in (1, 5):
        result = corrupt(images, name, severity, table=table)
        assert result.shape == images.shape
        assert result.dtype == np.uint8
        assert np.array_equal(images, before)
        if min(size) > 2:
            assert not np.array_equal(result, images)


@pytest.mark.parametrize("name", ALL_CORRUPTIONS)
def test_full_size_images(name: str) -> None:
    images = make_pictures(1, 224, 224)
    result = corrupt(images, name)
    assert result.shape == images.shape
    assert mean_change(images, result) > 2
    assert np.array_equal(result, corrupt(images, name, table="imagenet"))


def test_table_follows_the_size() -> None:
    assert choose_table(None, height=32, width=20) == "cifar"
    assert choose_table(None, height=20, width=33) == "imagenet"
    assert choose_table("imagenet", height=8, width=8) == "imagenet"


@pytest.mark.parametrize("size", [(32, 32), (150, 130)], ids=["32", "150x130"])
@pytest.mark.parametrize("name", ALL_CORRUPTIONS)
def test_batches_change_no_pixel(name: str, size: tuple[int, int]) -> None:
    images = make_pictures(9, *size)
    whole = corrupt(images, name, 4, seed=3)
    parts = [corrupt(images[a:b], name, 4, seed=3, first_index=a) for a, b in ((0, 1), (1, 6), (6, 9))]
    assert np.array_equal(np.concatenate(parts), whole)
    reversed_in_memory = np.ascontiguousarray(images[:, :, ::-1])[:, :, ::-1]
    assert np.array_equal(corrupt(reversed_in_memory, name, 4, seed=3), whole)


def test_workers_change_no_pixel() -> None:
    images = make_pictures(300, 32, 32)
    assert np.array_equal(corrupt(images, "glass_blur", workers=2), corrupt(images, "glass_blur"))


@pytest.mark.parametrize("name", ALL_CORRUPTIONS)
def test_seed_severity_and_index_each_matter(name: str) -> None:
    image = make_pictures(1, 32, 32)
    base = corrupt(image, name, 4)
    others = [corrupt(image, name, 4, seed=1), corrupt(image, name, 4, first_index=1)]
    if name in WITHOUT_CHANCE:
        assert all(np.array_equal(base, other) for other in others)
    else:
        assert not any(np.array_equal(base, other) for other in others)
    assert not np.array_equal(base, corrupt(image, name, 5))


def test_equal_noise_is_not_shared_between_corruptions() -> None:
    grey = np.full((1, 64, 64, 3), 128, np.uint8)
    a, b = (corrupt(grey, name, table="cifar").astype(np.float64) - 128 for name in ("gaussian_noise", "speckle_noise"))
    assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.05


# severities that must do more and more harm; a group in one place holds those that the tables leave unordered
RISING = [[(1,), (2,), (3,), (4,), (5,)]]
CHAINS: dict[tuple[str, str], list[list[tuple[int, ...]]]] = {
    ("cifar", "glass_blur"): [[(1, 2, 3), (4, 5)]],
    ("imagenet", "glass_blur"): [[(1, 2), (3, 4, 5)]],
    ("imagenet", "fog"): [[(1,), (2,), (3, 4, 5)]],
    ("imagenet", "snow"): [[(1,), (2, 3), (4,), (5,)]],
    ("cifar", "motion_blur"): [[(1,), (2,), (3, 4), (5,)]],
    ("cifar", "frost"): [[(1,), (2,), (3, 4), (5,)]],
    ("cifar", "spatter"): [[(1,), (2,), (3,)], [(4,), (5,)]],
    ("cifar", "saturate"): [[(1,), (2,)], [(3,), (4,), (5,)]],
    ("imagenet", "saturate"): [[(1,), (2,)], [(3,), (4,), (5,)]],
}
BY_CORRELATION = {"frost", "fog", "motion_blur"}


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("name", [name for name in ALL_CORRUPTIONS if name != "elastic_transform"])
def test_severity_orders_the_damage(name: str, table: str) -> None:
    few = 24 if name == "fog" else 8  # one cloud covers a whole image, so fog needs more of them
    images = make_pictures(100, 32, 32) if table == "cifar" else make_pictures(few, 96, 128)
    measure = lost_correlation if name in BY_CORRELATION else mean_change
    damage = {s: measure(images, corrupt(images, name, s, table=table)) for s in SEVERITIES}
    for chain in CHAINS.get((table, name), RISING):
        for milder, harder in zip(chain, chain[1:], strict=False):
            assert max(damage[s] for s in milder) < min(damage[s] for s in harder), damage


@pytest.mark.parametrize(("table", "smooth"), [("cifar", 3), ("imagenet", 2)])
def test_elastic_severity_orders_the_roughness(table: str, smooth: int) -> None:
    """The tables trade the affine part for a finer and finer one: straight ramps become ever more crooked."""
    ramp = np.arange(0, 256, 8, dtype=np.uint8)[:, None]
    images = np.ascontiguousarray(np.broadcast_to(ramp, (40, 32, 32, 3)))
    bends = []
    for severity in SEVERITIES:
        result = corrupt(images, "elastic_transform", severity, table=table).astype(np.int64)
        bends.append(float(np.abs(np.diff(result[:, 10:22, 10:22], 2, axis=2)).mean()))
    rough = bends[smooth:]
    assert max(bends[:smooth]) < rough[0]
    assert rough == sorted(rough)
    assert bends[4] > 2 * bends[0]


@pytest.mark.parametrize("name", ALL_CORRUPTIONS)
def test_change_is_what_it_was(name: str) -> None:
    images = make_pictures(16, 32, 32)
    assert mean_change(images, corrupt(images, name)) == pytest.approx(CHANGE_AT_5[name], abs=0.02)


@pytest.mark.parametrize(
    "images",
    [
        np.zeros((2, 8, 8, 3), np.float32),
        np.zeros((8, 8, 3), np.uint8),
        np.zeros((2, 3, 8, 8), np.uint8),
        np.zeros((2, 0, 8, 3), np.uint8),
        [[0]],
    ],
    ids=["float", "one image", "channels first", "no rows", "list"],
)
def test_other_images_are_refused(images: Any) -> None:
    with pytest.raises(DataError, match=r"uint8 \(n, h, w, 3\)"):
        corrupt(images, "fog")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"corruption": "mist"}, "'mist'.*gaussian_noise.*saturate"),
        ({"severity": 0}, "severity 0 .*1 to 5"),
        ({"severity": 2.5}, "severity 2.5 .*1 to 5"),
        ({"severity": True}, "severity True .*1 to 5"),
        ({"seed": -1}, "seed -1 .*integer >= 0"),
        ({"seed": 0.5}, "seed 0.5 .*integer >= 0"),
        ({"table": "cifar100"}, "'cifar100'.*'cifar', 'imagenet'"),
        ({"workers": 0}, "workers 0 .*processes >= 1"),
        ({"first_index": -2}, "first_index -2 .*integer >= 0"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_wrong_options_are_refused_in_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        corrupt(np.zeros((1, 8, 8, 3), np.uint8), **{"corruption": "fog", **options})
    assert "\n" not in str(caught.value)


def test_no_images_give_no_images() -> None:
    assert corrupt(np.zeros((0, 8, 8, 3), np.uint8), "frost").shape == (0, 8, 8, 3)
