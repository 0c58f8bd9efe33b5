from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from benchmarks.packing import decode, encode, pack, unpack
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.training.samples import noisy_images
from trust_tta.errors import DataError


def smooth_pictures(n: int) -> NDArray[np.uint8]:
    ramp = np.arange(32)
    sheet = ramp[:, None, None] * 3 + ramp[None, :, None] * 2 + np.array([0, 30, 60])
    pictures: NDArray[np.uint8] = (sheet[None] + np.arange(n)[:, None, None, None]).clip(0, 255).astype(np.uint8)
    return pictures


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 5), st.integers(1, 9), st.integers(1, 9), st.integers(0, 2**32 - 1))
def test_any_pixels_come_back(n: int, height: int, width: int, seed: int) -> None:
    images = noisy_images(n, height=height, width=width, seed=seed)
    np.testing.assert_array_equal(decode(encode(images), height, width), images)


def test_extreme_steps_come_back() -> None:
    images = noisy_images(40, height=6, width=5) // 128 * 255  # every difference is 0 or 255
    np.testing.assert_array_equal(decode(encode(images), 6, 5), images)


def test_parts_and_labels_come_back_small(tmp_path: Path) -> None:
    images, labels = smooth_pictures(50), np.arange(50) % 7
    files = pack(images, labels, tmp_path, name="train", parts=3)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["train-0.xz", "train-1.xz", "train-2.xz", "train.json"]
    assert sum(p.stat().st_size for p in files) < images.size / 20
    found, found_labels = unpack(tmp_path, "train")
    np.testing.assert_array_equal(found, images)
    np.testing.assert_array_equal(found_labels, labels)
    assert (found.dtype.name, found_labels.dtype.name) == ("uint8", "int64")


def test_a_missing_or_altered_part_is_named(tmp_path: Path) -> None:
    pack(smooth_pictures(4), np.zeros(4, int), tmp_path, name="a", parts=2)
    part = tmp_path / "a-1.xz"
    content = bytearray(part.read_bytes())
    content[-20] ^= 1
    part.write_bytes(content)
    with pytest.raises(DataError, match=r"a-1\.xz is not what its index lists"):
        unpack(tmp_path, "a")
    part.unlink()
    with pytest.raises(DataError, match=r"cannot read .*a-1\.xz"):
        unpack(tmp_path, "a")
