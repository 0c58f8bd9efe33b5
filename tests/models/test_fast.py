"""`tt.fast` gives what the network gives, whatever happens to the network meanwhile."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import trust_tta as tt
from trust_tta.errors import ConfigError
from trust_tta.models.fast import Fast, may_replay
from trust_tta.models.vmamba import VMamba

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TINY = tt.VMambaConfig(depths=(1, 2), dims=(16, 32), num_classes=5, norm="batch", drop_path=0.2)


def make(device: str = "cpu") -> VMamba:
    torch.manual_seed(0)
    return VMamba(TINY).to(device).eval()


def images(count: int = 4, *, size: int = 32, seed: int = 1, device: str = "cpu") -> Tensor:
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(seed)).to(device)


def assert_close(found: Tensor, wanted: Tensor) -> None:
    """Bit for bit on a CPU; on a GPU, libraries may choose other kernels for a graph."""
    rtol, atol = (1e-4, 1e-5) if wanted.is_cuda else (0.0, 0.0)
    torch.testing.assert_close(found, wanted, rtol=rtol, atol=atol)


def assert_same(fast: Fast, model: VMamba, device: str, **settings: int) -> None:
    """Over several batches of one shape, so that the last ones are replayed where graphs are captured."""
    for seed in range(4):
        batch = images(seed=seed, device=device, **settings)
        with torch.no_grad():
            plain = model(batch, directions=model.scan_directions(None, len(batch)))  # never replayed
            assert_close(fast(batch), plain)
            assert_close(model(batch), plain)


@pytest.mark.parametrize("device", DEVICES)
def test_outputs_are_the_networks_for_every_shape_and_order(device: str) -> None:
    model = make(device)
    fast = tt.fast(model)
    for count, size in ((1, 32), (4, 32), (4, 48), (3, 40)):
        assert_same(fast, model, device, count=count, size=size)
    batch = images(device=device)
    for order in ("badc", ["abcd", "badc", "dcba", "cdab"]):
        for _ in range(3):
            assert_close(fast(batch, order=order), model(batch, order=order).detach())


@pytest.mark.parametrize("device", DEVICES)
def test_an_output_is_not_overwritten_by_the_next(device: str) -> None:
    fast = tt.fast(make(device))
    batches = [images(seed=seed, device=device) for seed in range(4)]
    kept = [fast(batch) for batch in batches]
    again = [fast(batch) for batch in batches]
    for one, other in zip(kept, again, strict=True):
        assert_close(one, other)


def _update(model: VMamba) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)


def _load(model: VMamba) -> None:
    torch.manual_seed(7)
    model.load_state_dict(VMamba(TINY).state_dict())


def _replace_head(model: VMamba) -> None:
    torch.manual_seed(8)
    model.classifier.head = nn.Linear(32, 3).to(model.classifier.head.weight.device).eval()


def _replace_parameter(model: VMamba) -> None:
    head = model.classifier.head
    head.weight = nn.Parameter(torch.full_like(head.weight, 0.25))


def _replace_data(model: VMamba) -> None:
    head = model.classifier.head
    head.weight.data = torch.full_like(head.weight, 0.5)


def _move_statistics(model: VMamba) -> None:
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d) and module.running_mean is not None:
            module.running_mean.add_(0.3)


def _change_backend(model: VMamba) -> None:
    model.set_scan_backend("reference")


def _add_hook(model: VMamba) -> None:
    model.classifier.head.register_forward_hook(lambda module, given, out: out + 1)


CHANGES = [
    _update, _load, _replace_head, _replace_parameter, _replace_data, _move_statistics, _change_backend, _add_hook,
]  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("change", CHANGES)
def test_a_network_that_changes_is_seen(change: Callable[[VMamba], None], device: str) -> None:
    model = make(device)
    fast = tt.fast(model)
    assert_same(fast, model, device)
    change(model)
    assert_same(fast, model, device)


@pytest.mark.parametrize("device", DEVICES)
def test_in_training_mode_it_is_called_as_it_is(device: str) -> None:
    model = make(device)
    fast = tt.fast(model)
    assert_same(fast, model, device)
    model.train()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for seed in range(3):
        fast(images(seed=seed, device=device))
    moved = [name for name, buffer in model.named_buffers() if not torch.equal(buffer, before[name])]
    assert any(name.endswith("running_mean") for name in moved)
    model.eval()
    assert_same(fast, model, device)


@pytest.mark.parametrize("device", DEVICES)
def test_a_method_over_the_same_network_is_seen(device: str) -> None:
    model = make(device)
    fast = tt.fast(model)
    assert_same(fast, model, device)
    tt.create_method("tent", model, lr=1e-2)(images(8, device=device))
    assert_same(fast, model, device)


@pytest.mark.parametrize("change", CHANGES)
def test_changes_that_need_another_capture(change: Callable[[VMamba], None]) -> None:
    """The decision alone, which needs no GPU: values in place need no new capture, all else does, or forbids it."""
    model = make()
    fast = tt.fast(model)
    assert fast._can_be_captured()
    before = list(fast._fingerprint)
    assert fast._can_be_captured()
    assert fast._fingerprint == before
    change(model)
    allowed = fast._can_be_captured()
    assert allowed == (change is not _add_hook)
    if allowed:
        assert (fast._fingerprint == before) == (change in (_update, _load, _move_statistics))


@pytest.mark.gpu
def test_forwards_are_replayed_and_old_graphs_freed() -> None:
    model = make("cuda")
    fast = tt.fast(model)
    assert_same(fast, model, "cuda")
    assert fast._graphed is not None
    assert len(fast._graphed.graphs) == 1
    first = fast._graphed
    _update(model)
    fast(images(device="cuda"))
    assert fast._graphed is first  # values alone have changed
    _replace_parameter(model)
    fast(images(device="cuda"))
    assert fast._graphed is not first


@pytest.mark.gpu
def test_plain_predictions_are_replayed_too() -> None:
    model = make("cuda")
    for grads in (torch.no_grad, torch.inference_mode, torch.no_grad):
        for seed in range(4):
            batch = images(seed=seed, device="cuda")
            with grads():
                found, plain = model(batch), model(batch, directions=model.scan_directions(None, 4))
            assert_close(found, plain)
    recorder = model.__dict__["_fast"]._graphed
    assert len(recorder.graphs) == 1
    assert model(images(device="cuda")).requires_grad  # not replayed
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = not before
    try:
        with torch.no_grad():
            model(images(device="cuda"))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert model.__dict__["_fast"]._graphed is not recorder


def test_graphs_do_not_keep_their_network_alive() -> None:
    model = make()
    model.__dict__["_fast"] = fast = Fast(cast(nn.Module, weakref.proxy(model)))
    assert fast._can_be_captured()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert "_fast" not in twin.__dict__
    here = weakref.ref(model)
    gc.disable()
    try:
        del model
        assert here() is None
    finally:
        gc.enable()


def test_cpu_batches_and_arrays_are_never_replayed() -> None:
    batch = images()
    assert not may_replay(batch)  # on a CPU
    assert not may_replay(np.zeros((1, 3, 4, 4)))


@pytest.mark.gpu
def test_moving_between_devices() -> None:
    model = make("cuda")
    fast = tt.fast(model)
    for device in ("cuda", "cpu", "cuda"):
        fast.to(device)
        assert_same(fast, model, device)


def test_gradients_are_not_kept_and_come_back() -> None:
    model = make()
    assert not tt.fast(model)(images()).requires_grad
    assert model(images()).requires_grad


def test_pixels_and_what_the_network_knows() -> None:
    model = tt.create_model("vmamba_nano", checkpoint="vmamba_nano_cifar10")
    fast = tt.fast(model)
    pixels = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 3), dtype=np.uint8)
    assert torch.equal(fast(pixels), model(pixels).detach())
    assert (fast.preprocessing, fast.classes) == (model.preprocessing, model.classes)
    assert tt.fast(fast) is fast


def test_networks_from_outside_are_called_as_they_are() -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    assert torch.equal(tt.fast(network)(images()), network(images()).detach())


def test_copies_and_pickles() -> None:
    model = make()
    fast = tt.fast(model)
    expected = fast(images())
    for twin in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        assert torch.equal(twin(images()), expected)
        assert isinstance(twin.model, VMamba)
        _update(twin.model)
        assert torch.equal(fast(images()), expected)


def test_methods_and_other_things_are_refused() -> None:
    with pytest.raises(ConfigError, match="Tent is a method, which is fast by itself"):
        tt.fast(tt.create_method("tent", make()))
    with pytest.raises(ConfigError, match="the model is a str"):
        tt.fast("vmamba_nano")  # type: ignore[arg-type]
