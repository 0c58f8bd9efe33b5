from __future__ import annotations

import numpy as np
import pytest

from trust_tta.data.class_matching import fold_name, imagenet_r_labels
from trust_tta.data.class_names import imagenet_classes, label_of_wnid
from trust_tta.data.registry import DATASETS, DatasetSpec, find_domain, find_spec
from trust_tta.errors import ConfigError


def test_names_are_unique_and_folder_names_belong_to_one_data_set() -> None:
    twice = ("voc20", "context59", "context60")  # the same pictures, labeled in several ways or below one folder
    folders = [fold_name(name) for spec in DATASETS if spec.name not in twice for name in spec.folders]
    assert len(folders) == len(set(folders))
    assert len({spec.name for spec in DATASETS}) == len(DATASETS)


@pytest.mark.parametrize(
    ("name", "classes", "domains", "images"),
    [
        ("cifar10", 10, 1, 10_000),
        ("cifar100", 100, 1, 10_000),
        ("cifar10-c", 10, 15, 150_000),
        ("cifar100-c", 100, 15, 150_000),
        ("imagenet", 1000, 1, 50_000),
        ("imagenet-c", 1000, 15, 750_000),
        ("imagenet-sketch", 1000, 1, 50_889),
        ("imagenet-v2", 1000, 3, 30_000),
        ("imagenet-r", 1000, 1, 30_000),
        ("pacs", 7, 4, 9_991),
    ],
)
def test_figures_of_the_published_sets(name: str, classes: int, domains: int, images: int) -> None:
    spec = find_spec(name)
    assert (spec.classes, len(spec.targets)) == (classes, domains)
    assert sum(domain.images for domain in spec.domains if domain.target) == images
    assert spec.license
    assert spec.homepage.startswith("https://")


@pytest.mark.parametrize("spelling", ["CIFAR-10-C", "cifar10c", "Cifar10_C", "cifar10-c"])
def test_any_spelling_finds_the_set(spelling: str) -> None:
    assert find_spec(spelling).name == "cifar10-c"


def test_unknown_set_and_domain_name_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"unknown data set 'cifar11'; did you mean 'cifar10'\?"):
        find_spec("cifar11")
    with pytest.raises(ConfigError, match="pacs has no domain 'clipart'; choose one of art_painting, cartoon"):
        find_domain(find_spec("pacs"), "clipart")
    with pytest.raises(ConfigError, match="pacs has several domains; choose one of art_painting"):
        find_domain(find_spec("pacs"), None)


def test_domains_in_any_spelling() -> None:
    pacs = find_spec("pacs")
    assert find_domain(pacs, "Art-Painting").name == find_domain(pacs, "art").name == "art_painting"
    v2 = find_spec("imagenet-v2")
    assert find_domain(v2, "imagenetv2-threshold0.7-format-val").name == "threshold0.7"
    assert find_domain(find_spec("cifar10"), None).name == "test"
    assert not find_domain(find_spec("cifar10-c"), "spatter").target


@pytest.mark.parametrize("spec", DATASETS, ids=lambda spec: spec.name)
def test_class_names_are_sorted_where_labels_follow_the_alphabet(spec: DatasetSpec) -> None:
    if spec.name in ("cifar100", "cifar100-c", "cifar10", "pacs"):
        assert list(spec.class_names) == sorted(set(spec.class_names))


def test_imagenet_labels_are_the_ranks_of_the_sorted_wnids() -> None:
    wnids = [c.wnid for c in imagenet_classes()]
    assert wnids == sorted(set(wnids))
    assert len(wnids) == 1000
    # well-known labels of the 1000-class task
    known = {"n01440764": 0, "n02099601": 207, "n02123045": 281, "n03642806": 620, "n07753592": 954, "n15075141": 999}
    assert {wnid: label_of_wnid()[wnid] for wnid in known} == known
    assert imagenet_classes()[281].name == "tabby"


def test_rendition_mask() -> None:
    mask = imagenet_r_labels()
    assert mask.dtype == np.int64
    assert len(mask) == 200
    assert (np.diff(mask) > 0).all()
    # the opening of the mask that the authors of ImageNet-R publish
    assert mask[:12].tolist() == [1, 2, 4, 6, 8, 9, 11, 13, 22, 23, 26, 29]
