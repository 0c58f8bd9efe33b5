"""Memory of adaptation on dense predictions: counted in maps of the size of a batch's logits in float32."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from trust_tta.bench.metrics import PixelMeter
from trust_tta.live.stream import Stream
from trust_tta.live.stream_statistics import MAX_PIXELS, probability_rows
from trust_tta.methods import gather_fisher, losses
from trust_tta.methods.base import Method
from trust_tta.methods.ensembling import log_mean_of_members
from trust_tta.methods.registry import create_method
from trust_tta.models.config import UPerNetConfig
from trust_tta.models.upernet import UPerNet
from trust_tta.ops import segmentation_logits as bands
from trust_tta.ops.segmentation_logits import CoarseLogits
from trust_tta.training.segmentation import two_head_loss

CLASSES, IMAGES, SIDE = 48, 2, 64
MAP = IMAGES * CLASSES * SIDE * SIDE

# Name of the method, its options, and the most bytes it takes at once, in maps, where bands are narrow.
METHODS: dict[str, tuple[str, dict[str, Any], float]] = {
    "source": ("source", {}, 1.4),
    "bn": ("bn", {}, 1.4),
    "tent": ("tent", {}, 1.6),
    "tent twice, before": ("tent", {"steps": 2, "predict": "before", "entropy": "come"}, 1.6),
    "eta": ("eta", {"margin": 10.0, "d_margin": 2.0}, 1.6),
    "eata": ("eata", {"margin": 1.01, "d_margin": 2.0}, 1.6),
    "sar": ("sar", {"margin": 10.0, "reset_threshold": 0}, 1.6),
    "shot": ("shot", {"confidence": 0.0}, 1.6),
    "trust": ("trust", {"k": 3}, 1.6),
    "trust before": ("trust", {"k": 3, "predict": "before", "merge": "entropy"}, 1.6),
    "trust replicate": ("trust", {"k": 3, "mode": "replicate", "steps": 2}, 1.6),
    "trust split": ("trust", {"k": 2, "mode": "split"}, 1.6),
    "trust split, one pass": ("trust", {"k": 2, "mode": "split", "split_statistics": "batch"}, 1.6),
    "trust mirror": ("trust", {"k": 2, "views": "mirror", "loss": "confusion"}, 1.6),
    "trust_naive": ("trust_naive", {}, 1.6),
    "repetition": ("repetition", {"k": 2}, 1.6),
    "augmentation": ("augmentation", {"k": 2}, 1.6),
    "ensemble": ("ensemble", {"k": 3}, 1.8),
    "tide": ("tide", {}, 1.9),
    "tide after": ("tide", {"predict": "after"}, 1.9),
    "tide alone": ("tide", {"views": "none"}, 1.6),
}


def network() -> UPerNet:
    torch.manual_seed(0)
    config = UPerNetConfig(
        depths=(1, 1), dims=(8, 16), channels=8, auxiliary_channels=4, num_classes=CLASSES, patch_size=4,
        overlapping_stem=False, norm="batch", pools=(1, 2),
    )  # fmt: skip
    return UPerNet.from_config(config).eval()


def allocations(call: Callable[[], object]) -> list[int]:
    """The bytes that are allocated inside of `call`, one after the other; negative where they are freed."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        call()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    return [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]


def peak_maps(call: Callable[[], object]) -> float:
    """The most bytes that are allocated at once, in maps."""
    return max(accumulate(allocations(call), initial=0)) / (4 * MAP)


def living_maps(call: Callable[[], object]) -> int:
    """The most tensors of the size of a map, or of more, that live at once."""
    sizes = [nbytes for nbytes in allocations(call) if abs(nbytes) >= 4 * MAP]
    return max(accumulate((1 if nbytes > 0 else -1 for nbytes in sizes), initial=0))


@pytest.fixture
def narrow_bands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bands, "MAX_CHUNK_ELEMENTS", MAP // 32)


def adapted_once(case: str) -> tuple[Method, Tensor]:
    """A method that has seen a batch, and the next one."""
    name, options, _ = METHODS[case]
    model = network()
    first, second = torch.randn(2, IMAGES, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    if name == "eata":
        options = {**options, "fisher": gather_fisher(model, [first])}
    method = create_method(name, model, **options)
    method(first)
    return method, second


@pytest.mark.parametrize("case", METHODS)
def test_the_prediction_is_the_only_map_of_a_step(case: str) -> None:
    method, images = adapted_once(case)
    updates = method.counters.updates
    assert living_maps(lambda: method(images)) == 1
    assert method.counters.updates > updates or case in ("source", "bn")
    assert living_maps(lambda: method.evaluate(images)) == 1


@pytest.mark.usefixtures("narrow_bands")
@pytest.mark.parametrize("case", METHODS)
def test_a_step_takes_little_beside_its_prediction(case: str) -> None:
    method, images = adapted_once(case)
    assert peak_maps(lambda: method(images)) < METHODS[case][2]


@pytest.mark.parametrize("size", [(SIDE, SIDE), (90, 70)])
def test_metrics_make_no_map(size: tuple[int, int]) -> None:
    method, images = adapted_once("tent")
    outputs = method(images)
    labels = torch.randint(0, CLASSES, (IMAGES, *size), generator=torch.Generator().manual_seed(0))
    meter = PixelMeter(classes=CLASSES, keep=frozenset([1]))
    indices = torch.arange(IMAGES)
    assert living_maps(lambda: meter.update(outputs, labels, before=method.prediction_before, indices=indices)) == 0


@pytest.mark.parametrize("case", ["source", "tent", "trust", "tide"])
def test_a_guarded_stream_makes_no_other_map(case: str) -> None:
    method, images = adapted_once(case)
    stream = Stream(method)
    stream(images)
    assert living_maps(lambda: stream(images)) == 1


def test_the_guard_sees_the_same_pixels_of_coarse_and_whole_logits() -> None:
    pixels = CoarseLogits(torch.randn(3, 5, 20, 25, generator=torch.Generator().manual_seed(0)), (80, 100))
    rows = probability_rows(pixels)
    assert len(rows) <= MAX_PIXELS
    torch.testing.assert_close(rows, probability_rows(pixels.upsample()))
    every = -(-3 * 80 * 100 // MAX_PIXELS)
    torch.testing.assert_close(rows, probability_rows(pixels.upsample().movedim(1, -1).reshape(-1, 5))[::every])


def test_fisher_weights_make_no_map() -> None:
    model, images = network(), torch.randn(IMAGES, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    assert living_maps(lambda: gather_fisher(model, [images])) == 0


def test_the_training_loss_makes_no_map() -> None:
    main, auxiliary = (torch.randn(IMAGES, CLASSES, 8, 8, requires_grad=True) for _ in range(2))
    labels = torch.randint(0, CLASSES, (IMAGES, SIDE, SIDE))
    assert living_maps(lambda: two_head_loss(main, auxiliary, labels).backward()) == 0


# bands give the same


def as_rows(logits: Tensor) -> Tensor:
    return logits.movedim(1, -1).reshape(-1, logits.shape[1])


@pytest.mark.parametrize("what", ["mean", "chosen", "confusion", "labels"])
def test_sums_over_bands_are_those_of_all_predictions_at_once(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bands, "MAX_CHUNK_ELEMENTS", 2 * 4 * 7 * 3)
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
    found, wanted = pairs[what](logits, True), pairs[what](as_rows(logits), False)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
    weights = torch.rand(found.shape, dtype=torch.float64, generator=generator)
    gradients = [torch.autograd.grad((value * weights).sum(), logits)[0] for value in (found, wanted)]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-9, atol=1e-12)


def test_own_labels_are_the_same_in_bands() -> None:
    logits = 3 * torch.randn(IMAGES, CLASSES, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    confidence, labels = losses.own_labels(logits)
    wanted, classes = losses.own_labels(as_rows(logits))
    torch.testing.assert_close(confidence.reshape(-1), wanted)
    assert torch.equal(labels.reshape(-1), classes)


def test_the_mean_of_members_is_that_of_their_probabilities() -> None:
    logits = torch.randn(5, 3, 4, dtype=torch.float64)
    mean: Any = log_mean_of_members(list(logits))
    torch.testing.assert_close(mean.exp(), logits.softmax(2).mean(0))
