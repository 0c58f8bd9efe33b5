"""The published networks: names and shapes of every parameter, bf16, gradients."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import Tensor

import trust_tta as tt
from tests.golden import load_golden_json
from tests.models.architectures import FILE, architectures
from tests.models.networks import TINY_CONFIGS, tiny_images, tiny_network
from trust_tta.models.pretrained import PRETRAINED
from trust_tta.models.variants import VARIANTS

PUBLISHED = [
    "vmamba_tiny_s1l8", "vmamba_tiny_s2l5", "vmamba_small_s1l20", "vmamba_small_s2l15", "vmamba_base_s1l20",
    "vmamba_base_s2l15", "vanilla_vmamba_tiny", "vanilla_vmamba_small", "vanilla_vmamba_base",
]  # fmt: skip
CLASSIFIERS = [name for name in tt.list_models() if name.startswith(("vmamba_", "vanilla_vmamba_"))]


def build_on_meta(name: str) -> tt.VMamba:
    with torch.device("meta"):
        model = tt.create_model(name)
    assert isinstance(model, tt.VMamba)
    return model


@pytest.mark.parametrize("name", PUBLISHED)
def test_state_dict_is_that_of_the_published_network(name: str) -> None:
    published = load_golden_json("vmamba_state_dicts.json")[name]
    model = build_on_meta(name)
    assert {k: list(v.shape) for k, v in model.state_dict().items()} == published["keys"]
    assert sum(p.numel() for p in model.parameters()) == published["parameters"]


def test_every_published_network_is_listed() -> None:
    assert set(load_golden_json("vmamba_state_dicts.json")) == set(PUBLISHED)
    assert set(CLASSIFIERS) == {*PUBLISHED, *(f"{name}_bn" for name in PUBLISHED), "vmamba_nano"}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_bn_twin_differs_in_the_norms_alone(name: str) -> None:
    plain, twin = build_on_meta(name), build_on_meta(f"{name}_bn")
    statistics = {k for k in twin.state_dict() if "running_" in k or "num_batches" in k}
    assert statistics
    assert not any("out_norm" in k for k in statistics)
    shapes = {k: v.shape for k, v in twin.state_dict().items() if k not in statistics}
    assert shapes == {k: v.shape for k, v in plain.state_dict().items()}


@pytest.fixture
def quick_init(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random weights from one pool of numbers: the large networks are built in a moment."""
    pool = torch.randn(65537, generator=torch.Generator().manual_seed(0))

    def fill(tensor: Tensor, std: float) -> Tensor:
        repeats = -(-tensor.numel() // len(pool))
        with torch.no_grad():
            return tensor.copy_((std * pool).repeat(repeats)[: tensor.numel()].view(tensor.shape))

    monkeypatch.setattr("torch.nn.init.trunc_normal_", fill)
    monkeypatch.setattr(
        "torch.nn.init.kaiming_uniform_", lambda t, a=0: fill(t, 1 / math.sqrt(3 * max(1, t[0].numel())))
    )


@pytest.mark.usefixtures("quick_init")
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_bf16_is_finite_and_close_to_float32(name: str) -> None:
    torch.manual_seed(0)
    model = tt.create_model(name).eval()
    images = torch.randn(1, 3, 40, 33)
    with torch.no_grad():
        exact = model(images)
        with torch.autocast("cpu", torch.bfloat16):
            rounded = model(images)
    assert rounded.dtype == torch.bfloat16
    assert exact.std() > 1e-3  # the comparison would say nothing about a dead network
    error = (rounded.float() - exact).abs().max() / exact.abs().max()
    assert error < 0.04, error


@pytest.mark.parametrize("config", TINY_CONFIGS)
def test_every_parameter_has_a_gradient(config: str) -> None:
    model = tiny_network(TINY_CONFIGS[config]).train()
    model(tiny_images()).square().sum().backward()
    dead = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.abs().max() > 0]
    # A constant added before a batch normalisation is taken out again.
    before_norm = ("patch_embed.0.bias", "patch_embed.5.bias", "downsample.1.bias")
    assert [n for n in dead if not n.endswith(before_norm)] == []


def test_the_shipped_architectures_are_those_of_the_variants() -> None:
    """After a new variant: `make architectures`."""
    assert json.loads(FILE.read_text()) == architectures()


def test_pretrained_entries_fit_the_variants() -> None:
    assert {p.variant for p in PRETRAINED.values()} >= set(PUBLISHED)
    for name, entry in PRETRAINED.items():
        assert name == entry.name
        assert entry.variant in VARIANTS
        assert entry.address is None or entry.address.startswith("https://")
        assert (45 if entry.variant.startswith("upernet_") else 50) < entry.accuracy < 100
        assert entry.preprocessing.resize is None or entry.preprocessing.resize >= entry.preprocessing.size
