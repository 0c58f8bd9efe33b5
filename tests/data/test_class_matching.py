from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.data.trees import class_tree, thumbnails
from trust_tta.data.arrays import open_labels
from trust_tta.data.check import check_root
from trust_tta.data.class_matching import match_classes, numeric_class_names
from trust_tta.data.class_names import CIFAR10_CLASSES, imagenet_classes
from trust_tta.data.dataset import align_classes, array_dataset
from trust_tta.data.loading import open_dataset
from trust_tta.errors import ConfigError, DataError


def test_names_in_another_order_are_matched_by_name() -> None:
    network = tuple(reversed(CIFAR10_CLASSES))
    match = match_classes(CIFAR10_CLASSES, network)
    assert [network[k] for k in match.outputs] == list(CIFAR10_CLASSES)
    assert match.warning == ""


def test_labels_follow_the_network() -> None:
    dataset = array_dataset(thumbnails(4), np.array([0, 1, 2, 2]), ["ape", "bee", "cat"], name="x", domain="all")
    aligned, warning = align_classes(dataset, ("cat", "ape", "bee"), source="'net.pth'")
    assert aligned.labels.tolist() == [1, 2, 0, 0]
    assert aligned.class_names == ("cat", "ape", "bee")
    assert warning == ""
    assert align_classes(dataset, ("ape", "bee", "cat"), source="'net.pth'")[0] is dataset


def test_a_near_miss_shows_both_lists() -> None:
    """Sorted, `Truck` comes first: every label would be off by one."""
    names = tuple(sorted([*CIFAR10_CLASSES[:-1], "Truck"]))
    with pytest.raises(ConfigError, match="'Truck' is spelled 'truck' in the network; rename it") as caught:
        match_classes(names, CIFAR10_CLASSES, data="photos", source="'net.pth'")
    assert "photos has Truck, airplane, automobile" in str(caught.value)
    assert "'net.pth' has airplane, automobile" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("names", [("ape", "bee", "dog"), ("ape", "dog"), ("ape", "bee", "cat", "dog")])
def test_unknown_classes_are_refused(names: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="are not those of the network: the network has no dog"):
        match_classes(names, ("ape", "bee", "cat"))


def test_a_subset_of_the_classes_is_matched_by_name() -> None:
    dataset = array_dataset(thumbnails(3), np.array([0, 1, 1]), ["cat", "ape"], name="photos", domain="all")
    aligned, warning = align_classes(dataset, ("ape", "bee", "cat"), source="'net.pth'")
    assert aligned.labels.tolist() == [2, 0, 0]
    assert aligned.class_names == ("ape", "bee", "cat")
    assert aligned.class_mask is not None
    assert aligned.class_mask.tolist() == [0, 2]
    assert warning == "photos has 2 of the 3 classes of 'net.pth'"


@pytest.mark.parametrize("named", ["name", "wnid", None])
def test_some_of_imagenets_classes_are_matched_by_wordnet_id(tmp_path: Path, named: str | None) -> None:
    """200 of the 1,000 folders, as a user unpacks them, with a network that has names, ids or neither."""
    classes = imagenet_classes()
    chosen = list(range(3, 1000, 5))
    class_tree(tmp_path, [classes[k].wnid for k in chosen], per_class=1)
    network = None if named is None else tuple(getattr(c, named) for c in classes)
    aligned, warning = align_classes(open_dataset("folder", tmp_path), network, outputs=1000, source="'net.pth'")
    assert sorted(aligned.labels.tolist()) == chosen
    assert aligned.class_mask is not None
    assert aligned.class_mask.tolist() == chosen
    assert len(aligned.class_names) == 1000
    assert warning.startswith("folder has 200 of the 1000 classes of 'net.pth'")
    assert ("taken as ImageNet's" in warning) == (named is None)


def test_folders_named_by_output_index_are_matched_by_it(tmp_path: Path) -> None:
    class_tree(tmp_path, ["7", "31", "207"], per_class=1)
    for network in (None, tuple(c.name for c in imagenet_classes())):
        aligned, _ = align_classes(open_dataset("folder", tmp_path), network, outputs=1000, source="'net.pth'")
        assert aligned.labels.tolist() == [7, 31, 207]


def test_a_number_of_classes_that_cannot_be_matched_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'net\.pth' outputs 1000 classes, but photos has 2; name its classes by"):
        match_classes(("ape", "bee"), None, outputs=1000, data="photos", source="'net.pth'")


def test_bare_labels_need_not_use_every_class() -> None:
    dataset = array_dataset(thumbnails(2), np.array([0, 1]), ["0", "1"], name="array", domain="all")
    assert align_classes(dataset, CIFAR10_CLASSES, source="'net.pth'") == (dataset, "")


def test_a_network_without_names_gets_a_warning() -> None:
    match = match_classes(("ape", "bee"), None, data="photos", source="'net.pth'")
    assert match.is_identity
    assert match.warning.startswith(
        "'net.pth' does not name its classes: those of photos are taken in the order ape, bee"
    )
    assert match_classes(("0", "1"), ("ape", "bee")).warning == ""


def test_imagenet_by_wnid_and_by_name() -> None:
    names, wnids = ([getattr(c, field) for c in imagenet_classes()] for field in ("name", "wnid"))
    assert len(set(names)) < 1000  # two cranes, two maillots
    for one in (names, wnids):
        assert match_classes(one, names).is_identity


def test_a_label_of_billions_builds_no_names(tmp_path: Path) -> None:
    np.save(tmp_path / "fog.npy", thumbnails(2))
    np.save(tmp_path / "labels.npy", np.array([0, 2_000_000_000]))
    with pytest.raises(DataError, match="has the label 2000000000; labels must lie in 0..99999"):
        open_dataset("array-c", tmp_path, domain="fog")
    with pytest.raises(DataError, match="has the label 2000000000"):
        numeric_class_names(open_labels(tmp_path / "labels.npy"), where="x")


def test_domains_of_a_folder_share_their_labels(tmp_path: Path) -> None:
    class_tree(tmp_path / "day", ["ape", "bee", "cat"])
    class_tree(tmp_path / "night", ["bee", "cat"])
    night = open_dataset("folder", tmp_path, domain="night")
    assert night.class_names == ("ape", "bee", "cat")
    assert np.unique(night.labels).tolist() == [1, 2]


def test_two_spellings_between_domains_are_refused(tmp_path: Path) -> None:
    class_tree(tmp_path / "day", ["cat", "truck"])
    class_tree(tmp_path / "night", ["Truck", "cat"])
    with pytest.raises(
        DataError, match="the class 'Truck' of .*night is spelled 'truck' in .*day; rename one"
    ) as caught:
        open_dataset("folder", tmp_path, domain="night")
    assert "night has Truck, cat; day has cat, truck" in str(caught.value)
    errors = [finding.message for finding in check_root(tmp_path) if finding.status == "error"]
    assert len(errors) == 2
    assert all("is spelled" in error and "rename one of them" in error for error in errors)


def test_check_compares_with_a_network(tmp_path: Path) -> None:
    class_tree(tmp_path, [*CIFAR10_CLASSES[:-1], "Truck"], per_class=1)
    (error,) = [f.message for f in check_root(tmp_path, classes=CIFAR10_CLASSES) if f.status == "error"]
    assert "'Truck' is spelled 'truck' in the network" in error
    (tmp_path / "Truck").rename(tmp_path / "truck")
    findings = check_root(tmp_path, classes=CIFAR10_CLASSES[::-1])
    assert [f.status for f in findings] == ["ok", "ok"]
    assert findings[-1].message == "its 10 classes are the network's, matched by name"


def test_photo_and_sketch_are_not_pacs(tmp_path: Path) -> None:
    for domain in ("photo", "sketch"):
        class_tree(tmp_path / domain, ["dog", "horse"])
    assert {finding.dataset for finding in check_root(tmp_path)} == {"folder"}
