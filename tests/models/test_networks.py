"""Networks from outside: made by name, checked, fed and loaded like ours."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import trust_tta as tt
from tests.models import foreign
from trust_tta.errors import CheckpointError, ConfigError, ShapeError, TrustWarning
from trust_tta.models.checkpoint import Checkpoint
from trust_tta.preprocessing import Preprocessing

HERE = "tests.models.foreign"


def test_a_factory_takes_its_own_arguments() -> None:
    model = tt.create_model(f"{HERE}:SmallCNN", num_classes=3, width=4)
    assert isinstance(model, foreign.SmallCNN)
    assert model.head.weight.shape == (3, 4)
    assert model.classes == ("kind 0", "kind 1", "kind 2")


def test_a_module_is_copied() -> None:
    model = tt.create_model(f"{HERE}:READY")
    assert model is not foreign.READY
    assert torch.equal(model.fc.weight, foreign.READY.fc.weight)  # type: ignore[union-attr, arg-type]
    with pytest.raises(ConfigError, match="is a network, not a factory, and takes no width"):
        tt.create_model(f"{HERE}:READY", width=3)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("gives_nothing", {}, "returns a NoneType; it must return an nn.Module"),
        ("breaks", {"depth": 3}, "cannot be made with depth: RuntimeError: no weights for depth 3"),
        ("SmallCNN", {"hight": 3}, "cannot be made with hight: TypeError"),
        ("WORD", {}, "is 'resnet'; give a class or a function"),
        ("Missing", {}, "has no 'Missing'"),
    ],
)
def test_a_factory_without_a_network_fails_with_one_line(name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        tt.create_model(f"{HERE}:{name}", **options)
    assert "\n" not in str(caught.value)


def test_pixels_go_through_the_networks_own_preprocessing() -> None:
    model = tt.create_model(f"{HERE}:SmallCNN").eval()
    pixels = np.random.default_rng(0).integers(0, 256, (3, 40, 30, 3), dtype=np.uint8)
    expected = model(model.preprocessing(pixels))  # type: ignore[operator]
    assert torch.equal(model(pixels), expected)
    assert torch.equal(pickle.loads(pickle.dumps(model))(pixels), expected)


def test_a_network_that_knows_no_preprocessing_refuses_pixels() -> None:
    model = tt.create_model(f"{HERE}:Plain")
    with pytest.raises(ShapeError, match="has no preprocessing; give floats .*, or set model.preprocessing"):
        model(np.zeros((1, 32, 32, 3), np.uint8))
    given = tt.create_model(f"{HERE}:Plain", preprocessing="cifar32")
    assert given(np.zeros((1, 32, 32, 3), np.uint8)).shape == (1, 7)


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, {"size": 224, "resize": 256, "crop": True}),
        ({"crop_pct": 0.95}, {"size": 224, "resize": 235, "crop": True}),
        ({"crop_pct": 1.0, "input_size": (3, 288, 288)}, {"size": 288, "resize": 288, "crop": True}),
        ({"crop_mode": "squash"}, {"size": 224, "resize": None, "crop": False}),
    ],
)
def test_preprocessing_is_read_from_timms_configuration(changes: dict[str, Any], wanted: dict[str, Any]) -> None:
    model = tt.create_model(f"{HERE}:like_timm", **changes)
    mean, std = (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)
    assert model.preprocessing == Preprocessing(mean=mean, std=std, interpolation="bilinear", **wanted)


def test_weights_of_a_file_are_loaded_strictly(tmp_path: Path) -> None:
    torch.manual_seed(5)
    trained = foreign.SmallCNN(num_classes=4)
    torch.save({"state_dict": {f"module.{k}": v for k, v in trained.state_dict().items()}}, tmp_path / "net.pth")
    found = tt.create_model(f"{HERE}:SmallCNN", num_classes=4, checkpoint=tmp_path / "net.pth")
    assert not found.training
    assert all(torch.equal(v, found.state_dict()[k]) for k, v in trained.state_dict().items())
    with pytest.raises(CheckpointError, match=r"head.bias \(4,\) in the file, \(5,\) in the network") as caught:
        tt.create_model(f"{HERE}:SmallCNN", checkpoint=tmp_path / "net.pth")
    assert "\n" not in str(caught.value)


def test_load_checkpoint_leaves_foreign_names_alone() -> None:
    one, other = foreign.SmallCNN(), foreign.SmallCNN()
    tt.load_checkpoint(one, other.state_dict())
    assert torch.equal(one.head.weight, other.head.weight)


def test_a_factory_with_weights_of_its_own_needs_no_file() -> None:
    found = Checkpoint.open(None, variant=f"{HERE}:pretrained")
    assert (found.file, found.num_classes, found.preprocessing.size) == (None, 5, 24)
    again = pickle.loads(pickle.dumps(found))
    assert again.sha256 == Checkpoint.open(None, variant=f"{HERE}:pretrained").sha256
    model = again.load(num_classes=5)
    assert torch.equal(model.head.bias, torch.arange(5.0))
    assert model.classes == tuple(f"kind {i}" for i in range(5))
    with pytest.raises(ConfigError, match="'vmamba_nano' has no weights of its own; give a checkpoint"):
        Checkpoint.open(None, variant="vmamba_nano")


def test_a_given_preprocessing_replaces_the_networks_own_for_other_weights(tmp_path: Path) -> None:
    """The network states the preprocessing of other weights, as timm's configurations do; the file says nothing."""
    torch.save(foreign.SmallCNN().state_dict(), tmp_path / "mine.pth")
    wanted = Preprocessing(size=24, resize=None, mean=(0.1, 0.2, 0.3))
    found = Checkpoint.open(tmp_path / "mine.pth", variant=f"{HERE}:SmallCNN", preprocessing=wanted)
    assert found.load().preprocessing == wanted
    with pytest.raises(ConfigError, match="was trained with mean"):
        Checkpoint.open(None, variant=f"{HERE}:pretrained", preprocessing=wanted)


def test_an_unknown_preprocessing_defaults_to_imagenet_with_a_warning() -> None:
    with pytest.warns(TrustWarning, match="does not say how its images are preprocessed"):
        found = Checkpoint.open(None, variant=f"{HERE}:Plain")
    assert (found.preprocessing, found.num_classes) == (Preprocessing(), 7)
    given = Checkpoint.open(None, variant=f"{HERE}:Plain", preprocessing=Preprocessing(size=64, resize=None))
    assert given.preprocessing.size == 64


def test_methods_take_networks_from_outside() -> None:
    model = Checkpoint.open(None, variant=f"{HERE}:pretrained").load()
    pixels = np.random.default_rng(0).integers(0, 256, (8, 24, 24, 3), dtype=np.uint8)
    batch = model.preprocessing(pixels)  # type: ignore[operator]
    for name in ("source", "bn", "tent", "lame"):
        assert tt.create_method(name, model)(batch).shape == (8, 5)


def test_an_installed_network_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[trust_tta.models]\ntheir_cnn = {HERE}:SmallCNN\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert isinstance(tt.create_model("their_cnn"), foreign.SmallCNN)
    assert "their_cnn" in tt.list_models()


def test_the_protocol_is_what_networks_have() -> None:
    ours: nn.Module = tt.create_model("vmamba_nano", depths=(1, 1), dims=(8, 16))
    for network in (ours, tt.create_model(f"{HERE}:SmallCNN")):
        for name in ("preprocessing", "classes", "forward_features", "forward_head"):
            assert hasattr(network, name)
