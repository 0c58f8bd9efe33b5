"""Metadata of a checkpoint: variant, classes, preprocessing."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.bench.tiny import OVERRIDES, write_checkpoint
from trust_tta.data.class_names import CIFAR10_CLASSES
from trust_tta.data.dataset import array_dataset
from trust_tta.data.registry import find_spec
from trust_tta.errors import CheckpointError, ConfigError
from trust_tta.models.checkpoint import Checkpoint
from trust_tta.models.pretrained import PRETRAINED, locate
from trust_tta.models.typed import create_model
from trust_tta.preprocessing import PRESETS, Preprocessing, find_preset
from trust_tta.training.artifacts import TrainingProvenance
from trust_tta.training.data import TrainingData

MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.21, 0.22)


def find(path: Path, **options: object) -> Checkpoint:
    return Checkpoint.open(path, **options)  # type: ignore[arg-type]


def write_described(path: Path, **metadata: str) -> Path:
    model = create_model("vmamba_nano", **OVERRIDES)
    save_file(model.state_dict(), path, metadata=metadata)
    return path


@pytest.fixture
def described(tmp_path: Path) -> Path:
    stated = json.dumps({"size": 48, "mean": [0.5, 0.4, 0.3], "std": [0.2, 0.21, 0.22]})
    return write_described(tmp_path / "net.safetensors", variant="vmamba_nano", num_classes="10", preprocessing=stated)


def test_metadata_states_variant_classes_and_preprocessing(described: Path) -> None:
    found = find(described)
    assert (found.variant, found.num_classes) == ("vmamba_nano", 10)
    assert found.preprocessing == Preprocessing(
        size=48, resize=None, crop=False, mean=(0.5, 0.4, 0.3), std=(0.2, 0.21, 0.22)
    )


def test_metadata_without_crop_crops_if_it_resizes(tmp_path: Path) -> None:
    stated = json.dumps({"size": 48, "resize": 56, "mean": [0.5, 0.4, 0.3], "std": [0.2, 0.21, 0.22]})
    path = write_described(tmp_path / "net.safetensors", variant="vmamba_nano", preprocessing=stated)
    assert find(path).preprocessing == Preprocessing(
        size=48, resize=56, crop=True, mean=(0.5, 0.4, 0.3), std=(0.2, 0.21, 0.22)
    )


@pytest.mark.parametrize("name", PRESETS)
def test_the_preprocessing_of_training_is_that_of_bench(tmp_path: Path, name: str) -> None:
    images, labels = np.zeros((3, 8, 8, 3), np.uint8), np.arange(3)
    dataset = array_dataset(images, labels, ("a", "b", "c"), name="ours", domain="day")
    origin = TrainingProvenance(
        variant="vmamba_nano",
        overrides={},
        data=TrainingData(find_spec("folder"), dataset, dataset, "validation"),
        hashes={"all": "ab"},
        preprocessing=find_preset(name),
        recipe={},
    )
    path = write_described(tmp_path / "net.safetensors", **origin.metadata(0.5))
    assert find(path).preprocessing == find_preset(name)


def test_the_shipped_network_sees_whole_images_by_name_and_by_file() -> None:
    file = locate(PRETRAINED["vmamba_nano_cifar10"])
    wanted = Preprocessing(
        size=32, resize=None, crop=False, mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616)
    )
    for source in (Path("vmamba_nano_cifar10"), file):
        assert find(source).preprocessing == wanted


def test_a_contradicting_preprocessing_is_refused(described: Path) -> None:
    with pytest.raises(ConfigError, match=r"was trained with mean \(0.5, 0.4, 0.3\)"):
        find(described, preprocessing=find_preset("cifar32"))


def test_another_size_with_the_same_normalisation_is_taken(described: Path) -> None:
    wanted = Preprocessing(size=64, resize=72, crop=True, mean=MEAN, std=STD)
    assert find(described, preprocessing=wanted).preprocessing == wanted


@pytest.mark.parametrize(("variant", "preset"), [("vmamba_nano", "cifar32"), ("vmamba_tiny_s1l8_bn", "imagenet")])
def test_a_file_without_metadata_gets_the_preprocessing_of_its_variant(
    tmp_path: Path, variant: str, preset: str
) -> None:
    assert find(write_checkpoint(tmp_path), variant=variant).preprocessing == find_preset(preset)


def test_a_file_without_metadata_or_variant_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not say which network it is of"):
        find(write_checkpoint(tmp_path))


@pytest.mark.parametrize("stated", ["{", "{}", '{"size": 32, "mean": [1], "std": [1, 1, 1]}'])
def test_a_broken_description_is_refused(tmp_path: Path, stated: str) -> None:
    path = write_described(tmp_path / "net.safetensors", preprocessing=stated)
    with pytest.raises(CheckpointError, match="the preprocessing stated in"):
        find(path, variant="vmamba_nano")


def test_preprocessing_for_a_disk_layout() -> None:
    own = find_preset("imagenet")
    assert own.for_layout("domains") == own
    assert own.for_layout("folder-c") == find_preset("imagenet-c")
    assert own.for_layout("array-c") == find_preset("squash224")


def test_a_checkpoint_knows_license_hash_and_classes() -> None:
    found = Checkpoint.open("vmamba_nano_cifar10")
    assert (found.license, found.num_classes) == ("Apache-2.0", 10)
    assert found.classes == CIFAR10_CLASSES
    assert str(found.file) in repr(found)
    assert len(repr(found)) < 1500  # no tensors


def test_classes_that_a_file_names(tmp_path: Path) -> None:
    names = [f"class {i}" for i in range(10)]
    path = write_described(tmp_path / "net.safetensors", variant="vmamba_nano", classes=json.dumps(names))
    assert find(path, fields=OVERRIDES).load().classes == tuple(names)


def test_the_number_of_classes_is_that_of_the_classifier(tmp_path: Path) -> None:
    found = find(write_checkpoint(tmp_path, classes=7), variant="vmamba_nano", fields=OVERRIDES)
    assert found.num_classes == 7
    assert found.load()(torch.zeros(1, 3, 32, 32)).shape == (1, 7)


def test_a_copy_in_another_process_reads_the_file_again_and_refuses_another_one(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path)
    found = find(path, variant="vmamba_nano", fields=OVERRIDES)
    text = pickle.dumps(found)
    assert len(text) < 5000  # no weights
    copy = pickle.loads(text)
    assert all(torch.equal(a, b) for a, b in zip(copy.state.values(), found.state.values(), strict=True))
    torch.save({name: tensor + 1 for name, tensor in found.state.items()}, path)
    with pytest.raises(CheckpointError, match="has changed since it was first read"):
        pickle.loads(text).load()


def test_a_file_is_opened_once(described: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []
    plain = Path.open

    def count(path: Path, *arguments: str, **options: str) -> object:
        opened.append(path)
        return plain(path, *arguments, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(Path, "open", count)
    find(described, fields=OVERRIDES).load()
    assert opened.count(described) == 1
