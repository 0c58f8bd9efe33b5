"""Memory of adaptation on dense predictions: counted in maps of the size of a batch's logits in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from trust_tta import bands
from trust_tta.methods import losses
from trust_tta.methods.registry import create_method
from trust_tta.methods.views import MeanProbability, log_mean_probability
from trust_tta.models.config import UPerNetConfig
from trust_tta.models.upernet import UPerNet
from trust_tta.training.pixels import two_head_loss

CLASSES, IMAGES, SIDE = 48, 2, 64
MAP = IMAGES * CLASSES * SIDE * SIDE

# Resizing takes two maps for a moment; beside these, the logits before the update and the gradient.
MOST: dict[str, tuple[float, dict[str, Any]]] = {
    "source": (2.4, {}),
    "bn": (2.4, {}),
    "tent": (3.5, {}),
    "eta": (3.5, {"margin": 10.0, "d_margin": 2.0}),
    "sar": (4.1, {"margin": 10.0, "reset_threshold": 0}),
    "shot": (4.3, {}),  # a gradient for each of three losses
    "trust": (4.1, {"k": 3}),
    "ensemble": (6.0, {"k": 3}),
    "tide": (11.3, {}),  # log-probabilities of the pictures and of their mirror images
}


def network() -> UPerNet:
    torch.manual_seed(0)
    config = UPerNetConfig(
        depths=(1, 1), dims=(8, 16), channels=8, auxiliary_channels=4, num_classes=CLASSES, patch_size=4,
        overlapping_stem=False, norm="batch", pools=(1, 2),
    )  # fmt: skip
    return UPerNet.from_config(config).eval()


def peak_maps(call: Callable[[], object]) -> float:
    """The most bytes that are allocated at once inside of `call`, in maps."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        call()
    results = profiled.profiler.kineto_results
    events = sorted((e for e in results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns())
    now = most = 0
    for event in events:
        now += event.nbytes()
        most = max(most, now)
    return most / (4 * MAP)


@pytest.fixture(autouse=True)
def narrow_bands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bands, "MOST_ELEMENTS", MAP // 32)


@pytest.mark.parametrize("name", MOST)
def test_methods_hold_few_maps_at_once(name: str) -> None:
    most, options = MOST[name]
    method = create_method(name, network(), **options)
    first, second = torch.randn(2, IMAGES, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    method(first)
    assert peak_maps(lambda: method(second)) < most


def test_the_training_loss_holds_the_logits_and_their_gradient_of_each_head() -> None:
    main, auxiliary = (torch.randn(IMAGES, CLASSES, 8, 8, requires_grad=True) for _ in range(2))
    labels = torch.randint(0, CLASSES, (IMAGES, SIDE, SIDE))
    assert peak_maps(lambda: two_head_loss(main, auxiliary, labels).backward()) < 3.5


# bands give the same


def rows_of(logits: Tensor) -> Tensor:
    return logits.movedim(1, -1).reshape(-1, logits.shape[1])


@pytest.mark.parametrize("what", ["mean", "chosen", "confusion", "labels"])
def test_sums_over_bands_are_those_of_all_predictions_at_once(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bands, "MOST_ELEMENTS", 2 * 4 * 7 * 3)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 4, 11, 7, dtype=torch.float64, generator=generator, requires_grad=True)
    chosen = torch.rand(2, 11, 7, generator=generator) < 0.5
    labels = logits.detach().argmax(1)
    pairs = {
        "mean": lambda x, dense: losses.mean_prediction(x),
        "chosen": lambda x, dense: losses.mean_prediction(x, chosen if dense else chosen.reshape(-1)),
        "confusion": lambda x, dense: losses.class_confusion(x, temperature=2.5),
        "labels": lambda x, dense: losses.chosen_label_loss(
            x, labels if dense else labels.reshape(-1), chosen if dense else chosen.reshape(-1)
        ),
    }
    found, wanted = pairs[what](logits, True), pairs[what](rows_of(logits), False)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
    weights = torch.rand(found.shape, dtype=torch.float64, generator=generator)
    gradients = [torch.autograd.grad((value * weights).sum(), logits)[0] for value in (found, wanted)]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-9, atol=1e-12)


def test_own_labels_are_the_same_in_bands() -> None:
    logits = 3 * torch.randn(IMAGES, CLASSES, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    confidence, labels = losses.own_labels(logits)
    wanted, classes = losses.own_labels(rows_of(logits))
    torch.testing.assert_close(confidence.reshape(-1), wanted)
    assert torch.equal(labels.reshape(-1), classes)


def test_a_running_mean_of_probabilities_is_that_of_all() -> None:
    logits = torch.randn(5, 3, 4, dtype=torch.float64)
    mean = MeanProbability()
    for one in logits:
        mean.add(one)
    torch.testing.assert_close(mean.log(), log_mean_probability(logits))
