"""create_model: names, overrides, known checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import trust_tta as tt
from tests.golden import shared_path
from tests.models.typed_stub import STUB, render
from tests.web import Reply, serving
from trust_tta.data.class_names import CIFAR10_CLASSES
from trust_tta.data.registry import find_spec
from trust_tta.data.sample import load_sample
from trust_tta.errors import CheckpointError, ConfigError
from trust_tta.models import pretrained
from trust_tta.preprocessing import find_preset

SMALL: dict[str, Any] = {"depths": (1, 1), "dims": (8, 16)}


def test_models_are_listed_in_order() -> None:
    names = tt.list_models()
    assert names == sorted(names)
    assert len(names) == len(set(names)) == 78


def test_stub_declares_every_model() -> None:
    assert STUB.read_text() == render(), "run `make typed`"


@pytest.mark.parametrize("name", ["vmamba_tiny_s1l9", "vmamba-nano", "VMAMBA_NANO", "resnet50"])
def test_an_unknown_model_is_refused_with_a_suggestion(name: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown network '{name}'") as caught:
        tt.create_model(name)
    assert "vmamba_tiny_s1l8" in str(caught.value) or "vmamba_nano" in str(caught.value)
    assert ("did you mean" in str(caught.value)) == (name != "resnet50")


def test_overrides_reach_the_network() -> None:
    model = tt.create_model("vmamba_nano", num_classes=7, drop_path=0.3, **SMALL)
    assert (model.config.num_classes, model.config.drop_path, model.config.norm) == (7, 0.3, "batch")
    assert model(torch.zeros(2, 3, 16, 16)).shape == (2, 7)


def test_wrong_overrides_are_refused() -> None:
    with pytest.raises(ConfigError, match="widths: there is no such option"):
        tt.create_model("vmamba_nano", widths=(1, 2, 3))
    with pytest.raises(ConfigError, match="num_classes"):
        tt.create_model("vmamba_nano", num_classes=0)


def test_a_checkpoint_path_is_loaded_and_set_to_evaluation(tmp_path: Path) -> None:
    model = tt.create_model("vmamba_nano", **SMALL)
    torch.save({"model": model.state_dict()}, tmp_path / "net.pth")
    for given in (tmp_path / "net.pth", str(tmp_path / "net.pth")):
        loaded = tt.create_model("vmamba_nano", checkpoint=given, **SMALL)
        assert not loaded.training
        assert all(torch.equal(v, loaded.state_dict()[k]) for k, v in model.state_dict().items())


def test_an_unknown_checkpoint_is_refused_with_the_known_names() -> None:
    with pytest.raises(CheckpointError, match="vmamba_tiny_s1l8_imagenet"):
        tt.create_model("vmamba_tiny_s1l8", checkpoint="vmamba_tiny_s1l8_imagnet")


def test_a_known_checkpoint_of_another_network_is_refused() -> None:
    with pytest.raises(ConfigError, match="'vmamba_tiny_s1l8_imagenet' is for the network 'vmamba_tiny_s1l8'"):
        tt.create_model("vmamba_nano", checkpoint="vmamba_tiny_s1l8_imagenet")


def make_entry(address: str) -> pretrained.Pretrained:
    return pretrained.Pretrained("known", "vmamba_nano", "known.pth", address, 90.0)


def test_a_known_checkpoint_is_fetched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRUST_TTA_CACHE", str(tmp_path / "cache"))
    with serving(b"weights") as site:
        entry = make_entry(site.url)
        path = pretrained.locate(entry)
    assert path.read_bytes() == b"weights"
    assert pretrained.locate(entry) == path
    assert sorted(p.name for p in path.parent.iterdir()) == ["known.pth", "known.pth.sha256"]


def test_a_failed_download_says_what_to_do_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRUST_TTA_CACHE", str(tmp_path / "cache"))
    failure = pytest.raises(CheckpointError, match="known: .* cannot be downloaded: .* put it at")
    with serving(b"", Reply(status=404)) as site, failure as caught:
        pretrained.locate(make_entry(site.url))
    assert "\n" not in str(caught.value)
    assert list((tmp_path / "cache").iterdir()) == []


def test_the_trained_nano_loads() -> None:
    path = shared_path("weights/vmamba_nano_cifar10.pth")
    model = tt.create_model("vmamba_nano", checkpoint=path)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(2.57e6, rel=0.01)
    logits = model(torch.zeros(1, 3, 32, 32))
    assert logits.shape == (1, 10)
    assert logits.std() > 0.1


def test_what_a_file_states_of_its_network_need_not_be_given_again(tmp_path: Path) -> None:
    made = tt.create_model("vmamba_nano", num_classes=3, **SMALL)
    path = tmp_path / "net.safetensors"
    stated = {"variant": "vmamba_nano", "overrides": json.dumps(SMALL), "num_classes": "3"}
    save_file(made.state_dict(), path, metadata=stated)
    found = tt.create_model("vmamba_nano", checkpoint=path)
    assert found.config == made.config
    for name, value in made.state_dict().items():
        assert torch.equal(found.state_dict()[name], value), name
    with pytest.raises(CheckpointError, match=r"\(3,\) in the file, \(4,\) in the network"):
        tt.create_model("vmamba_nano", num_classes=4, checkpoint=path)
    save_file(made.state_dict(), path, metadata={"overrides": "[5"})
    with pytest.raises(CheckpointError, match="the overrides stated in .* cannot be read"):
        tt.create_model("vmamba_nano", checkpoint=path)


@pytest.mark.parametrize("door", [lambda path: tt.create_model(checkpoint=path), tt.load], ids=["create_model", "load"])
def test_a_file_that_states_its_network_needs_no_name(door: Callable[[Path], Any], tmp_path: Path) -> None:
    made = tt.create_model("vmamba_nano", num_classes=3, **SMALL).eval()
    path = tmp_path / "net.safetensors"
    stated = {
        "variant": "vmamba_nano",
        "overrides": json.dumps(SMALL),
        "num_classes": "3",
        "classes": '["a", "b", "c"]',
    }
    save_file(made.state_dict(), path, metadata=stated)
    found = door(path)
    images = torch.rand(2, 3, 16, 16)
    assert torch.equal(found(images), made(images))
    assert found.classes == ("a", "b", "c")
    assert not found.training
    save_file(made.state_dict(), path)
    with pytest.raises(ConfigError, match="net.safetensors' does not say which network it is of"):
        door(path)


def test_a_name_or_a_checkpoint_is_needed() -> None:
    with pytest.raises(ConfigError, match="a name, a checkpoint or both"):
        tt.create_model()


def test_published_checkpoints_load_by_their_name() -> None:
    assert tt.load("vmamba_nano_cifar10").classes == CIFAR10_CLASSES
    with pytest.raises(CheckpointError, match="vmamba_nano_cifar10"):
        tt.load("vmamba_nano_cifar")


def test_a_network_carries_its_preprocessing_and_classes() -> None:
    shipped = tt.create_model("vmamba_nano", checkpoint="vmamba_nano_cifar10")
    assert shipped.preprocessing == pretrained.PRETRAINED["vmamba_nano_cifar10"].preprocessing
    assert shipped.classes == CIFAR10_CLASSES
    random = tt.create_model("vmamba_tiny_s1l8", **SMALL)
    assert (random.preprocessing, random.classes) == (find_preset("imagenet"), None)


def test_the_shipped_network_knows_its_sample_by_preprocessing_alone() -> None:
    model = tt.create_model("vmamba_nano", checkpoint="vmamba_nano_cifar10")
    images, labels = load_sample()
    with torch.no_grad():
        found = model(model.preprocessing(images[:100])).argmax(1).numpy()  # type: ignore[misc]
    assert (found == labels[:100]).mean() > 0.85


def test_published_classes_are_those_of_the_data() -> None:
    assert pretrained.PRETRAINED["vmamba_tiny_s1l8_imagenet"].classes == find_spec("imagenet").class_names
    assert pretrained.PRETRAINED["vmamba_nano_cifar10"].classes == CIFAR10_CLASSES


def test_a_published_file_that_changes_is_refused_when_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRUST_TTA_CACHE", str(tmp_path / "cache"))
    model = tt.create_model("vmamba_nano", **SMALL)
    torch.save(model.state_dict(), tmp_path / "origin.pth")
    with serving((tmp_path / "origin.pth").read_bytes()) as site:
        entry = make_entry(site.url)
        path = pretrained.locate(entry)
    monkeypatch.setitem(pretrained.PRETRAINED, "known", entry)
    assert tt.create_model("vmamba_nano", checkpoint="known", num_classes=10, **SMALL).config.num_classes == 10
    torch.save({name: tensor + 1 for name, tensor in model.state_dict().items()}, path)
    with pytest.raises(CheckpointError, match="known: .* has the sha256 .* and must have .*; delete the file"):
        tt.create_model("vmamba_nano", checkpoint="known", num_classes=10, **SMALL)
