"""Methods on predictions of pixels: which work, what they learn from, state and reset; losses in bands of rows."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.segmentation.networks import CLASSES, batches, upernet
from trust_tta.errors import TrustError
from trust_tta.methods import gather_fisher, losses
from trust_tta.methods.base import Method
from trust_tta.methods.parameters import select
from trust_tta.methods.ranking import rank_orders
from trust_tta.methods.registry import METHODS, create_method
from trust_tta.methods.statistics import SAMPLES_PER_SEGMENTED_IMAGE
from trust_tta.methods.tent import Tent
from trust_tta.ops import segmentation_logits as bands

OPEN: dict[str, dict[str, Any]] = {
    "eta": {"margin": 10.0, "d_margin": 2.0},
    "sar": {"margin": 10.0, "reset_threshold": 0},
}
LEARNERS = ("tent", "eta", "sar", "shot", "trust_naive", "trust", "tide", "repetition")
WORKING = ("source", "bn", *LEARNERS, "ensemble", "augmentation")
MODES = ("sequential", "replicate", "split")


def make(name: str, model: nn.Module | None = None, **options: Any) -> Method:
    return create_method(name, model or upernet(), **{**OPEN.get(name, {}), **options})


def tensors(state: Any) -> list[Tensor]:
    if isinstance(state, Tensor):
        return [state]
    values = state.values() if isinstance(state, dict) else state if isinstance(state, list | tuple) else []
    return [tensor for value in values for tensor in tensors(value)]


@pytest.mark.parametrize("name", WORKING)
def test_methods_give_logits_of_every_pixel_and_come_back_to_the_source(name: str) -> None:
    model = upernet()
    before = copy.deepcopy(model.state_dict())
    method = make(name, model)
    stream = batches(2)
    first = [method(images) for images in stream]
    assert all(logits.shape == (6, CLASSES, 14, 18) for logits in first)
    assert method.evaluate(stream[0]).shape == first[0].shape
    method.reset()
    assert all(torch.equal(model.state_dict()[key], value) for key, value in before.items())
    assert all(torch.equal(again, logits) for again, logits in zip(map(method, stream), first, strict=True))


@pytest.mark.parametrize("name", LEARNERS)
def test_learners_change_the_prediction_and_restore_it_from_a_state(name: str) -> None:
    stream = batches(3)
    method = make(name, lr=1e-2)
    method(stream[0])
    assert method.counters.updates > 0
    state = copy.deepcopy(method.state_dict())
    expected = [method(images) for images in stream[1:]]
    other = make(name, lr=1e-2)
    other.load_state_dict(state)
    assert all(torch.equal(other(x), logits) for x, logits in zip(stream[1:], expected, strict=True))
    plain = make("bn" if method.statistics.kind == "batch" else "source")
    assert not torch.allclose(expected[0], plain(stream[1]), atol=1e-4)
    assert all(tensor.isfinite().all() for tensor in tensors(method.state_dict()) if tensor.is_floating_point())


@pytest.mark.parametrize("name", [name for name in METHODS if name not in WORKING])
def test_other_methods_work_or_refuse_in_one_line(name: str) -> None:
    outcome: Tensor | TrustError
    try:
        outcome = make(name)(batches(1)[0])
    except TrustError as error:
        outcome = error
    assert isinstance(outcome, TrustError) or outcome.shape == (6, CLASSES, 14, 18)
    assert isinstance(outcome, Tensor) or "\n" not in str(outcome)


@pytest.mark.parametrize("name", ["lame", "foa", "deyo", "roid", "cmf"])
def test_methods_that_compare_images_refuse_pixels(name: str) -> None:
    with pytest.raises(TrustError):
        make(name)(batches(1)[0])


def test_eata_holds_pixels_to_the_fisher_information_of_clean_ones() -> None:
    model, stream = upernet(), batches(3)
    fisher = gather_fisher(model, stream[:1])
    method = make("eata", model, fisher=fisher, margin=1.01, d_margin=2.0, lr=1e-2)
    assert method(stream[1]).shape == (6, CLASSES, 14, 18)
    assert method.counters.updates == 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("norm", ["batch", "layer"])
def test_trust_runs_in_all_modes(mode: str, norm: Literal["batch", "layer"]) -> None:
    method = make("trust", upernet(norm), mode=mode, k=3, lr=1e-3)
    images = batches(1)[0]
    plain = method.evaluate(images)
    assert not torch.allclose(method(images), plain, atol=1e-5)
    assert method.counters.updates > 0


@pytest.mark.parametrize("mode", ["sequential", "replicate"])
def test_trust_is_the_mean_of_steps_on_all_pixels(mode: str) -> None:
    """By hand: pseudo-labels of every pixel, one step of Adam under each order, the mean of the weights."""
    images, lr, orders = batches(1)[0], 1e-3, ["abcd", "badc"]
    hand = upernet("layer")
    names = select(hand, "ss2d")
    start = {name: hand.get_parameter(name).detach().clone() for name in names}
    parameters = [hand.get_parameter(name) for name in names]
    hand.requires_grad_(False)
    for parameter in parameters:
        parameter.requires_grad_()
    optimizer = torch.optim.Adam(parameters, lr=lr)
    merged = {name: torch.zeros_like(value) for name, value in start.items()}
    for order in orders:
        if mode == "replicate":
            optimizer = torch.optim.Adam(parameters, lr=lr)
            with torch.no_grad():
                for name in names:
                    hand.get_parameter(name).copy_(start[name])
        logits = hand(images, order=order)
        flat, labels = logits.movedim(1, -1).reshape(-1, CLASSES), logits.detach().argmax(1).reshape(-1)
        optimizer.zero_grad()
        F.cross_entropy(flat, labels).backward()
        optimizer.step()
        for name in names:
            merged[name] += hand.get_parameter(name).detach() / len(orders)
    with torch.no_grad():
        for name in names:
            hand.get_parameter(name).copy_(merged[name])
        expected = hand(images)
    found = make("trust", upernet("layer"), orders=orders, lr=lr, mode=mode, statistics="source")(images)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_tent_descends_the_mean_entropy_of_all_pixels() -> None:
    images = batches(1)[0]
    method = make("tent", upernet("layer"), lr=1e-3, statistics="source")
    before = losses.entropy(method.evaluate(images)).mean()
    after = losses.entropy(method(images)).mean()
    assert after < before
    hand = upernet("layer")
    names = select(hand, "bn")
    log_p = hand(images).log_softmax(1)
    gradients = torch.autograd.grad(
        -(log_p.exp() * log_p).sum(1).mean(), [hand.get_parameter(n) for n in names], allow_unused=True
    )
    for name, gradient in zip(names, gradients, strict=True):
        moved = method.adapted[name].detach() - upernet("layer").get_parameter(name)
        assert gradient is not None, name
        clear = gradient.abs() > 1e-5
        assert torch.equal(moved[clear].sign(), -gradient[clear].sign()), name  # Adam's first step


def test_eta_leaves_out_unsure_pixels() -> None:
    images = batches(1)[0]
    method = make("eta", margin=0.4)
    with torch.no_grad():
        logits = make("bn")(images)
    chosen = method.select(logits)  # type: ignore[operator]
    assert chosen.shape == (6, 14, 18)
    assert 0 < int(chosen.sum()) < chosen.numel()


def test_what_is_adapted_by_default() -> None:
    model = upernet()
    for parameters in ("ss2d", "bn", "all"):
        names = select(model, parameters)
        assert not [name for name in names if name.startswith(("auxiliary_head.", "decode_head.conv_seg."))]
    assert [name for name in select(model, "bn") if name.startswith("decode_head.")]
    assert not [name for name in select(model, "bn", skip_last=True) if name.startswith("decode_head.")]
    assert "backbone.outnorm0.weight" in select(model, "bn")


def test_one_picture_is_enough_for_batch_statistics() -> None:
    """Pooled to one cell, a picture gives a norm one value per channel: such norms keep those of training."""
    method = make("bn")
    logits = method(batches(1, images=1)[0])
    assert logits.isfinite().all()
    pooled = method.model.get_submodule("decode_head.psp_modules.0.1.bn")
    assert pooled.running_mean is not None
    assert method.model.get_submodule("decode_head.bottleneck.bn").running_mean is None


def test_orders_are_ranked_by_the_mean_entropy_of_pixels() -> None:
    model, images = upernet("layer"), batches(1)[0]
    ranked = rank_orders(model, [images[:2], images[2:]], statistics="source")
    assert len(ranked) == 24
    order, value = ranked[0]
    with torch.no_grad():
        assert value == pytest.approx(float(losses.entropy(model(images, order=order)).mean()), rel=1e-5)


def test_a_picture_counts_for_many_images_in_the_statistics_of_the_stream() -> None:
    method, images = make("tide"), batches(1)[0]
    method(images)
    norms = {name: norm for name, norm in method.statistics.norms.items() if not name.startswith("auxiliary_head.")}
    assert {float(norm.images) for norm in norms.values()} == {SAMPLES_PER_SEGMENTED_IMAGE * len(images)}


@pytest.mark.parametrize("pictures", [2, 8])
def test_the_step_of_tide_grows_with_the_images_that_a_segmented_image_stands_for(pictures: int) -> None:
    method = make("tide", upernet("layer"), lr=1e-3, source_decay=0.0, step_scaling=False)
    start = method.weights.snapshot().clone()
    method(batches(1, images=pictures)[0])
    moved = (method.weights.snapshot() - start).abs()
    expected = 1e-3 * math.sqrt(SAMPLES_PER_SEGMENTED_IMAGE * pictures / 128)  # the first step of Adam is lr
    expected *= math.sqrt(2**19 / max(len(start), 2**14))
    assert float(moved.median()) == pytest.approx(expected, rel=1e-2)


def test_overridden_loss_gets_full_size_logits() -> None:
    class Own(Tent):
        def loss(self, logits: Any) -> Tensor:
            assert isinstance(logits, Tensor)
            return losses.entropy(logits).mean()

    images = batches(1)[0]
    own, tent = Own(upernet()), make("tent")
    torch.testing.assert_close(own(images), tent(images), rtol=1e-4, atol=1e-4)
    assert own.logits_before is not None
    assert own.logits_before.shape == own(images).shape


# bands of rows


@pytest.mark.parametrize("function", [losses.entropy, losses.come_entropy, losses.pseudo_label_loss])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_bands_change_neither_values_nor_gradients(
    function: Callable[[Tensor], Tensor], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = (3 * torch.randn(2, 4, 11, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))).to(dtype)
    whole = logits.double().requires_grad_()
    weights = torch.rand(2, 11, 7, dtype=torch.float64)
    expected = (function(whole) * weights).sum()
    (wanted,) = torch.autograd.grad(expected, whole)
    monkeypatch.setattr(bands, "MAX_CHUNK_ELEMENTS", 2 * 4 * 7 * 3)
    banded = logits.clone().requires_grad_()
    found = (function(banded) * weights).sum()
    (gradient,) = torch.autograd.grad(found, banded)
    exact = dtype == torch.float64
    torch.testing.assert_close(found.double(), expected, rtol=1e-12 if exact else 1e-5, atol=0)
    torch.testing.assert_close(gradient.double(), wanted, rtol=1e-10 if exact else 1e-2, atol=1e-12 if exact else 1e-4)


def test_bands_are_gradchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bands, "MAX_CHUNK_ELEMENTS", 1)
    logits = torch.randn(1, 3, 4, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(losses.entropy, (logits,))


def test_nothing_of_the_size_of_the_logits_is_kept_for_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bands, "MAX_CHUNK_ELEMENTS", 1000)
    logits = torch.randn(2, 8, 40, 40, requires_grad=True)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        losses.entropy(logits).mean()
    large = [t for t in kept if t.numel() >= logits.numel()]
    assert all(t.data_ptr() == logits.data_ptr() for t in large)


@pytest.mark.parametrize("name", ["tent", "trust", "sar"])
def test_methods_do_the_same_in_bands(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    images = batches(1)[0]
    expected = make(name, lr=1e-3)(images)
    monkeypatch.setattr(bands, "MAX_CHUNK_ELEMENTS", 200)
    torch.testing.assert_close(make(name, lr=1e-3)(images), expected, rtol=1e-4, atol=1e-4)
