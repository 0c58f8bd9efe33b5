"""The pictures that a sweep leaves beside its results."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.bench.tiny import run, tiny_config
from trust_tta.bench.runner import small_picture
from trust_tta.data.class_names import CIFAR10_CLASSES
from trust_tta.data.corruptions.apply import corrupt
from trust_tta.data.sample import load_sample
from trust_tta.results import ResultStore


def decoded(content: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((1, 1), (1, 1)), ((32, 32), (32, 32)), ((64, 64), (64, 64)), ((224, 224), (64, 64)), ((100, 333), (19, 64))],
    ids=str,
)
def test_small_pictures_are_stored_exactly(shape: tuple[int, int], expected: tuple[int, int]) -> None:
    image = np.random.default_rng(0).integers(0, 256, (*shape, 3), dtype=np.uint8)
    found = decoded(small_picture(image))
    assert found.shape == (*expected, 3)
    if shape == expected:
        assert np.array_equal(found, image)


def test_kept_images_are_stored_once_for_all_methods(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, keep_samples=3, data={"domains": ["fog"]}, stream={"seeds": [0, 1]})
    cells, _ = run(config)
    assert len(cells) == 4
    with ResultStore(config.store) as store:
        pictures, names = store.pictures(), store.class_names()
    assert names == {"sample": CIFAR10_CLASSES}
    assert set(pictures) == {(c.key.fingerprint, p.index) for c in cells for p in c.result.predictions}
    assert len(pictures) == 6
    clean, _ = load_sample()
    for cell in cells:
        for p in cell.result.predictions:
            image = corrupt(clean[p.index : p.index + 1], "fog", 5, cell.key.seed, first_index=p.index)[0]
            assert np.array_equal(decoded(pictures[cell.key.fingerprint, p.index]), image)


def test_nothing_is_kept_unless_asked_for(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, methods=["source"], data={"domains": ["fog"]})
    run(config)
    with ResultStore(config.store) as store:
        assert not store.pictures()
        assert not store.class_names()
