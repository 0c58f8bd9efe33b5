from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.training.samples import colored_images, tiny_network
from trust_tta.data.dataset import array_dataset
from trust_tta.data.registry import find_spec
from trust_tta.errors import CheckpointError, TrustWarning
from trust_tta.models.checkpoint import Checkpoint, describe, load_checkpoint
from trust_tta.models.pretrained import PRETRAINED
from trust_tta.models.weights import read_weights
from trust_tta.preprocessing import Preprocessing
from trust_tta.schema import parse
from trust_tta.training.artifacts import TrainingProvenance, export_model, model_card
from trust_tta.training.data import TrainingData
from trust_tta.training.recipe import FinetuneRecipe, TrainRecipe
from trust_tta.training.runs import finetune


def test_fp16_round_trip_is_rounding_only_and_statistics_are_whole(tmp_path: Path) -> None:
    path = tmp_path / "new" / "model.safetensors"
    model = tiny_network(1)
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.uniform_(1e-9, 1e6)  # beyond fp16 at both ends
    export_model(model, path, metadata={"variant": "tiny"})
    loaded = load_checkpoint(tiny_network(2), path)
    weights = dict(model.named_parameters())
    for name, value in loaded.state_dict().items():
        source = model.state_dict()[name]
        assert value.dtype == source.dtype
        if name in weights:
            rounding = (source.abs() * 2.0**-11).clamp(min=2.0**-25)
            assert bool(((value - source).abs() <= rounding).all()), name
        else:
            assert torch.equal(value, source), name
    assert path.stat().st_size < 2.6 * sum(p.numel() for p in weights.values()) + 40_000
    assert [p.name for p in path.parent.iterdir()] == ["model.safetensors"]


def test_float32_round_trip_is_exact(tmp_path: Path) -> None:
    path, model = tmp_path / "model.safetensors", tiny_network(1)
    export_model(model, path, dtype=torch.float32, metadata={})
    loaded = load_checkpoint(tiny_network(2), path)
    for name, value in model.state_dict().items():
        assert torch.equal(value, loaded.state_dict()[name]), name


def test_a_weight_beyond_fp16_is_refused_and_the_old_file_stays(tmp_path: Path) -> None:
    path, model = tmp_path / "model.safetensors", tiny_network()
    export_model(model, path, metadata={})
    before = path.read_bytes()
    with torch.no_grad():
        model.classifier.head.weight[0, 0] = 1e5
    with pytest.raises(CheckpointError, match=r"classifier\.head\.weight does not fit torch\.float16"):
        export_model(model, path, metadata={})
    assert path.read_bytes() == before


def test_the_description_comes_back(tmp_path: Path) -> None:
    path, recipe = tmp_path / "model.safetensors", TrainRecipe(epochs=7, mean=(0.1, 0.2, 0.3))
    images, labels = colored_images(9)
    dataset = array_dataset(images, labels, ("red", "green", "blue"), name="ours", domain="day")
    origin = TrainingProvenance(
        variant="vmamba_nano",
        overrides={"depths": (1, 1)},
        data=TrainingData(find_spec("folder"), dataset, dataset, "validation"),
        hashes={"learned from": "ab", "held out": "cd"},
        preprocessing=Preprocessing(size=32, resize=None, crop=True, mean=recipe.mean, std=recipe.std),
        recipe=recipe.model_dump(),
    )
    export_model(tiny_network(), path, metadata=origin.metadata(0.93456))
    found = read_weights(path).metadata
    assert found.items() >= {"variant": "vmamba_nano", "num_classes": "3", "accuracy": "0.9346"}.items()
    assert found.items() >= {"data": "ours (day)", "data_sha256": "ab", "overrides": '{"depths": [1, 1]}'}.items()
    assert json.loads(found["preprocessing"]) == {
        "size": 32,
        "resize": None,
        "crop": True,
        "mean": [0.1, 0.2, 0.3],
        "std": list(recipe.std),
        "interpolation": "bicubic",
    }
    assert parse(TrainRecipe, json.loads(found["recipe"])) == recipe


def test_a_finetuned_network_keeps_the_license_of_its_backbone(tmp_path: Path) -> None:
    license, model = "CC-BY-NC-SA-4.0", tiny_network()
    model.license, model.preprocessing = license, Preprocessing(size=8, resize=None, crop=False)
    export_model(model, tmp_path / "backbone.safetensors", metadata=describe(model).to_metadata())
    images, labels = colored_images(30)
    dataset = array_dataset(images, labels, ("red", "green", "blue"), name="ours", domain="day")
    parts = dataset.pick(np.arange(24)), dataset.pick(np.arange(24, 30))
    data = TrainingData(find_spec("folder"), *parts, "validation")
    checkpoint = Checkpoint.open(tmp_path / "backbone.safetensors")
    with pytest.warns(TrustWarning, match="forbids commercial use"):
        tuned = finetune(checkpoint, data, recipe=FinetuneRecipe(epochs=1), out=tmp_path / "tuned")
    assert Checkpoint.open(tuned.weights).license == license
    assert f"License of the weights: {license}; that of the data: " in (tuned.folder / "card.md").read_text()


def test_a_file_that_is_none_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"half")
    with pytest.raises(CheckpointError, match="cannot be read as a checkpoint"):
        read_weights(path)


@pytest.mark.parametrize(
    ("name", "data", "metric"),
    [
        ("vmamba_nano_cifar10", "CIFAR-10 (Krizhevsky, 2009)", "top-1"),
        ("vmamba_nano_layernorm_cifar10", "CIFAR-10 (Krizhevsky, 2009)", "top-1"),
        ("upernet_vmamba_nano_camvid", "CamVid (Brostow et al., 2009)", "mean IoU"),
    ],
)
def test_a_shipped_card_is_made_from_the_shipped_record_and_file(name: str, data: str, metric: str) -> None:
    known = PRETRAINED[name]
    assets = resources.files("trust_tta") / "assets"
    record = json.loads((assets / f"{name}.json").read_text())
    assert Checkpoint.open(name).sha256 == record["sha256"]
    measured_on = record.get("measured_on", "test")
    if measured_on == "test":
        assert known.accuracy == round(100 * list(record["accuracy"].values())[-1], 2)
    record |= {"data": data, "measured_on": measured_on}
    card = model_card(record, name=name, license=known.license, metric=metric)
    assert (assets / f"{name}.md").read_text() == card
