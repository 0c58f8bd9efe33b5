"""No NaN in the weights, no half update, no change to the caller's network, none to the state after an error."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.methods.networks import CLASSES, LEARNERS, OPEN, batches, convnet, make, run, same, vmamba, weights
from trust_tta.errors import ConfigError, DataError, ShapeError, TrustError
from trust_tta.methods.base import Method
from trust_tta.methods.registry import list_methods
from trust_tta.ops.segmentation_logits import upsample

every_method = pytest.mark.parametrize("name", list_methods())
KINDS: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in list_methods()} | {
    "trust-parallel": ("trust", {"mode": "replicate"}),
    "trust-side-by-side": ("trust", {"mode": "split", "split_statistics": "batch"}),
    "trust-episodic": ("trust", {"episodic": True}),
    "foa-episodic": ("foa", {"episodic": True}),
    "sar-loose": ("sar", {"margin": 0.95}),
    "eta-loose": ("eta", {"margin": 0.95}),
    "cotta": ("cotta", {"head": False}),
    "dpcore": ("dpcore", {"rho": 0.0}),
}


MORE = ("lame", "foa", "tide", "rotta", "neo", "t3a", "dpcore", "bn_ema")  # what moves beside weights counts at once


def bad_batches() -> dict[str, Any]:
    (good,) = batches(1)
    spoilt = good.clone()
    spoilt[3, 1, 5, 2] = torch.nan
    infinite = good.clone()
    infinite[0, 0, 0, 0] = torch.inf
    return {
        "three axes": good[0],
        "whole numbers": (100 * good).to(torch.uint8),
        "double": good.double(),
        "half": good.half(),
        "no images": good[:0],
        "no pixels": good[:, :, :0],
        "one channel": good[:, :1],
        "a NaN pixel": spoilt,
        "an infinite pixel": infinite,
        "not a tensor": good.numpy(),
    }


@every_method
def test_a_bad_batch_is_one_line_and_changes_nothing(name: str) -> None:
    method = make(name, vmamba())
    run(method, batches(1, seed=3))
    before, last = method.state_dict(), method.logits_before
    for case, images in bad_batches().items():
        with pytest.raises(TrustError) as error:
            method(images)
        assert "\n" not in str(error.value), case
        assert len(str(error.value)) > 20, case
        assert same(method.state_dict(), before), case
        assert method.logits_before is last, case
    (images,) = batches(1, seed=4)
    unharmed = make(name, vmamba())
    run(unharmed, batches(1, seed=3))
    assert torch.equal(method(images), unharmed(images))


@pytest.mark.parametrize("statistics", ["batch", "stream", "source"])
@every_method
def test_one_image_has_the_statistics_of_its_pixels(name: str, statistics: str) -> None:
    one = batches(1, images=1)[0]
    outputs = make(name, vmamba(), statistics=statistics)(one)
    assert outputs.shape == (1, CLASSES)
    assert outputs.isfinite().all()


@every_method
def test_a_map_of_one_number_has_none(name: str) -> None:
    one = batches(1, images=1, size=8)[0]  # the last map of the tiny network has one pixel
    method = make(name, vmamba())
    no_batch_statistics = ("source", "tide", "rotta", "neo", "t3a", "dpcore", "bn_alpha", "bn_ema")
    if name in (*no_batch_statistics, "foa"):  # which adds a row
        assert method(one).shape == (1, CLASSES)
        return
    before = method.state_dict()
    with pytest.raises(ShapeError, match=r"^1 images of 8x8 pixels have no batch .*set statistics=\"stream\"$"):
        method(one)
    assert same(method.state_dict(), before)
    assert make(name, vmamba(), statistics="stream")(one).shape == (1, CLASSES)


@every_method
def test_images_of_one_pixel_are_taken_or_refused_in_one_line(name: str) -> None:
    """A VMamba takes them, where batches give its norms more than one number; a network without padding does not."""
    (images,) = batches(1, size=1)
    if name == "foa":
        with pytest.raises(ShapeError, match="prompts do not fit in a row of 1 tokens"):
            make(name, vmamba())(images)
    else:
        assert make(name, vmamba())(images).shape == (9, CLASSES)
    try:
        plain = make(name, convnet())
    except TrustError:
        return  # it needs more than a plain network
    before = plain.state_dict()
    reason = "do not fit in a row" if name == "foa" else r"does not take 9 images of 1x1 pixels and 3 channels .*; give"
    with pytest.raises(ShapeError, match=reason) as refusal:
        plain(images)
    assert "\n" not in str(refusal.value)
    assert same(plain.state_dict(), before)


def fail_on_call(method: Method, number: int) -> list[int]:
    """Make the first block of the network fail when it runs for the `number`-th time; returns the count so far."""
    calls = [0]

    def hook(module: nn.Module, inputs: object, output: object) -> None:
        calls[0] += 1
        if calls[0] == number:
            raise MemoryError("no memory left")

    method.model.layers[0].blocks[0].norm.register_forward_hook(hook)  # type: ignore[index, union-attr]
    return calls


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_in_the_middle_of_a_batch_undoes_the_batch(kind: str) -> None:
    name, options = KINDS[kind]
    first, second, third = batches(3)
    calls = fail_on_call(counted := make(name, vmamba(), **options), -1)
    run(counted, [first])
    a_batch = calls[0]
    for number in {1, a_batch // 2 + 1, a_batch}:
        method = make(name, vmamba(), **options)
        method(first)
        before, caller = method.state_dict(), weights(method.detach())
        fail_on_call(method, number)
        with pytest.raises(MemoryError):
            method(second)
        assert same(method.state_dict(), before)
        assert same(weights(method.detach()), caller)
        undisturbed = make(name, vmamba(), **options)
        undisturbed(first)
        assert torch.equal(method(third), undisturbed(third))


def poison(model: nn.Module, value: float) -> None:
    model.classifier.head.bias.data[0] = value  # type: ignore[union-attr, operator]


@pytest.mark.parametrize("kind", KINDS)
def test_predictions_that_are_not_finite_are_refused_and_counted(kind: str) -> None:
    name, options = KINDS[kind]
    first, second, third = batches(3)
    model = vmamba()
    method, undisturbed = make(name, model, **options), make(name, vmamba(), **options)
    run(method, [first])
    run(undisturbed, [first])
    before = method.state_dict()
    poison(model, torch.nan)  # the network shares the caller's frozen weights
    with pytest.raises(DataError, match="not finite .*nothing was changed") as error:
        method(second)
    assert "\n" not in str(error.value)
    after = method.state_dict()
    assert after["counters"].pop("refused") == before["counters"].pop("refused") + 1
    assert same(after, before)
    poison(model, 0.0)
    assert torch.equal(method(third), undisturbed(third))


@pytest.mark.parametrize("name", ["source", "bn", "tent", "lame", "trust"])
def test_finite_pixels_that_overflow_are_refused(name: str) -> None:
    method = make(name, vmamba())
    before = method.state_dict()
    with pytest.raises(DataError, match=r"largest pixel is 3e\+38"):
        method(torch.full((9, 3, 16, 16), 3e38))
    assert method.counters.refused == 1
    method.reset()
    assert same(method.state_dict(), before)


@pytest.mark.parametrize("name", ["bn_ema", "rotta"])
def test_pixels_that_overflow_moving_statistics_are_refused(name: str) -> None:
    """The prediction is finite, and so would be all later ones: alike for every image."""
    first, second = batches(2)
    method, undisturbed = make(name, vmamba()), make(name, vmamba())
    run(method, [first])
    run(undisturbed, [first])
    before = method.state_dict()
    with pytest.raises(DataError, match=r"not finite .*largest pixel is .*e\+2\d.*nothing was changed"):
        method(first * 1e25)
    after = method.state_dict()
    assert after["counters"].pop("refused") == before["counters"].pop("refused") + 1
    assert same(after, before)
    assert torch.equal(method(second), undisturbed(second))


def spoil_learning(method: Method) -> None:
    """Make the loss of every learning pass not a number; predictions stay as they are."""
    plain: Any = method.logits

    def predict(images: Tensor, **options: Any) -> Tensor:
        logits: Tensor = plain(images, **options)
        return logits * torch.nan if logits.requires_grad else logits

    method.logits = predict  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "kind", [*(name for name in LEARNERS if name not in ("tide", "rotta")), "trust-parallel", "trust-side-by-side"]
)
def test_a_loss_that_is_not_finite_never_reaches_the_weights(kind: str) -> None:
    name, options = KINDS[kind]
    first, second = batches(2)
    method = make(name, vmamba(), **options)
    run(method, [first])
    before = method.state_dict()
    spoil_learning(method)
    assert method(second).isfinite().all()
    after = method.state_dict()
    for part in ("adapted", "optimizer", "extra"):
        assert same(after[part], before[part])
    assert after["counters"]["updates"] == before["counters"]["updates"]
    refused = 0 if name in OPEN else 2 if name in ("trust", "ensemble", "repetition", "augmentation") else 1
    assert after["counters"]["skipped"] == refused  # those that filter select nothing; others refuse each update


def test_rotta_remembers_but_learns_nothing_from_a_loss_that_is_not_finite() -> None:
    first, second = batches(2)
    method = make("rotta", vmamba())
    run(method, [first])
    before = method.state_dict()
    spoil_learning(method)
    assert method(second).isfinite().all()
    after = method.state_dict()
    for key in ("adapted", "optimizer", "statistics"):
        assert same(after[key], before[key])
    for key in ("student", "student_statistics"):
        assert same(after["extra"][key], before["extra"][key])
    assert (after["counters"]["skipped"], after["extra"]["offered"]) == (1, 18)


class SharpCorner(nn.Module):
    """Finite values whose gradient is not: the square root of zero."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)
        self.head = nn.Linear(3, 4)
        self.corner = True

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(images).mean((2, 3)))
        return logits + (self.norm.weight * 0).sqrt().sum() if self.corner else logits


@pytest.mark.parametrize("name", ["tent", "eta", "sar", "shot"])
def test_a_gradient_that_is_not_finite_never_reaches_the_weights(name: str) -> None:
    options: dict[str, Any] = {"margin": 10.0, "skip_last": False} if name == "sar" else {}
    options |= {"margin": 10.0, "d_margin": 2.0} if name == "eta" else {}
    method = make(name, SharpCorner(), **options)
    first, second = batches(2)
    assert isinstance(method.model, SharpCorner)
    method.model.corner = False
    method(first)
    assert method.counters.updates == 1
    before = method.state_dict()
    method.model.corner = True
    assert method(second).isfinite().all()
    assert method.counters.skipped == 1
    for part in ("adapted", "optimizer", "extra"):
        assert same(method.state_dict()[part], before[part])


def test_a_learning_rate_that_explodes_is_refused() -> None:
    method = make("trust", vmamba(), k=2, lr=1e30)
    before = method.state_dict()
    for images in batches(3):
        with pytest.raises(DataError, match="the learning rate"):
            method(images)
    assert method.counters.refused == 3
    method.reset()
    assert same(method.state_dict(), before)


@every_method
def test_outer_no_grad_and_inference_mode_make_no_difference(name: str) -> None:
    stream = batches(2)
    expected = run(make(name, vmamba()), stream)
    with torch.no_grad():
        assert same(run(make(name, vmamba()), stream), expected)
    outside, model = make(name, vmamba()), vmamba()
    with torch.inference_mode():
        assert same(run(outside, [images.clone() for images in stream]), expected)
        inside = make(name, model)
        assert same(run(inside, stream), expected)
        state = inside.state_dict()
        inside.reset()
        assert same(run(inside, stream), expected)
        inside.load_state_dict(state)
        twin = inside.fork()
    assert same(inside(stream[0]), twin(stream[0]))
    assert not expected[0].requires_grad
    assert torch.is_grad_enabled()


def test_copies_made_under_inference_mode_can_learn() -> None:
    model, stream = vmamba(), batches(2)
    with torch.inference_mode():
        method = make("trust", model, mode="replicate")
    expected = run(make("trust", vmamba(), mode="replicate"), stream)
    assert same(run(method, stream), expected)
    with torch.inference_mode():
        method.reset()
    assert same(run(method, stream), expected)


def test_a_network_made_under_inference_mode_is_refused() -> None:
    with torch.inference_mode():
        model = vmamba()
    assert make("source", model)(batches(1)[0]).shape == (9, CLASSES)
    with pytest.raises(ConfigError, match="inference_mode"):
        make("tent", model)


@every_method
def test_the_callers_network_keeps_modes_flags_and_statistics(name: str) -> None:
    model = vmamba(drop_path=0.3).train()
    model.layers[0].eval()
    for i, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(i % 2 == 0)
    flags = [p.requires_grad for p in model.parameters()]
    modes = [m.training for m in model.modules()]
    buffers = copy.deepcopy(dict(model.named_buffers()))
    method = make(name, model)
    run(method, batches(2))
    method.train()
    method.reset()
    run(method, batches(1))
    caller = method.detach()
    assert caller is model
    assert [p.requires_grad for p in caller.parameters()] == flags
    assert [m.training for m in caller.modules()] == modes
    assert same(dict(caller.named_buffers()), buffers)
    assert all(p.grad is None for p in caller.parameters())


def test_images_that_ask_for_gradients_are_not_traced() -> None:
    (images,) = batches(1)
    images.requires_grad_()
    logits = make("tent", vmamba())(images)
    assert not logits.requires_grad
    assert images.grad is None


@pytest.mark.parametrize("name", ["tent", "eta", "shot"])
def test_a_refused_first_step_leaves_no_momentum_behind(name: str) -> None:
    """Memory that nobody wrote is filled with NaN here, so that whoever reads it is found out."""
    (images,) = batches(1)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        refused, fresh = (make(name, vmamba(), optimizer="sgd", lr=1e-2) for _ in range(2))
        assert not refused.step(upsample(refused.logits(images)).sum() * torch.nan)
        for method in (refused, fresh):
            assert method.step(upsample(method.logits(images)).square().mean())
    finally:
        torch.use_deterministic_algorithms(before)
    assert same(weights(refused.model), weights(fresh.model))


@every_method
def test_evaluate_predicts_and_changes_nothing(name: str) -> None:
    """Where a step has no length, adapting and then predicting is predicting."""
    options = {"lr": 0.0} if name in LEARNERS else {}
    method = make(name, vmamba(), **options)
    first, second = batches(2)
    method(first)
    before = method.state_dict()
    found = method.evaluate(second)
    assert same(method.state_dict(), before)
    if name not in (*MORE, "augmentation"):  # which predict a batch by more than the weights
        torch.testing.assert_close(found, method(second))


@pytest.mark.parametrize("name", ["trust", "ensemble", "foa"])
def test_evaluate_shows_what_was_learned(name: str) -> None:
    method = make(name, vmamba(), **({"lr": 1e-2} if name in LEARNERS else {}))
    first, second = batches(2)
    untouched = method.evaluate(second)
    method(first)
    assert not torch.allclose(method.evaluate(second), untouched, atol=1e-3)
