from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trust_tta.bench.metrics import ClassificationMeter
from trust_tta.errors import ConfigError, DataError, ShapeError
from trust_tta.results import CellResult, SamplePrediction, from_json, to_json


def finish(meter: ClassificationMeter) -> CellResult:
    return meter.result(forwards=0, backwards=0, updates=0, skipped_updates=0)


def measure(outputs: Tensor, labels: Tensor, **settings: Any) -> CellResult:
    meter = ClassificationMeter(**settings)
    meter.update(outputs, labels)
    return finish(meter)


def slow_reference(p: npt.NDArray[np.float64], labels: npt.NDArray[np.int64]) -> dict[str, float]:
    """The metrics from their definitions, a sample at a time, in plain Python numbers."""
    n = len(labels)
    hits, entropy, nll, brier = 0, 0.0, 0.0, 0.0
    bins: list[list[tuple[float, bool]]] = [[] for _ in range(15)]
    for row, label in zip(p, labels, strict=True):
        top = max(range(len(row)), key=lambda k: row[k])
        hits += top == label
        entropy -= sum(x * math.log(x) for x in row if x > 0)
        nll -= math.log(row[label])
        brier += sum((x - (k == label)) ** 2 for k, x in enumerate(row))
        (place,) = (i for i in range(15) if i / 15 < row[top] <= (i + 1) / 15)
        bins[place].append((row[top], top == label))
    ece = sum(abs(sum(ok for _, ok in b) / len(b) - sum(c for c, _ in b) / len(b)) * len(b) / n for b in bins if b)
    return {"accuracy": hits / n, "entropy": entropy / n, "nll": nll / n, "brier": brier / n, "ece": ece}


def random_batch(n: int, c: int, seed: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(n, c, generator=draw) * 3, torch.randint(c, (n,), generator=draw)


@pytest.mark.parametrize(("n", "c"), [(1, 2), (7, 3), (257, 10), (63, 199)])
def test_logits_against_the_slow_reference(n: int, c: int) -> None:
    logits, labels = random_batch(n, c, seed=n)
    exponents = np.exp(logits.numpy().astype(np.float64))
    expected = slow_reference(exponents / exponents.sum(1, keepdims=True), labels.numpy())
    found = measure(logits, labels)
    assert {name: getattr(found, name) for name in expected} == pytest.approx(expected, rel=1e-10)
    probabilities = measure(logits.double().softmax(1), labels, probabilities=True)
    assert {name: getattr(probabilities, name) for name in expected} == pytest.approx(expected, rel=1e-10)


def test_two_samples_by_hand() -> None:
    p = torch.tensor([[0.5, 0.25, 0.25], [0.125, 0.125, 0.75]], dtype=torch.float64)
    found = measure(p, torch.tensor([0, 1]), probabilities=True)
    assert found.samples == 2
    assert found.accuracy == 0.5
    ln2 = math.log(2)
    assert found.entropy == pytest.approx((1.5 * ln2 + 0.25 * 3 * ln2 + 0.75 * math.log(4 / 3)) / 2, rel=1e-12)
    assert found.nll == pytest.approx((ln2 + 3 * ln2) / 2, rel=1e-12)
    assert found.brier == pytest.approx((0.375 + (1 / 64 + 49 / 64 + 36 / 64)) / 2, rel=1e-12)
    assert found.ece == pytest.approx((0.5 + 0.75) / 2, rel=1e-12)
    assert [i for i, count in enumerate(found.reliability.count) if count] == [7, 11]


def test_uniform_output_has_known_values() -> None:
    found = measure(torch.zeros(30, 10), torch.arange(30) % 10)
    assert found.entropy == pytest.approx(math.log(10), rel=1e-12)
    assert found.nll == pytest.approx(math.log(10), rel=1e-12)
    assert found.brier == pytest.approx(0.9, rel=1e-12)
    # All predictions are class 0 with confidence 0.1 and right one time in ten: perfectly calibrated.
    assert found.accuracy == 0.1
    assert found.ece == pytest.approx(0.0, abs=1e-12)


def test_known_calibration_error() -> None:
    # Confidence 0.8 and right 6 times in 10, in one bin: a gap of exactly 0.2.
    p = torch.tensor([[0.8, 0.2]] * 10, dtype=torch.float64)
    found = measure(p, torch.tensor([0] * 6 + [1] * 4), probabilities=True)
    assert found.ece == pytest.approx(0.2, rel=1e-12)
    assert found.reliability.count[11] == 10  # 0.8 is the right edge of bin 11
    assert found.reliability.correct[11] == 6


@pytest.mark.parametrize("k", range(8, 16))
def test_bins_are_closed_on_the_right(k: int) -> None:
    def bin_of(confidence: float) -> int:
        p = torch.tensor([[confidence, 1 - confidence]], dtype=torch.float64)
        return measure(p, torch.tensor([0]), probabilities=True).reliability.count.index(1)

    assert bin_of(k / 15) == k - 1
    if k < 15:
        assert bin_of(k / 15 + 1e-9) == k


def test_confident_and_right_or_wrong() -> None:
    logits = torch.tensor([[800.0, 0.0], [800.0, 0.0]])
    found = measure(logits, torch.tensor([0, 1]))
    assert (found.accuracy, found.brier, found.ece, found.entropy) == (0.5, 1.0, 0.5, 0.0)
    assert found.nll == 400.0  # exact from logits, however large
    zero = measure(torch.tensor([[1.0, 0.0]]), torch.tensor([1]), probabilities=True)
    assert zero.nll == pytest.approx(126 * math.log(2), rel=1e-12)  # the smallest normal float32 is 2 to the -126


def filled(parts: list[tuple[int, bool, float]], seed: int) -> ClassificationMeter:
    meter = ClassificationMeter(confusion=True, keep=range(3))
    for i, (n, with_before, seconds) in enumerate(parts):
        logits, labels = random_batch(n, 4, seed=seed + i)
        before = logits.flip(1) if with_before else None
        meter.update(logits, labels, before=before, indices=torch.arange(n), seconds=seconds)
    return meter


@given(cuts=st.lists(st.integers(0, 100), max_size=5))
@settings(deadline=None, max_examples=40)
def test_metrics_do_not_depend_on_the_batch_size(cuts: list[int]) -> None:
    logits, labels = random_batch(100, 5, seed=3)
    meter = ClassificationMeter()
    bounds = [0, *sorted(cuts), 100]
    for start, end in zip(bounds, bounds[1:], strict=False):
        meter.update(logits[start:end], labels[start:end], before=-logits[start:end])
    whole = ClassificationMeter()
    whole.update(logits, labels, before=-logits)
    found, expected = finish(meter), finish(whole)
    for name in ("samples", "accuracy", "accuracy_before"):
        assert getattr(found, name) == getattr(expected, name)
    for name in ("entropy", "nll", "brier", "ece"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=1e-12)
    assert found.reliability.count == expected.reliability.count


def test_no_samples_give_nan_not_an_error() -> None:
    empty = ClassificationMeter()
    empty.update(torch.zeros(0, 10), torch.zeros(0, dtype=torch.long))
    for meter in (ClassificationMeter(), empty):
        found = finish(meter)
        means = (found.accuracy, found.entropy, found.nll, found.brier, found.ece, meter.accuracy)
        assert all(map(math.isnan, means))
        assert found.accuracy_before is None
        assert (found.samples, found.seconds_median, found.history.samples) == (0, 0.0, ())
        assert to_json(from_json(CellResult, to_json(found))) == to_json(found)


def test_course_and_times() -> None:
    meter = ClassificationMeter()
    one, two = torch.tensor([[2.0, 0.0]]), torch.tensor([[0.0, 2.0], [2.0, 0.0]])
    meter.update(one, torch.tensor([0]), before=-one, seconds=3.0)
    meter.update(two, torch.tensor([1, 1]), before=two, seconds=1.0)
    meter.update(two, torch.tensor([1, 0]), before=two, seconds=1.25)
    found = meter.result(forwards=9, backwards=6, updates=5, skipped_updates=1, peak_memory=7, clean_accuracy=0.5)
    assert found.history.samples == (1, 2, 2)
    assert found.history.accuracy == (1.0, 0.5, 1.0)
    assert found.history.accuracy_before == (0.0, 0.5, 1.0)
    assert found.history.entropy == pytest.approx([found.entropy] * 3, rel=1e-12)
    assert (found.accuracy, found.accuracy_before, meter.accuracy) == (0.8, 0.6, 0.8)
    assert (found.seconds_median, found.seconds_mean, found.seconds_total) == (1.25, 1.75, 5.25)
    assert (found.forwards, found.backwards, found.updates, found.skipped_updates) == (9, 6, 5, 1)
    assert (found.peak_memory, found.clean_accuracy) == (7, 0.5)


def test_accuracy_before_needs_every_batch() -> None:
    meter = ClassificationMeter()
    meter.update(torch.eye(2), torch.tensor([0, 1]), before=torch.eye(2))
    meter.update(torch.eye(2), torch.tensor([0, 1]))
    assert finish(meter).accuracy_before is None
    assert finish(meter).history.accuracy_before is None


@pytest.mark.parametrize("probabilities", [False, True], ids=["logits", "probabilities"])
def test_a_class_subset_equals_scoring_its_columns(probabilities: bool) -> None:
    logits, _ = random_batch(50, 12, seed=5)
    classes = [1, 4, 7, 11]
    position = torch.arange(50) % 4
    labels = torch.tensor(classes)[position]
    outputs = logits.double().softmax(1) if probabilities else logits
    found = ClassificationMeter(classes=classes, probabilities=probabilities, confusion=True)
    found.update(outputs, labels, before=outputs)
    expected = ClassificationMeter()
    expected.update(logits[:, classes], position, before=logits[:, classes])
    ours, theirs = finish(found), finish(expected)
    for name in ("accuracy", "accuracy_before", "entropy", "nll", "brier", "ece"):
        assert getattr(ours, name) == pytest.approx(getattr(theirs, name), rel=1e-10)
    assert ours.confusion is not None
    assert {j for row in ours.confusion for j, count in enumerate(row) if count} <= set(classes)


def test_confusion_counts_pairs() -> None:
    found = measure(torch.eye(3)[[0, 1, 1, 2, 2, 2]], torch.tensor([0, 0, 1, 2, 2, 0]), confusion=True)
    assert found.confusion == ((1, 1, 1), (0, 1, 0), (0, 0, 2))
    assert measure(torch.eye(3), torch.arange(3)).confusion is None


def test_predictions_of_given_indices_are_kept() -> None:
    meter = ClassificationMeter(keep=[40, 7])
    p = torch.tensor([[0.25, 0.75], [0.5, 0.5], [1.0, 0.0]], dtype=torch.float64)
    meter.update(p.log(), torch.tensor([1, 0, 0]), before=-p, indices=torch.tensor([7, 8, 40]))
    near: Any = pytest.approx
    first, last = near(1 / (1 + math.exp(-0.5))), near(1 / (1 + math.exp(-1)))  # logits 0.5 and 1 apart
    assert finish(meter).predictions == (
        SamplePrediction(index=7, label=1, before=0, after=1, confidence=near(0.75), confidence_before=first),
        SamplePrediction(index=40, label=0, before=1, after=0, confidence=1.0, confidence_before=last),
    )


def test_without_a_prediction_before_there_is_no_confidence_before() -> None:
    meter = ClassificationMeter(keep=[0], classes=[0, 2])
    meter.update(torch.zeros(1, 3), torch.tensor([2]), indices=torch.tensor([0]))
    assert finish(meter).predictions[0] == SamplePrediction(index=0, label=2, before=None, after=0, confidence=0.5)


def test_confidence_before_is_among_the_scored_classes() -> None:
    meter = ClassificationMeter(keep=[0], classes=[0, 2])
    meter.update(torch.zeros(1, 3), torch.tensor([2]), before=torch.zeros(1, 3), indices=torch.tensor([0]))
    assert finish(meter).predictions[0].confidence_before == 0.5


def test_nan_outputs_are_wrong_and_seen() -> None:
    logits = torch.tensor([[1.0, 0.0], [math.nan, 0.0], [math.inf, 0.0]])
    meter = ClassificationMeter(confusion=True)
    meter.update(logits, torch.tensor([0, 0, 0]), before=logits)
    found = finish(meter)
    assert (found.broken, found.accuracy, found.accuracy_before) == (2, 1 / 3, 2 / 3)
    assert math.isnan(found.nll)
    assert math.isnan(found.ece)
    assert found.confusion == ((1, 0), (0, 0))


def test_masked_classes_may_have_a_logit_of_minus_infinity() -> None:
    found = measure(torch.tensor([[0.0, 0.0, -math.inf]]), torch.tensor([0]))
    assert found.broken == 0
    assert [found.entropy, found.nll] == pytest.approx([math.log(2), math.log(2)], rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_outputs_are_measured_in_float64(dtype: torch.dtype) -> None:
    logits, labels = random_batch(97, 10, seed=1)
    logits = logits.to(dtype)
    assert to_json(measure(logits, labels)) == to_json(measure(logits.double(), labels))
    measure(logits.softmax(1), labels, probabilities=True)


def test_many_tiny_batches_lose_nothing() -> None:
    meter = ClassificationMeter()
    for _ in range(1000):
        meter.update(torch.tensor([[0.1, 0.0]]), torch.tensor([0]), seconds=0.1)
    one = measure(torch.tensor([[0.1, 0.0]]), torch.tensor([0]))
    found = finish(meter)
    assert (found.entropy, found.nll, found.brier) == (one.entropy, one.nll, one.brier)
    assert found.seconds_total == 100.0


FIT = torch.zeros(2, 3)
LABELS = torch.tensor([0, 1])


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ((torch.zeros(2), LABELS), "outputs have shape"),
        ((torch.zeros(2, 3, dtype=torch.long), LABELS), "outputs have shape"),
        ((FIT, torch.tensor([0])), "outputs have shape"),
    ],
    ids=["flat", "integer", "too-few-labels"],
)
def test_wrong_shapes_are_refused(arguments: tuple[Tensor, Tensor], match: str) -> None:
    with pytest.raises(ShapeError, match=match):
        ClassificationMeter().update(*arguments)


def test_other_misuse_is_refused_and_counts_nothing() -> None:
    meter = ClassificationMeter()
    for label in (-1, 3):
        with pytest.raises(DataError, match=f"label {label} "):
            meter.update(FIT, torch.tensor([0, label]))
    assert finish(meter).samples == 0
    with pytest.raises(DataError, match="probabilities"):
        ClassificationMeter(probabilities=True).update(FIT + 1, LABELS)
    with pytest.raises(DataError, match="label 1 "):
        ClassificationMeter(classes=[0, 2]).update(FIT, LABELS)
    for classes in ([], [0, 0], [3], [-1]):
        with pytest.raises(ConfigError, match="subset"):
            ClassificationMeter(classes=classes).update(FIT, LABELS)


def test_result_reads_back_from_its_record() -> None:
    found = finish(filled([(9, True, 0.5), (4, True, 0.25)], seed=0))
    assert from_json(CellResult, to_json(found)) == found
    assert replace(found, broken=1) != found


def test_correctness_is_kept_in_one_bit_per_image() -> None:
    meter = ClassificationMeter()
    labels = torch.tensor([0, 1, 1, 0, 1, 0, 1, 1, 0])
    meter.update(torch.eye(2)[[0, 1, 0, 0, 1]], labels[:5])
    meter.update(torch.eye(2)[[1, 1, 1, 0]], labels[5:])
    result = meter.result(forwards=2, backwards=0, updates=0, skipped_updates=0)
    assert result.correct == bytes([0b11011011, 0b10000000])


def test_accuracy_over_all_outputs_is_recorded_beside_that_of_the_subset() -> None:
    meter = ClassificationMeter(classes=[0, 2])
    meter.update(torch.tensor([[3.0, 5.0, 1.0], [1.0, 0.0, 2.0], [4.0, 0.0, 1.0]]), torch.tensor([0, 2, 2]))
    result = meter.result(forwards=1, backwards=0, updates=0, skipped_updates=0)
    assert (result.accuracy, result.accuracy_all_outputs) == (2 / 3, 1 / 3)  # output 1 wins the first image
    whole = ClassificationMeter()
    whole.update(torch.tensor([[3.0, 5.0, 1.0]]), torch.tensor([1]))
    assert whole.result(forwards=1, backwards=0, updates=0, skipped_updates=0).accuracy_all_outputs is None
