"""Recorded passes give the numbers of plain ones, and stand back where they cannot be right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trust_tta import recording
from trust_tta.errors import ConfigError
from trust_tta.methods.registry import create_method
from trust_tta.models.config import VMambaConfig
from trust_tta.models.vmamba import VMamba
from trust_tta.orders import ScanOrder
from trust_tta.recording import Recorder

TINY = VMambaConfig(depths=(1, 2), dims=(16, 32), num_classes=5, norm="batch", drop_path=0.0)


def make_model(device: str = "cuda") -> VMamba:
    torch.manual_seed(0)
    return VMamba(TINY).to(device).eval()


def batches(count: int, size: int = 8, device: str = "cuda") -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(size, 3, 32, 32, generator=draw).to(device) for _ in range(count)]


def test_nothing_is_recorded_on_a_cpu() -> None:
    method = create_method("tent", make_model("cpu"))
    for images in batches(3, device="cpu"):
        method(images)
    assert method.call.recordings == {}


def test_a_network_without_orders_is_called_plainly() -> None:
    network = nn.Conv2d(3, 4, 1)
    images = torch.randn(2, 3, 5, 5)
    assert torch.equal(Recorder(network, list(network.parameters()))(images), network(images))


def test_casts_of_weights_do_not_outlive_an_update() -> None:
    """Under autocast PyTorch keeps casts of weights until the context ends; an update inside must still be seen."""
    images = batches(1, device="cpu")[0]
    outside = create_method("trust_naive", make_model("cpu"), lr=0.05)
    with torch.autocast("cpu", torch.bfloat16):
        first = outside(images)
        unchanged = outside.logits_before
    assert unchanged is not None
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        after = outside.model(images)
    assert torch.equal(first, after)
    assert not torch.equal(first, unchanged)


def test_the_callers_network_sees_an_update_within_one_autocast() -> None:
    images = batches(1, device="cpu")[0]
    model = make_model("cpu")
    method = create_method("trust_naive", model, lr=0.05)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model(images)
        method(images)
        inside = model(images)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(images), inside)


def test_an_order_is_refused_where_there_are_none() -> None:
    network = nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(48, 2))
    method = create_method("tent", network)
    with pytest.raises(ConfigError, match="Sequential has no traversal orders"):
        method.predict(torch.randn(2, 3, 4, 4), order=ScanOrder("badc"))


def test_weights_may_change_their_layout_between_batches() -> None:
    """SHOT adapts convolutions, whose gradients and moments follow the layout of the weights."""
    found = []
    for moved in (False, True):
        method = create_method("shot", make_model("cpu"), lr=1e-3)
        first, second = batches(2, device="cpu")
        method(first)
        if moved:
            method.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        found.append(method(second))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)


OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("bn", {}),
    ("tent", {"lr": 1e-3}),
    ("sar", {"margin": 9.0}),
    ("shot", {}),
    ("trust", {"steps": 2}),
    ("trust", {"mode": "replicate"}),
    ("trust", {"mode": "split", "k": 3}),
    ("trust", {"mode": "split", "k": 3, "split_statistics": "batch"}),
    ("bn", {"statistics": "stream"}),
    ("tent", {"statistics": "stream", "lr": 1e-3}),
    ("trust", {"statistics": "stream"}),
    ("tent", {"predict": "before", "optimizer": "sgd", "nesterov": True}),
    ("ensemble", {"k": 3}),
    ("augmentation", {}),
]


@pytest.mark.gpu
@pytest.mark.parametrize("low", [False, True], ids=["float32", "bf16"])
@pytest.mark.parametrize(("name", "options"), OPTIONS, ids=str)
def test_recorded_equals_plain(name: str, options: dict[str, Any], low: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for most in (0, 8):
        monkeypatch.setattr(recording, "MOST_RECORDINGS", most)
        method = create_method(name, make_model(), **options)
        with torch.autocast("cuda", torch.bfloat16, enabled=low):
            found.append(torch.stack([method(images) for images in batches(4)]).float())
    scale = found[0].abs().max()
    assert (found[0] - found[1]).abs().max() <= (2e-2 if low else 1e-4) * scale


@pytest.mark.gpu
def test_what_is_recorded_and_what_is_not() -> None:
    method = create_method("trust", make_model(), k=3)
    for images in (*batches(2), *batches(2, size=5)):
        method(images)
    assert len(method.call.recordings) == 4  # two shapes, each with and without gradients
    twin = method.fork()
    assert twin.call.recordings == {}
    images = batches(1)[0]
    assert torch.allclose(twin(images), method(images), rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
def test_a_pass_that_waits_for_its_backward_is_not_overwritten() -> None:
    model = make_model()
    parameters = list(model.parameters())
    call = Recorder(model, parameters)
    first, second = batches(2)
    slots = model.slots(None, 8)
    for images in (first, second, first):
        torch.autograd.grad(call(images, slots).sum(), parameters, allow_unused=True)
        with torch.no_grad():
            call(images, slots)
    assert len(call.recordings) == 2
    logits = call(first, slots)
    with torch.no_grad():
        call(second, slots)
    call(second, slots)
    got = torch.autograd.grad(logits.square().sum(), parameters, allow_unused=True)
    wanted = torch.autograd.grad(model(first).square().sum(), parameters, allow_unused=True)
    for a, b in zip(got, wanted, strict=True):
        if b is not None:
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4 * float(b.abs().max()))


@pytest.mark.gpu
def test_chance_is_not_recorded() -> None:
    torch.manual_seed(0)
    model = VMamba(TINY.changed(drop_path=0.5)).cuda().eval()
    method = create_method("trust", model, k=2, stochastic_depth=True)
    for images in batches(3):
        method(images)
    assert [r.backward for r in method.call.recordings.values()] == [None]  # passes without gradients alone


@pytest.mark.gpu
def test_a_network_in_training_draws_and_moves_as_without_recordings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stochastic depth and running statistics: the passes that a recording takes itself must leave no trace."""
    found = []
    for most in (0, 8):
        monkeypatch.setattr(recording, "MOST_RECORDINGS", most)
        torch.manual_seed(0)
        model = VMamba(TINY.changed(drop_path=0.5)).cuda().train()
        call = Recorder(model, list(model.parameters()))
        torch.manual_seed(1)
        logits = []
        for images in batches(5):
            logits.append(call(images, model.slots(None, 8)))
            logits[-1].square().sum().backward()
        assert len(call.recordings) == min(most, 1)
        gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        statistics = [b.flatten().float() for b in model.buffers()]
        drawn = torch.rand(9, device="cuda")
        found.append([torch.cat(parts).detach() for parts in (logits, gradients, statistics, [drawn])])
    for plain, recorded in zip(*found, strict=True):
        torch.testing.assert_close(recorded, plain, rtol=1e-4, atol=1e-4 * float(plain.abs().max()))


@pytest.mark.gpu
def test_a_recording_that_fails_leaves_the_plain_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise KeyError("nothing of the kind")

    plain = [create_method("tent", make_model())(images) for images in batches(1)]
    monkeypatch.setattr(recording, "Recording", broken)
    method = create_method("tent", make_model())
    first, *rest = batches(4)
    torch.testing.assert_close(method(first), plain[0], rtol=1e-4, atol=1e-4)
    with pytest.warns(UserWarning, match="not recorded"):
        method(rest[0])
    method(rest[1])
    assert method.call.failed
    assert method.counters.batches == 3


@pytest.mark.gpu
def test_odd_sizes_do_not_use_up_the_recordings() -> None:
    method = create_method("bn", make_model())
    for size in range(2, 20):
        method(batches(1, size=size)[0])
    for _ in range(3):
        method(batches(1, size=32)[0])
    assert len(method.call.recordings) == 1


@pytest.mark.gpu
def test_moved_weights_are_recorded_anew() -> None:
    method = create_method("tent", make_model())
    images = batches(1)[0]
    for _ in range(3):
        method(images)
    for parameter in method.model.parameters():
        parameter.data = parameter.data.clone() * 0
    assert torch.allclose(method(images), method(images), atol=1e-3)
    assert float(method(images).std(0).max()) < 1e-3  # the network of zeros, not the recorded one
