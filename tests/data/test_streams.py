from __future__ import annotations

import gc
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.trees import class_tree, corrupted_arrays, thumbnails
from trust_tta.data.dataset import Dataset, array_dataset
from trust_tta.data.loading import open_dataset
from trust_tta.data.streams import (
    GRADUAL_SEVERITIES,
    SETTINGS,
    Batches,
    Setting,
    StreamConfig,
    correlated_order,
    draw_sequence,
    parse_setting,
    stream_datasets,
)
from trust_tta.errors import ConfigError, DataError
from trust_tta.preprocessing import PRESETS

DOMAINS = ("gaussian_noise", "fog", "contrast")


def _datasets(images: int = 53, classes: int = 10) -> list[Dataset]:
    labels = np.random.default_rng(1).permutation(np.arange(images) % classes)
    names = [str(k) for k in range(classes)]
    return [
        array_dataset(thumbnails(images, seed=k), labels, names, name="x", domain=domain, severity=5)
        for k, domain in enumerate(DOMAINS)
    ]


def _indices(batches: Batches) -> list[int]:
    return [int(i) for batch in batches for i in batch.indices]


@settings(max_examples=60, deadline=None)
@given(
    setting=st.sampled_from(
        ["online", "continual", "standard", "mixed", "correlated", "online+correlated", "mixed+correlated"]
    ),
    images=st.integers(1, 40),
    batch_size=st.integers(1, 17),
    limit=st.none() | st.integers(1, 50),
    shuffle=st.booleans(),
    seed=st.integers(0, 5),
)
def test_each_index_comes_exactly_once(
    setting: str, images: int, batch_size: int, limit: int | None, shuffle: bool, seed: int
) -> None:
    config = StreamConfig(setting=setting, batch_size=batch_size, seed=seed, shuffle=shuffle, limit=limit)
    datasets = _datasets(images, classes=3)
    for domain in stream_datasets(datasets, config, workers=0):
        parts = len(datasets) if parse_setting(config.setting).mixed else 1
        expected = parts * min(images, limit or images)
        found = _indices(domain.batches)
        assert len(found) == len(set(found)) == expected == domain.batches.images
        if limit is None:
            assert sorted(found) == list(range(parts * images))
        sizes = [len(batch) for batch in domain.batches]
        assert len(sizes) == len(domain.batches)
        assert all(size == batch_size for size in sizes[:-1])
        for batch in domain.batches:
            assert (batch.labels.numpy() == domain.dataset.labels[batch.indices.numpy()]).all()


def test_images_belong_to_their_labels_and_indices() -> None:
    (domain, *_) = stream_datasets(_datasets(), StreamConfig(batch_size=10), workers=2)
    for batch in domain.batches:
        expected = np.stack([domain.dataset.image(int(i)) for i in batch.indices])
        assert batch.images.dtype == torch.uint8
        assert (batch.images.numpy() == expected).all()


def test_mixed_images_come_from_their_own_domain() -> None:
    datasets = _datasets()
    (domain,) = stream_datasets(datasets, StreamConfig(setting="mixed", batch_size=10), workers=0)
    assert domain.name == "mixed"
    origins = []
    for batch in domain.batches:
        for image, index in zip(batch.images.numpy(), batch.indices.tolist(), strict=True):
            assert (image == datasets[index // 53].image(index % 53)).all()
            origins.append(index // 53)
    # three domains shuffled together change about two times in three from one image to the next
    assert 80 < np.count_nonzero(np.diff(origins)) < 130


def test_drop_last() -> None:
    (domain, *_) = stream_datasets(_datasets(), StreamConfig(batch_size=10, drop_last=True), workers=0)
    assert [len(batch) for batch in domain.batches] == [10] * 5
    assert (len(domain.batches), domain.batches.images) == (5, 50)


@pytest.mark.parametrize("setting", ["online", "mixed", "correlated"])
def test_seeds_decide_the_order(setting: str) -> None:
    def run(seed: int) -> list[list[int]]:
        config = StreamConfig(setting=setting, seed=seed, batch_size=7)
        return [_indices(domain.batches) for domain in stream_datasets(_datasets(), config, workers=0)]

    assert run(0) == run(0)
    assert run(0) != run(1)


def test_seeds_decide_which_images_a_limit_keeps() -> None:
    kept = []
    for seed in (0, 0, 1):
        (domain, *_) = stream_datasets(_datasets(), StreamConfig(limit=20, seed=seed, shuffle=False), workers=0)
        kept.append(_indices(domain.batches))
    assert kept[0] == kept[1] == sorted(kept[0])
    assert set(kept[0]) != set(kept[2])


def test_a_domain_comes_out_the_same_in_any_company() -> None:
    config = StreamConfig(limit=20, batch_size=8)
    datasets = _datasets()
    together = {d.name: _indices(d.batches) for d in stream_datasets(datasets, config, workers=0)}
    alone = {d.name: _indices(d.batches) for d in stream_datasets(datasets[1:2], config, workers=0)}
    assert together["fog"] == alone["fog"]
    assert together["fog"] != together["contrast"]


def test_iterating_twice_gives_the_same_batches_whatever_the_workers() -> None:
    for workers in (0, 1, 3):
        (domain, *_) = stream_datasets(
            _datasets(), StreamConfig(batch_size=10), preprocessing=PRESETS["cifar32"], workers=workers
        )
        first, second = list(domain.batches), list(domain.batches)
        assert len(first) == 6
        assert all(torch.equal(a.images, b.images) for a, b in zip(first, second, strict=True))
        reference = domain.batches.load(2)
        assert torch.equal(first[2].images, reference.images)
        assert torch.equal(first[2].indices, reference.indices)


def test_a_stream_left_early_leaves_no_threads() -> None:
    (domain, *_) = stream_datasets(_datasets(), StreamConfig(batch_size=1), workers=2)
    batches = iter(domain.batches)
    next(batches)
    assert any(thread.name.startswith("decode") for thread in threading.enumerate())
    del batches
    gc.collect()
    assert not any(thread.name.startswith("decode") for thread in threading.enumerate())


def test_a_broken_image_ends_the_iteration_with_its_name(tmp_path: Path) -> None:
    class_tree(tmp_path, ["a", "b"], per_class=3)
    (tmp_path / "b" / "pic_001.jpg").write_bytes(b"no image")
    (domain,) = stream_datasets(
        [open_dataset("folder", tmp_path)], StreamConfig(batch_size=2), preprocessing=PRESETS["pacs96"], workers=2
    )
    with pytest.raises(DataError, match=r"pic_001\.jpg cannot be read"):
        list(domain.batches)


def test_pictures_of_several_sizes_need_a_preprocessing(tmp_path: Path) -> None:
    class_tree(tmp_path, ["a", "b"], per_class=3)
    (domain,) = stream_datasets([open_dataset("folder", tmp_path)], StreamConfig(), workers=0)
    with pytest.raises(DataError, match="has images of 6 sizes"):
        list(domain.batches)


@pytest.mark.parametrize(
    ("setting", "before", "each"),
    [
        ("online", [True, True, True], False),
        ("continual", [True, False, False], False),
        ("standard", [True, False, False], True),
        ("correlated", [True, False, False], False),
        ("online+correlated", [True, True, True], False),
        ("mixed", [True], False),
    ],
)
def test_when_the_network_is_reset(setting: str, before: list[bool], each: bool) -> None:
    domains = list(stream_datasets(_datasets(), StreamConfig(setting=setting), workers=0))
    assert [domain.reset_before for domain in domains] == before
    assert {domain.reset_each_batch for domain in domains} == {each}


def _mean_run(labels: np.ndarray[tuple[int], np.dtype[np.int64]]) -> float:
    return len(labels) / (1 + np.count_nonzero(np.diff(labels)))


@pytest.mark.parametrize(("classes", "factor"), [(10, 50), (150, 2)])
def test_correlated_streams_come_in_runs(classes: int, factor: int) -> None:
    labels = np.arange(6000) % classes
    generator = np.random.default_rng(0)
    shuffled = _mean_run(generator.permutation(labels))
    runs = {
        gamma: _mean_run(labels[correlated_order(labels, gamma=gamma, generator=generator)])
        for gamma in (0.001, 0.1, 1.0, 1000.0)
    }
    assert shuffled < 1.2
    assert runs[0.1] > factor * shuffled
    assert runs[0.001] > runs[0.1] > runs[1.0] >= runs[1000.0]
    # nearly every class in one slot: hardly more runs than classes
    assert runs[0.001] > 0.6 * 6000 / classes
    # evenly shared out: each of the slots holds each class once
    assert runs[1000.0] == pytest.approx(max(1, 6000 / (classes * min(classes, 100))), rel=0.1)


def test_correlated_batches_hold_few_classes() -> None:
    (plain, *_) = stream_datasets(_datasets(2000), StreamConfig(setting="online", batch_size=50), workers=0)
    (runs, *_) = stream_datasets(_datasets(2000), StreamConfig(setting="correlated", batch_size=50), workers=0)
    mean = [np.mean([len(batch.labels.unique()) for batch in domain.batches]) for domain in (plain, runs)]
    assert mean[0] > 9
    assert mean[1] < 5


@pytest.mark.parametrize("setting", ["gradual", "online+gradual"])
def test_gradual_severities(tmp_path: Path, setting: str) -> None:
    corrupted_arrays(tmp_path / "CIFAR-10-C", ["fog", "snow"], images=11)
    datasets = [
        open_dataset("cifar10-c", tmp_path, domain=domain, severity=severity)
        for domain in ("snow", "fog")
        for severity in GRADUAL_SEVERITIES
    ]
    domains = list(stream_datasets(datasets, StreamConfig(setting=setting, batch_size=4), workers=0))
    path = [1, 2, 3, 4, 5, 4, 3, 2, 1]
    assert [domain.dataset.severity for domain in domains] == 2 * path
    assert [int(next(iter(domain.batches)).images[0, 0, 0, 0]) for domain in domains] == 2 * path
    assert [domain.dataset.domain for domain in domains] == ["snow"] * 9 + ["fog"] * 9
    assert len({domain.name for domain in domains}) == 18
    assert [domain.name for domain in domains[3:6]] == ["snow/4", "snow/5", "snow/4-falling"]
    again = setting == "online+gradual"
    assert [domain.reset_before for domain in domains] == [True, *[False] * 8, again, *[False] * 8]


def test_a_stream_takes_a_preprocessing() -> None:
    config = StreamConfig(batch_size=4, limit=7)
    (first, *_) = stream_datasets(_datasets(11), config, preprocessing=PRESETS["cifar32"], workers=0)
    assert [tuple(batch.images.shape) for batch in first.batches] == [(4, 3, 32, 32), (3, 3, 32, 32)]


def test_streams_are_opened_as_they_are_reached(tmp_path: Path) -> None:
    corrupted_arrays(tmp_path, ["fog", "snow"], images=11)
    datasets = (open_dataset("cifar10-c", tmp_path, domain=domain) for domain in ("fog", "frost"))
    stream = stream_datasets(datasets, StreamConfig(), workers=0)
    assert next(stream).name == "fog"
    with pytest.raises(DataError, match=r"frost\.npy is missing"):
        next(stream)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("online", Setting("domain")),
        ("standard", Setting("batch")),
        ("mixed", Setting("never", mixed=True)),
        ("mixed+correlated", Setting("never", mixed=True, correlated=True)),
        ("gradual+correlated", Setting("never", gradual=True, correlated=True)),
        ("online+correlated", Setting("domain", correlated=True)),
        ("continual + correlated", Setting("never", correlated=True)),
        ("correlated", Setting("never", correlated=True)),
    ],
)
def test_settings_of_the_field(text: str, expected: Setting) -> None:
    assert parse_setting(text) == expected
    assert parse_setting(expected.name) == expected


@pytest.mark.parametrize("name", SETTINGS)
def test_plain_settings_keep_their_name(name: str) -> None:
    assert parse_setting(name).name == name


@pytest.mark.parametrize("text", ["", "offline", "online+standard", "mixed+gradual", "correlated+correlated"])
def test_settings_that_make_no_sense(text: str) -> None:
    with pytest.raises(ConfigError, match="the setting"):
        StreamConfig(setting=text)


def test_mistakes() -> None:
    for wrong in ({"batch_size": 0}, {"limit": 0}, {"seed": -1}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            StreamConfig(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="gamma is nan"):
        StreamConfig(gamma=float("nan"))


def test_a_sequence_draws_every_pair_once_before_any_twice() -> None:
    pairs = [(domain, severity) for domain in DOMAINS for severity in (1, 2, 3, 4, 5)]
    drawn = draw_sequence(pairs, count=100, seed=3)
    for start in range(0, 90, 15):
        assert len(set(drawn[start : start + 15])) == 15
    assert draw_sequence(pairs, count=70, seed=3) == drawn[:70]
    assert draw_sequence(pairs, count=100, seed=4) != drawn


def test_a_sequence_never_resets_and_brings_other_images_each_time() -> None:
    fog = _datasets()[1]
    stream = list(stream_datasets([fog] * 3, StreamConfig(setting="sequence", batch_size=4, limit=8), workers=0))
    assert [domain.name for domain in stream] == ["001-fog/5", "002-fog/5", "003-fog/5"]
    assert [domain.reset_before for domain in stream] == [True, False, False]
    indices = [_indices(domain.batches) for domain in stream]
    assert all(len(set(found)) == 8 for found in indices)
    assert len({tuple(sorted(found)) for found in indices}) == 3
    again = list(stream_datasets([fog] * 3, StreamConfig(setting="online+sequence", batch_size=4, limit=8), workers=0))
    assert [_indices(domain.batches) for domain in again] == indices
    assert all(domain.reset_before for domain in again)
    with pytest.raises(ConfigError, match="choose one of mixed, gradual, sequence"):
        parse_setting("mixed+sequence")
