"""Images that are corrupted as they are read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.bench.tiny import tiny_config
from trust_tta.bench.config import DataConfig
from trust_tta.bench.data import CorruptedImages, ExperimentData
from trust_tta.data.corruptions.apply import corrupt
from trust_tta.data.dataset import ArrayImages
from trust_tta.data.sample import load_sample
from trust_tta.errors import ConfigError, DataError


@pytest.fixture(scope="module")
def sample() -> ExperimentData:
    return ExperimentData(DataConfig(dataset="sample", domains=("clean", "fog", "snow")))


def test_a_lazily_corrupted_image_equals_that_of_the_corrupted_array(sample: ExperimentData) -> None:
    images, labels = load_sample()
    dataset = sample.open("fog", severity=3, seed=7)
    whole = corrupt(images[:40], "fog", 3, 7)
    for index in (39, 0, 17):
        np.testing.assert_array_equal(dataset.image(index), whole[index])
    np.testing.assert_array_equal(dataset.labels, labels)
    assert (dataset.domain, dataset.severity) == ("fog", 3)


def test_clean_images_are_left_alone(sample: ExperimentData) -> None:
    images, _ = load_sample()
    dataset = sample.open("clean", severity=5, seed=0)
    np.testing.assert_array_equal(dataset.image(5), images[5])
    assert dataset.severity is None


def test_a_fingerprint_depends_on_the_corruption_alone(sample: ExperimentData) -> None:
    def fingerprint(corruption: str, severity: int, seed: int, *, read: int = 0) -> str:
        dataset = sample.open(corruption, severity=severity, seed=seed)
        dataset.image(read)
        return dataset.fingerprint

    assert fingerprint("fog", 5, 0) == fingerprint("fog", 5, 0, read=1999)
    others = [fingerprint("fog", 5, 0), fingerprint("fog", 5, 1), fingerprint("fog", 4, 0), fingerprint("snow", 5, 0)]
    assert len(set(others)) == 4


def test_a_fingerprint_follows_the_pixels() -> None:
    clean = np.arange(4 * 8 * 8 * 3, dtype=np.int64).reshape(4, 8, 8, 3).astype(np.uint8)
    other = clean.copy()
    other[3, 0, 0, 0] += 1
    one, two = (CorruptedImages(ArrayImages(images), "contrast", 5, 0).digest() for images in (clean, other))
    assert one != two


def test_an_array_is_corrupted_like_the_sample(tmp_path: Path) -> None:
    images, labels = load_sample()
    np.save(tmp_path / "x.npy", images[:9])
    np.save(tmp_path / "y.npy", labels[:9].astype(np.uint8))
    config = DataConfig(dataset="array", images=str(tmp_path / "x.npy"), labels=str(tmp_path / "y.npy"))
    source = ExperimentData(config)
    dataset = source.open("snow", severity=2, seed=1)
    np.testing.assert_array_equal(dataset.image(8), corrupt(images[:9], "snow", 2, 1)[8])
    assert len(dataset) == 9


def test_clean_images_of_a_set_that_has_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not known which images of folder are clean; name their domain"):
        ExperimentData(DataConfig(dataset="folder", root=str(tmp_path))).clean()


def test_the_clean_images_of_a_domain_that_was_left_out_are_those_of_the_others(tmp_path: Path) -> None:
    sizes = {"art_painting": 2, "photo": 3, "sketch": 4}
    for domain, count in sizes.items():
        folder = tmp_path / "PACS" / domain / "dog"
        folder.mkdir(parents=True)
        for number in range(count):
            Image.new("RGB", (8, 8), (count, number, 0)).save(folder / f"{number}.png")
    source = ExperimentData(DataConfig(dataset="pacs", root=str(tmp_path)))
    assert [len(source.clean(domain)) for domain in sizes] == [7, 6, 5]
    assert {int(source.clean("photo").image(i)[0, 0, 0]) for i in range(6)} == {2, 4}
    stream = source.clean_stream("sketch", batch_size=4, limit=3, workers=0)
    assert (stream.dataset.domain, stream.batches.images) == ("clean", 3)

    alone = ExperimentData(DataConfig(dataset="pacs", root=str(tmp_path / "alone")))
    (tmp_path / "alone" / "PACS").mkdir(parents=True)
    (tmp_path / "PACS" / "photo").rename(tmp_path / "alone" / "PACS" / "photo")
    with pytest.raises(ConfigError, match="no domain of pacs but photo"):
        alone.clean("photo")


def test_a_missing_data_set_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cifar10-c is not in"):
        ExperimentData(DataConfig(dataset="cifar10-c", root=str(tmp_path))).domains()


def test_the_same_images_come_in_every_run(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    first, second = (
        ExperimentData(config.data).stream(config.stream, batch_size=16, seed=0, workers=0)[1].batches.order
        for _ in range(2)
    )
    np.testing.assert_array_equal(first, second)
    assert len(first) == 50
