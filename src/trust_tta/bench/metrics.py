"""Accuracy, calibration and their course along a stream of batches."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from trust_tta.errors import ConfigError, DataError, ShapeError
from trust_tta.results.record import BINS, CellResult, Course, Reliability, SamplePrediction

_SMALLEST = float(torch.finfo(torch.float32).tiny)  # a probability of 0 must not make a whole mean infinite
_SUM_TOLERANCE = 0.02  # half precision


@dataclass(frozen=True, kw_only=True)
class BatchStats:
    """Sums over one batch: all that the metrics need."""

    samples: int
    right: tuple[bool, ...]  # of each image, after the update
    correct_before: int | None
    entropy: float
    nll: float
    brier: float
    broken: int
    bins: Reliability
    seconds: float

    @property
    def correct(self) -> int:
        return sum(self.right)


class Meter(Protocol):
    """The metrics of one task along a stream, batch by batch."""

    @property
    def accuracy(self) -> float:
        """Accuracy so far, after the update; NaN without samples."""

    def update(
        self,
        outputs: Tensor,
        labels: Tensor,
        *,
        before: Tensor | None = None,
        indices: Tensor | None = None,
        seconds: float = 0.0,
    ) -> None:
        """Add a batch: outputs after the update and `before` it, labels, data set indices (n,)."""

    def result(
        self,
        *,
        forwards: int,
        backwards: int,
        updates: int,
        skipped_updates: int,
        peak_memory: int | None = None,
        clean_accuracy: float | None = None,
    ) -> CellResult:
        """The record of the stream, with the costs that only the runner knows."""


@dataclass(kw_only=True)
class ClassificationMeter:
    """Metrics of a stream of classified images, batch by batch.

    `probabilities` says that outputs are probabilities already; `classes` restricts the decision to some columns
    (labels keep the full numbering); `keep` names the data set indices whose predictions are to be kept.
    """

    probabilities: bool = False
    classes: Sequence[int] | None = None
    confusion: bool = False
    keep: Collection[int] = ()
    batches: list[BatchStats] = field(default_factory=list, init=False)
    kept: list[SamplePrediction] = field(default_factory=list, init=False)
    counts: Tensor | None = field(default=None, init=False)  # (c, c), label by prediction

    @property
    def samples(self) -> int:
        return sum(batch.samples for batch in self.batches)

    @property
    def accuracy(self) -> float:
        """Accuracy so far, after the update; NaN without samples."""
        return _ratio(sum(batch.correct for batch in self.batches), self.samples)

    def update(
        self,
        outputs: Tensor,
        labels: Tensor,
        *,
        before: Tensor | None = None,
        indices: Tensor | None = None,
        seconds: float = 0.0,
    ) -> None:
        """Add a batch: outputs (n, c) after the update and `before` it, labels (n,), data set indices (n,)."""
        _check_shapes(outputs, labels, before, indices)
        if len(labels) == 0:
            return
        outputs, labels = outputs.detach().double().cpu(), labels.detach().cpu().long()
        columns = _columns(self.classes, outputs.shape[1])
        truth = _truth(labels, columns, outputs.shape[1])
        if self.probabilities:
            _check_probabilities(outputs)
        p, nll = (_from_probabilities if self.probabilities else _from_logits)(outputs[:, columns], truth)
        broken = p.isnan().any(1)
        predicted = columns[outputs[:, columns].argmax(1)].where(~broken, torch.tensor(-1))
        earlier = None if before is None else _predict(before.detach().cpu(), columns)
        self.batches.append(
            BatchStats(
                samples=len(labels),
                right=tuple((predicted == labels).tolist()),
                correct_before=None if earlier is None else _equal(earlier, labels),
                entropy=torch.special.entr(p).sum().item(),
                nll=nll.sum().item(),
                brier=(p - torch.nn.functional.one_hot(truth, p.shape[1])).square().sum().item(),
                broken=int(broken.sum()),
                bins=reliability(p.amax(1), predicted == labels),
                seconds=seconds,
            )
        )
        if self.confusion:
            self._count(labels, predicted, outputs.shape[1])
        if indices is not None:
            sure = None if before is None else before.detach().double().cpu()[:, columns].softmax(1).amax(1)
            self._keep(indices.tolist(), labels, (earlier, sure), (predicted, p.amax(1)))

    def merge(self, other: ClassificationMeter) -> ClassificationMeter:
        """The meter of this stream followed by the other's."""
        settings = (self.probabilities, self.confusion, list(self.classes or ()))
        if settings != (other.probabilities, other.confusion, list(other.classes or ())):
            raise ConfigError("meters with different settings cannot be merged; make both with the same arguments")
        both = replace(self, keep={*self.keep, *other.keep})
        both.batches = self.batches + other.batches
        both.kept = self.kept + other.kept
        found = [counts for counts in (self.counts, other.counts) if counts is not None]
        both.counts = torch.stack(found).sum(0) if found else None
        return both

    def result(
        self,
        *,
        forwards: int,
        backwards: int,
        updates: int,
        skipped_updates: int,
        peak_memory: int | None = None,
        clean_accuracy: float | None = None,
    ) -> CellResult:
        """The record of the stream, with the costs that only the runner knows; means are NaN without samples."""
        n, course = self.samples, self._course()
        bins = add_bins([batch.bins for batch in self.batches])
        before = [batch.correct_before for batch in self.batches]
        known = [correct for correct in before if correct is not None]
        return CellResult(
            samples=n,
            accuracy=self.accuracy,
            accuracy_before=_ratio(sum(known), n) if n and len(known) == len(before) else None,
            entropy=_ratio(math.fsum(batch.entropy for batch in self.batches), n),
            nll=_ratio(math.fsum(batch.nll for batch in self.batches), n),
            ece=bins.ece,
            brier=_ratio(math.fsum(batch.brier for batch in self.batches), n),
            broken=sum(batch.broken for batch in self.batches),
            forwards=forwards,
            backwards=backwards,
            updates=updates,
            skipped_updates=skipped_updates,
            seconds_median=statistics.median(course.seconds) if n else 0.0,
            seconds_mean=math.fsum(course.seconds) / len(course.seconds) if n else 0.0,
            seconds_total=math.fsum(course.seconds),
            peak_memory=peak_memory,
            clean_accuracy=clean_accuracy,
            course=course,
            reliability=bins,
            confusion=None if self.counts is None else tuple(tuple(row) for row in self.counts.tolist()),
            predictions=tuple(self.kept),
            correct=np.packbits(np.array([r for batch in self.batches for r in batch.right], dtype=bool)).tobytes(),
        )

    def _course(self) -> Course:
        before = [b.correct_before / b.samples for b in self.batches if b.correct_before is not None]
        return Course(
            samples=tuple(b.samples for b in self.batches),
            accuracy=tuple(b.correct / b.samples for b in self.batches),
            accuracy_before=tuple(before) if before and len(before) == len(self.batches) else None,
            entropy=tuple(b.entropy / b.samples for b in self.batches),
            seconds=tuple(b.seconds for b in self.batches),
        )

    def _count(self, labels: Tensor, predicted: Tensor, c: int) -> None:
        pairs = (labels * c + predicted)[predicted >= 0]
        counts = torch.bincount(pairs, minlength=c * c).reshape(c, c)
        self.counts = counts if self.counts is None else self.counts + counts

    def _keep(
        self,
        indices: list[int],
        labels: Tensor,
        before: tuple[Tensor | None, Tensor | None],
        after: tuple[Tensor, Tensor],
    ) -> None:
        """Keep what is wanted; `before` and `after` are classes (n,) and confidence in them (n,)."""
        wanted = frozenset(self.keep)
        (earlier, sure), (predicted, confidence) = before, after
        self.kept += [
            SamplePrediction(
                index=index,
                label=int(labels[i]),
                before=None if earlier is None else int(earlier[i]),
                after=int(predicted[i]),
                confidence=float(confidence[i]),
                confidence_before=None if sure is None else float(sure[i]),
            )
            for i, index in enumerate(indices)
            if index in wanted
        ]


def _check_shapes(outputs: Tensor, labels: Tensor, before: Tensor | None, indices: Tensor | None) -> None:
    if outputs.ndim != 2 or not outputs.is_floating_point():
        raise ShapeError(f"outputs have shape {tuple(outputs.shape)} and {outputs.dtype}; give floating (n, classes)")
    n = len(outputs)
    for name, tensor in (("labels", labels), ("indices", indices)):
        if tensor is not None and (tensor.shape != (n,) or tensor.is_floating_point()):
            raise ShapeError(
                f"{name} have shape {tuple(tensor.shape)} and {tensor.dtype}; give integers of shape ({n},)"
            )
    if before is not None and before.shape != outputs.shape:
        raise ShapeError(f"before has shape {tuple(before.shape)}; give that of outputs, {tuple(outputs.shape)}")


def _columns(classes: Sequence[int] | None, c: int) -> Tensor:
    """The columns among which the decision falls, as indices (c',)."""
    if classes is None:
        return torch.arange(c)
    columns = torch.tensor(list(classes), dtype=torch.long)
    if len(columns) == 0 or len(columns.unique()) != len(columns) or columns.min() < 0 or columns.max() >= c:
        raise ConfigError(f"the class subset does not fit {c} outputs; give different indices from 0 to {c - 1}")
    return columns


def _truth(labels: Tensor, columns: Tensor, c: int) -> Tensor:
    """The position of each label among `columns` (n,)."""
    position = torch.full((c,), -1).scatter(0, columns, torch.arange(len(columns)))
    inside = (labels >= 0) & (labels < c)
    truth = position[labels.clamp(0, c - 1)].where(inside, torch.tensor(-1))
    if (truth < 0).any():
        wrong = int(labels[truth < 0][0])
        raise DataError(f"label {wrong} is not among the {len(columns)} classes being scored; check labels and mask")
    return truth


def _from_logits(logits: Tensor, truth: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities (n, c) and negative log-likelihood (n,)."""
    log_p = logits.log_softmax(1)
    return log_p.exp(), -log_p.gather(1, truth[:, None])[:, 0]


def _from_probabilities(outputs: Tensor, truth: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities (n, c) made to sum to one, and negative log-likelihood (n,)."""
    p = outputs / outputs.sum(1, keepdim=True)
    return p, -p.gather(1, truth[:, None])[:, 0].clamp(min=_SMALLEST).log()


def _check_probabilities(outputs: Tensor) -> None:
    sums = outputs.sum(1)
    if (outputs < 0).any() or ((sums - 1).abs() > _SUM_TOLERANCE).any():
        raise DataError(
            "outputs announced as probabilities are negative or do not sum to 1; give logits without the flag"
        )


def _predict(outputs: Tensor, columns: Tensor) -> Tensor:
    """The class in the full numbering (n,), or -1 where the output holds a NaN."""
    chosen = outputs[:, columns]
    return columns[chosen.argmax(1)].where(~chosen.isnan().any(1), torch.tensor(-1))


def reliability(confidence: Tensor, correct: Tensor) -> Reliability:
    """Bins of one batch from confidence (n,) and correctness (n,)."""
    edges = torch.arange(1, BINS, dtype=torch.float64) / BINS
    place = torch.bucketize(confidence, edges)  # right-closed: an edge belongs to the bin below it
    return Reliability(
        count=tuple(torch.bincount(place, minlength=BINS).tolist()),
        confidence=tuple(torch.bincount(place, weights=confidence, minlength=BINS).tolist()),
        correct=tuple(torch.bincount(place[correct], minlength=BINS).tolist()),
    )


def add_bins(bins: Iterable[Reliability]) -> Reliability:
    parts = list(bins)
    return Reliability(
        count=tuple(sum(part.count[i] for part in parts) for i in range(BINS)),
        confidence=tuple(math.fsum(part.confidence[i] for part in parts) for i in range(BINS)),
        correct=tuple(sum(part.correct[i] for part in parts) for i in range(BINS)),
    )


def _equal(predicted: Tensor, labels: Tensor) -> int:
    return int((predicted == labels).sum())


def _ratio(total: float, n: int) -> float:
    return total / n if n else math.nan
