"""torch.hub's entry points, loaded as a user of the repository loads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import trust_tta as tt

ROOT = str(Path(__file__).resolve().parents[1])


def load(name: str, *arguments: Any, **options: Any) -> Any:
    return torch.hub.load(ROOT, name, *arguments, source="local", **options)


def test_there_is_an_entry_point_for_each_network_that_classifies() -> None:
    assert _listed() == {*(n for n in tt.list_models() if not n.startswith("upernet_")), "adapt"}


def _listed() -> set[str]:
    """As `torch.hub.list` does, which knows no local folders."""
    module = torch.hub._import_module("hubconf", f"{ROOT}/hubconf.py")
    return {name for name in dir(module) if callable(getattr(module, name)) and not name.startswith("_")}


def test_a_network_comes_with_its_weights() -> None:
    model = load("vmamba_nano", pretrained=True)
    ours = tt.create_model("vmamba_nano", checkpoint="vmamba_nano_cifar10")
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(model(images), ours(images))


def test_fields_are_taken_and_missing_weights_told() -> None:
    model = load("vim_tiny", image_size=(32, 32), patch_size=8, stride=8, dim=24, depth=2, num_classes=3)
    assert model.config.num_classes == 3
    with pytest.raises(ValueError, match="localvmamba_tiny has no published weights"):
        load("localvmamba_tiny", pretrained=True)


def test_adapt_wraps_a_network() -> None:
    model = load("vmamba_nano", pretrained=True)
    assert load("adapt", model, method="tent", lr=1e-3)(torch.randn(8, 3, 32, 32)).shape == (8, 10)
