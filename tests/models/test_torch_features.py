"""Hooks, wrappers and conversions of PyTorch on our networks: the same logits, and methods adapt and reset."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import trust_tta as tt

Change = Callable[[Any], nn.Module]
SMALL: dict[str, Any] = {"depths": (1, 1), "dims": (8, 16), "num_classes": 5}


def network() -> tt.VMamba:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: tt.VMamba = tt.create_model("vmamba_nano", **SMALL)
    return model.eval()


def images(seed: int = 0) -> Tensor:
    return torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(seed))


def sync_batch_norm(model: Any) -> nn.Module:
    return nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-any-return]


def weight_norm(model: Any) -> nn.Module:
    block = model.layers[0].blocks[0]
    for layer in (block.op.in_proj, block.op.out_proj, block.mlp.fc1, model.classifier.head):
        parametrizations.weight_norm(layer)
    return model  # type: ignore[no-any-return]


def channels_last(model: Any) -> nn.Module:
    return model.to(memory_format=torch.channels_last)  # type: ignore[no-any-return]


def without_running_statistics(model: Any) -> nn.Module:
    model.layers[0].blocks[0].norm = nn.BatchNorm2d(8, track_running_stats=False)
    model.layers[0].blocks[0].norm2 = nn.BatchNorm2d(8, affine=False).eval()
    return model  # type: ignore[no-any-return]


def compiled(model: Any) -> nn.Module:
    return torch.compile(model, backend="eager")  # type: ignore[return-value]


CHANGES: list[Change] = [sync_batch_norm, weight_norm, channels_last, without_running_statistics, compiled]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_changed_network_predicts_as_before(change: Change) -> None:
    changed = change(network())
    expected = network()
    if change is without_running_statistics:
        block: Any = expected.get_submodule("layers.0.blocks.0")
        block.norm.train()  # by the statistics of the batch, as it has no others
        block.norm2.reset_running_stats()
    with torch.no_grad():
        torch.testing.assert_close(changed(images()), expected(images()))


@pytest.mark.parametrize("name", ["source", "bn", "tent", "tide", "trust"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_methods_adapt_a_changed_network_and_reset_it(change: Change, name: str) -> None:
    options: dict[str, Any] = {"k": 2} if name == "trust" else {}
    model = change(network())
    before = copy.deepcopy(model.state_dict())
    method = tt.create_method(name, model, **options)
    first = method(images())
    assert bool(first.isfinite().all())
    method(images(1))
    method.reset()
    torch.testing.assert_close(method(images()), first)
    method.reset()
    after = method.detach().state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[key], value) for key, value in before.items())


def test_norms_keep_their_role_as_synchronized_ones() -> None:
    model: Any = sync_batch_norm(network())
    assert model.parameter_roles() == network().parameter_roles()
