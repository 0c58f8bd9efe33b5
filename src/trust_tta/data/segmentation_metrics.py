"""How predicted pixels overlap with labeled ones: counts over a whole data set, and what is derived from them.

As in MMSegmentation: pixels labeled 255 are ignored; counts are summed over all images before anything is divided; a
class that is neither labeled nor predicted is NaN and left out of means; one that is only predicted has an IoU of 0. A
label outside the classes belongs to none, but what is predicted there still counts as predicted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trust_tta.errors import ShapeError

if TYPE_CHECKING:
    from torch import Tensor

IGNORED = 255  # the label of pixels that do not count


@dataclass(frozen=True, eq=False)
class ConfusionCounts:
    """Pixels of each class, int64 (classes,): predicted where labeled, predicted, labeled."""

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
        """Twice the intersection over the sum of both, float64 (classes,)."""
        return 2 * self.right.double() / (self.predicted + self.labeled)

    @property
    def recall(self) -> Tensor:
        """The share of a class's pixels that are found, float64 (classes,); "Acc" in MMSegmentation."""
        return self.right.double() / self.labeled

    @property
    def precision(self) -> Tensor:
        """The share of a class's predictions that are right, float64 (classes,)."""
        return self.right.double() / self.predicted

    @property
    def accuracy(self) -> float:
        """The share of all labeled pixels that are found; NaN without any."""
        return float(self.right.sum().double() / self.labeled.sum())

    @property
    def mean_iou(self) -> float:
        """The mean over the classes that are labeled or predicted; NaN without any."""
        return float(self.iou.nanmean())

    @property
    def mean_dice(self) -> float:
        return float(self.dice.nanmean())


def count_confusion(predictions: Tensor, labels: Tensor, *, classes: int) -> ConfusionCounts:
    """The counts of predicted classes and labels of one shape, integers (...), on their device."""
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


def sum_counts(overlaps: Iterable[ConfusionCounts], *, classes: int) -> ConfusionCounts:
    """The counts of several images or batches together; zeros where there is none."""
    import torch

    zero = torch.zeros(classes, dtype=torch.int64)
    total = ConfusionCounts(zero, zero, zero)
    for overlap in overlaps:
        total = total + ConfusionCounts(overlap.right.cpu(), overlap.predicted.cpu(), overlap.labeled.cpu())
    return total


def _count(values: Tensor, classes: int) -> Tensor:
    return values[(values >= 0) & (values < classes)].bincount(minlength=classes)
