"""IoU and its kin: golden counts and scores of MMSegmentation, and a slow count, pixel by pixel."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from tests.golden import load_golden, load_golden_json
from trust_tta.data.segmentation_metrics import ConfusionCounts, count_confusion, sum_counts
from trust_tta.errors import ShapeError

CLASSES = 6
CASES = (
    "plain", "reduce_zero_true", "reduce_zero_false_same_arrays", "reduce_zero_true_good_preds", "out_of_range",
    "all_present", "one_image_all_ignored", "everything_ignored",
)  # fmt: skip


def counts_of(case: str) -> list[ConfusionCounts]:
    golden = load_golden("segmentation/metrics.npz")
    images = sum(name.startswith(f"{case}/pred") for name in golden)
    pairs = [(golden[f"{case}/pred{i}"], golden[f"{case}/label{i}"]) for i in range(images)]
    return [count_confusion(torch.from_numpy(p), torch.from_numpy(t), classes=CLASSES) for p, t in pairs]


def scores(values: torch.Tensor) -> list[float | None]:
    return [None if math.isnan(v) else v for v in values.tolist()]


@pytest.mark.parametrize("case", CASES)
def test_counts_are_the_original_ones(case: str) -> None:
    golden = load_golden("segmentation/metrics.npz")
    for i, found in enumerate(counts_of(case)):
        np.testing.assert_array_equal(found.right, golden[f"{case}/area_intersect_{i}"])
        np.testing.assert_array_equal(found.predicted, golden[f"{case}/area_pred_{i}"])
        np.testing.assert_array_equal(found.labeled, golden[f"{case}/area_label_{i}"])
        np.testing.assert_array_equal(found.predicted + found.labeled - found.right, golden[f"{case}/area_union_{i}"])


@pytest.mark.parametrize("case", CASES)
def test_scores_are_the_original_ones(case: str) -> None:
    golden = load_golden_json("segmentation/metrics.json")["cases"][case]
    total = sum_counts(counts_of(case), classes=CLASSES)
    per_class = {"IoU": total.iou, "Dice": total.dice}
    for name, found in per_class.items():
        expected = golden["per_class"][name]
        assert [v is None for v in scores(found)] == [v is None for v in expected], name
        np.testing.assert_allclose(
            [v for v in scores(found) if v is not None], [v for v in expected if v is not None], atol=1e-6
        )
    means = {"aAcc": total.accuracy, "mIoU": total.mean_iou, "mDice": total.mean_dice}
    for name, mean in means.items():
        for kind, tolerance in (("unrounded_mean_percent", 1e-4), ("summary", 0.011), ("mlmp_summary", 0.011)):
            expected = golden[kind][name]
            assert math.isnan(mean) if expected is None else 100 * mean == pytest.approx(expected, abs=tolerance)


@pytest.mark.parametrize("seed", range(5))
def test_counts_equal_those_made_pixel_by_pixel(seed: int) -> None:
    rng = np.random.default_rng(seed)
    predictions, labels = rng.integers(0, 4, (3, 5, 7)), rng.choice([0, 1, 2, 3, 7, 255], (3, 5, 7))
    right, predicted, labeled = ([0] * 4 for _ in range(3))
    for p, t in zip(predictions.ravel().tolist(), labels.ravel().tolist(), strict=True):
        if t != 255:
            predicted[p] += 1
            if t < 4:
                labeled[t] += 1
                right[t] += p == t
    found = count_confusion(torch.from_numpy(predictions), torch.from_numpy(labels), classes=4)
    assert (found.right.tolist(), found.predicted.tolist(), found.labeled.tolist()) == (right, predicted, labeled)
    ious = [r / (p + t - r) for r, p, t in zip(right, predicted, labeled, strict=True) if p + t - r]
    assert found.mean_iou == pytest.approx(sum(ious) / len(ious))


def test_counts_of_a_data_set_do_not_depend_on_how_it_is_divided() -> None:
    rng = np.random.default_rng(0)
    predictions, labels = (torch.from_numpy(rng.integers(0, 5, (9, 4, 4))) for _ in range(2))
    whole = count_confusion(predictions, labels, classes=5)
    parts = [count_confusion(predictions[a:b], labels[a:b], classes=5) for a, b in pairwise((0, 2, 3, 9))]
    total = sum_counts(parts, classes=5)
    assert torch.equal(total.right, whole.right)
    assert total.mean_iou == whole.mean_iou
    # the mean over images, which is another measure, differs
    assert whole.mean_iou != pytest.approx(np.mean([part.mean_iou for part in parts]))


def test_a_perfect_prediction_scores_one_and_no_pixels_score_nothing() -> None:
    labels = torch.tensor([[0, 1], [2, 255]])
    perfect = count_confusion(labels.where(labels != 255, 0), labels, classes=3)
    assert (perfect.mean_iou, perfect.mean_dice, perfect.accuracy) == (1.0, 1.0, 1.0)
    assert math.isnan(sum_counts([], classes=3).mean_iou)


def test_shapes_that_differ_are_refused() -> None:
    with pytest.raises(ShapeError, match="give integers of one shape"):
        count_confusion(torch.zeros(2, 3, dtype=torch.int64), torch.zeros(3, 2, dtype=torch.int64), classes=2)
    with pytest.raises(ShapeError, match="give integers of one shape"):
        count_confusion(torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.int64), classes=2)
