"""Segmentation metrics from pixel counts per class: IoU, Dice and pixel accuracy.

As in MMSegmentation: pixels labeled 255 are ignored; counts are summed over all images before they are divided; a
class that is neither labeled nor predicted is NaN and left out of means; one that is only predicted has an IoU of 0. A
label outside the classes counts for no class, the prediction there still does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trust_tta.errors import ShapeError

if TYPE_CHECKING:
    from torch import Tensor

IGNORED = 255  # label of pixels that are not scored


@dataclass(frozen=True, eq=False)
class ConfusionCounts:
    """Pixel counts per class, int64 (classes,): correctly predicted, predicted, labeled."""

    right: Tensor
    predicted: Tensor
    labeled: Tensor

    def __add__(self, other: ConfusionCounts) -> ConfusionCounts:
        return ConfusionCounts(self.right + other.right, self.predicted + other.predicted, self.labeled + other.labeled)

    @property
    def iou(self) -> Tensor:
        """Intersection over union of each class, float64 (classes,)."""
        return self.right.double() / (self.predicted + self.labeled - self.right)

    @property
    def dice(self) -> Tensor:
        """Dice coefficient of each class, float64 (classes,)."""
        return 2 * self.right.double() / (self.predicted + self.labeled)

    @property
    def accuracy(self) -> float:
        """Pixel accuracy over all classes; NaN without labeled pixels."""
        return float(self.right.sum().double() / self.labeled.sum())

    @property
    def mean_iou(self) -> float:
        """Mean IoU over the classes that are labeled or predicted; NaN without any."""
        return float(self.iou.nanmean())

    @property
    def mean_dice(self) -> float:
        return float(self.dice.nanmean())


def count_confusion(predictions: Tensor, labels: Tensor, *, classes: int) -> ConfusionCounts:
    """Count predicted classes against labels: integers of one shape (...); the counts stay on their device."""
    if predictions.shape != labels.shape or predictions.is_floating_point() or labels.is_floating_point():
        raise ShapeError(
            f"predictions are {predictions.dtype} {tuple(predictions.shape)} and labels {labels.dtype} "
            f"{tuple(labels.shape)}; give integers of one shape"
        )
    counted = labels != IGNORED
    predicted, labeled = predictions[counted].long(), labels[counted].long()
    return ConfusionCounts(
        _count(predicted[predicted == labeled], classes), _count(predicted, classes), _count(labeled, classes)
    )


def sum_counts(counts: Iterable[ConfusionCounts], *, classes: int) -> ConfusionCounts:
    """Sum the counts of several images or batches, on the CPU."""
    import torch

    zero = torch.zeros(classes, dtype=torch.int64)
    total = ConfusionCounts(zero, zero, zero)
    for each in counts:
        total = total + ConfusionCounts(each.right.cpu(), each.predicted.cpu(), each.labeled.cpu())
    return total


def _count(values: Tensor, classes: int) -> Tensor:
    return values[(values >= 0) & (values < classes)].bincount(minlength=classes)
