"""The network as a module: sizes, dtypes, copies, roles, switches."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from tests.models.networks import TINY, TINY_CONFIGS, tiny_images, tiny_network
from trust_tta.errors import ShapeError
from trust_tta.models.vmamba import VMamba


@pytest.mark.parametrize("config", TINY_CONFIGS)
@pytest.mark.parametrize("size", [(33, 47), (17, 64), (8, 8), (5, 31)], ids=str)
def test_any_image_size(config: str, size: tuple[int, int]) -> None:
    model = tiny_network(TINY_CONFIGS[config])
    logits = model(tiny_images(2, height=size[0], width=size[1]))
    assert logits.shape == (2, 3)
    assert logits.isfinite().all()


def test_the_backends_agree() -> None:
    model, images = tiny_network(TINY_CONFIGS["vanilla"]), tiny_images()
    fast = model(images, order="bcda")
    model.set_scan_backend("reference")
    torch.testing.assert_close(model(images, order="bcda"), fast, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("config", TINY_CONFIGS)
def test_an_image_alone_equals_the_image_in_a_batch(config: str) -> None:
    model, images = tiny_network(TINY_CONFIGS[config]), tiny_images(3)
    torch.testing.assert_close(model(images)[1:2], model(images[1:2]), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("config", ["layer", "batch"])
def test_a_pass_goes_on_from_the_first_convolution(config: str) -> None:
    model, images = tiny_network(TINY_CONFIGS[config]), tiny_images()
    assert model.forward_stem(images) is None  # the convolution is trained
    stem = model.requires_grad_(False).forward_stem(images)
    assert stem is not None
    for order in ("abcd", "badc"):
        directions = model.scan_directions(order, len(images))
        logits = model.forward_after_stem(stem, directions)
        torch.testing.assert_close(logits, model(images, order=order), rtol=1e-9, atol=1e-9)


def test_memory_layout_of_the_images_does_not_matter() -> None:
    model, images = tiny_network(), tiny_images()
    assert torch.equal(model(images.contiguous(memory_format=torch.channels_last)), model(images))
    assert torch.equal(model(images.repeat(1, 1, 1, 2)[..., :16]), model(images))


@pytest.mark.parametrize(
    "images",
    [torch.zeros(3, 8, 8), torch.zeros(1, 4, 8, 8), torch.zeros(1, 3, 8, 8, dtype=torch.uint8), None, "cat.jpg"],
    ids=["no-batch", "four-channels", "bytes", "none", "text"],
)
def test_wrong_images_are_refused(images: Any) -> None:
    with pytest.raises(ShapeError, match=r"images (have shape|are) .* \(n, (3|channels), h, w\)"):
        VMamba(TINY)(images)


def test_copies_are_independent_and_equal() -> None:
    model, images = tiny_network(TINY_CONFIGS["batch"]), tiny_images()
    expected = model(images, order="badc").detach()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(images, order="badc"), expected)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        assert torch.equal(model(images, order="badc"), expected)


@pytest.mark.parametrize("config", TINY_CONFIGS)
def test_roles_cover_every_parameter_once(config: str) -> None:
    model = tiny_network(TINY_CONFIGS[config])
    roles = model.parameter_roles()
    assert list(roles) == [name for name, _ in model.named_parameters()]
    assert {role.kind for role in roles.values()} == {"norm", "scan", "projection", "other"}
    assert all(roles[n].kind == "other" for n in roles if "out_norm" in n or "mlp" in n or ".head." in n)
    assert all(role.last == n.startswith(("layers.1.", "classifier.")) for n, role in roles.items())


def test_stochastic_depth_is_switched_alone() -> None:
    model = VMamba(TINY.override({"drop_path": 0.9})).double().eval()
    images = tiny_images(8)
    steady = model(images)
    model.set_stochastic_depth(True)
    torch.manual_seed(0)
    assert not torch.equal(model(images), steady)
    assert not model.training
    model.set_stochastic_depth(False)
    assert torch.equal(model(images), steady)


def test_features_and_head_make_the_logits() -> None:
    model, images = tiny_network(), tiny_images()
    features = model.forward_features(images, order="badc")
    assert features.shape == (3, 16)
    assert torch.equal(model.forward_head(features), model(images, order="badc"))
    maps = model.forward_maps(model.embed(images))
    assert [tuple(m.shape) for m in maps] == [(3, 8, 6, 4), (3, 16, 3, 2)]
    assert torch.equal(model.pool(maps[-1]), model.forward_features(images))


def test_initial_weights_depend_on_the_seed_alone() -> None:
    states = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        states.append(VMamba(TINY).state_dict())
    assert all(torch.equal(states[0][k], states[1][k]) for k in states[0])
    assert not torch.equal(states[0]["classifier.head.weight"], states[2]["classifier.head.weight"])


@pytest.mark.parametrize("leaf", ["x_proj_weight", "dt_projs_weight", "dt_projs_bias", "A_logs", "Ds"])
def test_a_float64_network_computes_in_float64(leaf: str) -> None:
    """A change far below float32's rounding reaches the logits through every scan parameter."""
    model, images = tiny_network(), tiny_images()
    before = model(images)
    with torch.no_grad():
        model.get_parameter(f"layers.0.blocks.0.op.{leaf}").mul_(1 + 1e-10)
    assert not torch.equal(model(images), before)
