"""A network and the preprocessing of its checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.bench.tiny import OVERRIDES, write_checkpoint
from trust_tta.bench.config import DataConfig, ModelConfig
from trust_tta.bench.environment import choose_device
from trust_tta.bench.network import Checkpoint, find_checkpoint, fit_to_layout, load_network
from trust_tta.bench.sources import DataSource
from trust_tta.data.dataset import array_dataset
from trust_tta.data.specs import find_spec
from trust_tta.data.transforms import PRESETS, find_preset
from trust_tta.errors import CheckpointError, ConfigError
from trust_tta.models.factory import create_model
from trust_tta.models.pretrained import PRETRAINED, locate
from trust_tta.preprocessing import Preprocessing
from trust_tta.training.data import TrainingData
from trust_tta.training.outputs import Origin


def find(path: Path, **options: object) -> Checkpoint:
    return find_checkpoint(ModelConfig(checkpoint=str(path), **options), domain="fog")  # type: ignore[arg-type]


def write_described(path: Path, **metadata: str) -> Path:
    model = create_model("vmamba_nano", **OVERRIDES)
    save_file(model.state_dict(), path, metadata=metadata)
    return path


@pytest.fixture
def described(tmp_path: Path) -> Path:
    stated = json.dumps({"size": 48, "mean": [0.5, 0.4, 0.3], "std": [0.2, 0.21, 0.22]})
    return write_described(tmp_path / "net.safetensors", variant="vmamba_nano", num_classes="10", preprocessing=stated)


def test_a_file_that_describes_itself_needs_no_words(described: Path) -> None:
    found = find(described)
    assert (found.variant, found.num_classes) == ("vmamba_nano", 10)
    assert found.preprocessing == Preprocessing(48, None, False, (0.5, 0.4, 0.3), (0.2, 0.21, 0.22))


def test_a_file_that_is_silent_on_the_crop_cuts_what_it_scales(tmp_path: Path) -> None:
    stated = json.dumps({"size": 48, "resize": 56, "mean": [0.5, 0.4, 0.3], "std": [0.2, 0.21, 0.22]})
    path = write_described(tmp_path / "net.safetensors", variant="vmamba_nano", preprocessing=stated)
    assert find(path).preprocessing == Preprocessing(48, 56, True, (0.5, 0.4, 0.3), (0.2, 0.21, 0.22))


@pytest.mark.parametrize("name", PRESETS)
def test_the_preprocessing_of_training_is_that_of_bench(tmp_path: Path, name: str) -> None:
    images, labels = np.zeros((3, 8, 8, 3), np.uint8), np.arange(3)
    dataset = array_dataset(images, labels, ("a", "b", "c"), name="ours", domain="day")
    origin = Origin(
        variant="vmamba_nano",
        overrides={},
        data=TrainingData(find_spec("folder"), dataset, labels, labels, "validation"),
        hashes={"all": "ab"},
        preprocessing=find_preset(name),
        recipe={},
    )
    path = write_described(tmp_path / "net.safetensors", **origin.metadata(0.5))
    assert find(path).preprocessing == find_preset(name)


def test_the_shipped_network_sees_whole_images_by_name_and_by_file() -> None:
    file = locate(PRETRAINED["vmamba_nano_cifar10"])
    wanted = Preprocessing(32, None, False, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
    for source in (Path("vmamba_nano_cifar10"), file):
        assert find(source).preprocessing == wanted


def test_a_contradicting_preprocessing_is_refused(described: Path) -> None:
    with pytest.raises(ConfigError, match=r"was trained with mean \(0.5, 0.4, 0.3\)"):
        find(described, preprocessing=find_preset("cifar32"))


def test_another_size_with_the_same_normalisation_is_taken(described: Path) -> None:
    wanted = Preprocessing(64, 72, True, (0.5, 0.4, 0.3), (0.2, 0.21, 0.22))
    assert find(described, preprocessing=wanted).preprocessing == wanted


@pytest.mark.parametrize(("variant", "preset"), [("vmamba_nano", "cifar32"), ("vmamba_tiny_s1l8_bn", "imagenet")])
def test_a_silent_file_goes_by_its_variant(tmp_path: Path, variant: str, preset: str) -> None:
    assert find(write_checkpoint(tmp_path), name=variant).preprocessing == find_preset(preset)


def test_a_silent_file_without_a_variant_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not say which network it is of"):
        find(write_checkpoint(tmp_path))


@pytest.mark.parametrize("stated", ["{", "{}", '{"size": 32, "mean": [1], "std": [1, 1, 1]}'])
def test_a_broken_description_is_refused(tmp_path: Path, stated: str) -> None:
    path = write_described(tmp_path / "net.safetensors", preprocessing=stated)
    with pytest.raises(CheckpointError, match="the preprocessing stated in"):
        find(path, name="vmamba_nano")


def test_the_domain_is_filled_in(tmp_path: Path) -> None:
    write_checkpoint(tmp_path).rename(tmp_path / "without_fog.pth")
    config = ModelConfig(checkpoint=str(tmp_path / "without_{domain}.pth"), name="vmamba_nano")
    assert find_checkpoint(config, domain="fog").file.name == "without_fog.pth"
    with pytest.raises(CheckpointError, match="without_snow.pth"):
        find_checkpoint(config, domain="snow")


def test_other_classes_than_the_data_has_are_refused(tmp_path: Path) -> None:
    config = ModelConfig(
        checkpoint=str(write_checkpoint(tmp_path, classes=7)), name="vmamba_nano", num_classes=7, overrides=OVERRIDES
    )
    dataset = DataSource(DataConfig(dataset="sample")).clean()
    checkpoint = find_checkpoint(config, domain="clean")
    with pytest.raises(ConfigError, match="tells 7 classes apart and sample has 10"):
        load_network(checkpoint, dataset=dataset, device=torch.device("cpu"))


def test_what_is_left_to_do_depends_on_how_images_lie_on_disk() -> None:
    own = find_preset("imagenet")
    assert fit_to_layout(own, "domains") == own
    assert fit_to_layout(own, "folder-c") == find_preset("imagenet-c")
    assert fit_to_layout(own, "array-c") == find_preset("cifar224")


def test_devices() -> None:
    assert choose_device("cpu") == torch.device("cpu")
    with pytest.raises(ConfigError, match="'gpu' does not exist"):
        choose_device("gpu")
    if not torch.cuda.is_available():
        assert choose_device("auto") == torch.device("cpu")
        with pytest.raises(ConfigError, match="needs a GPU"):
            choose_device("cuda")
