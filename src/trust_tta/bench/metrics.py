"""Accuracy and calibration of a stream of batches, for classification and for segmentation (mean IoU)."""

from __future__ import annotations

import io
import math
import statistics
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from trust_tta.data.masks import resize_mask
from trust_tta.data.segmentation_metrics import IGNORED, ConfusionCounts, count_confusion, sum_counts
from trust_tta.errors import ConfigError, DataError, ShapeError
from trust_tta.ops.segmentation_logits import Logits, resized_chunks
from trust_tta.results.record import BINS, CellResult, History, MaskSample, Reliability, SamplePrediction

_SMALLEST = float(torch.finfo(torch.float32).tiny)  # a probability of 0 must not make a mean infinite
_SUM_TOLERANCE = 0.02  # half precision
MASK_SIDE = 160  # pixels of the longer side of a kept mask


@dataclass(frozen=True, kw_only=True)
class BatchSums:
    """Sums over one batch, from which the metrics are computed."""

    images: int
    scored: int  # labeled images, or labeled pixels
    entropy: float
    nll: float
    brier: float
    broken: int
    bins: Reliability
    seconds: float = 0.0


def sum_batches(batches: Sequence[BatchSums]) -> BatchSums:
    return BatchSums(
        images=sum(batch.images for batch in batches),
        scored=sum(batch.scored for batch in batches),
        entropy=math.fsum(batch.entropy for batch in batches),
        nll=math.fsum(batch.nll for batch in batches),
        brier=math.fsum(batch.brier for batch in batches),
        broken=sum(batch.broken for batch in batches),
        bins=Reliability.total(batch.bins for batch in batches),
        seconds=math.fsum(batch.seconds for batch in batches),
    )


@dataclass(kw_only=True)
class Meter(ABC):
    """Metrics of one task; `probabilities`: whether outputs are probabilities rather than logits."""

    probabilities: bool = False
    batches: list[Any] = field(default_factory=list, init=False)  # BatchSums of the task

    def update(
        self,
        outputs: Tensor,
        labels: Tensor,
        *,
        before: Logits | None = None,
        indices: Tensor | None = None,
        seconds: float = 0.0,
    ) -> None:
        """Add a batch: outputs after the update and `before` it, labels, data set indices (n,)."""
        batch = self.measure(outputs, labels, before, indices)
        if batch is not None:
            self.batches.append(replace(batch, seconds=seconds))

    @abstractmethod
    def measure(self, outputs: Tensor, labels: Tensor, before: Any, indices: Tensor | None) -> BatchSums | None:
        """The sums over a batch; None if it is empty."""

    @abstractmethod
    def score(self, batches: Sequence[Any], *, before: bool = False) -> float | None:
        """The accuracy over some batches after the update (NaN without samples), or `before` it (None if unknown)."""

    @abstractmethod
    def details(self) -> dict[str, Any]:
        """Fields of the record that are specific to the task."""

    @property
    def accuracy(self) -> float:
        """Accuracy so far, after the update; NaN without samples."""
        return cast(float, self.score(self.batches))

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
        """The record of the stream, with the costs that the runner measured; means are NaN without samples."""
        seconds, total = [batch.seconds for batch in self.batches], sum_batches(self.batches)
        scored = total.scored or math.nan
        before = [self.score([batch], before=True) for batch in self.batches]
        known = tuple(value for value in before if value is not None)
        history = History(
            samples=tuple(batch.images for batch in self.batches),
            accuracy=tuple(cast(float, self.score([batch])) for batch in self.batches),
            accuracy_before=known if known and len(known) == len(before) else None,
            entropy=tuple(batch.entropy / (batch.scored or math.nan) for batch in self.batches),
            seconds=tuple(seconds),
        )
        return CellResult(
            samples=total.images,
            accuracy=self.accuracy,
            accuracy_before=self.score(self.batches, before=True),
            entropy=total.entropy / scored,
            nll=total.nll / scored,
            ece=total.bins.ece,
            brier=total.brier / scored,
            broken=total.broken,
            forwards=forwards,
            backwards=backwards,
            updates=updates,
            skipped_updates=skipped_updates,
            seconds_median=statistics.median(seconds) if seconds else 0.0,
            seconds_mean=total.seconds / max(1, len(seconds)),
            seconds_total=total.seconds,
            peak_memory=peak_memory,
            clean_accuracy=clean_accuracy,
            history=history,
            reliability=total.bins,
            **self.details(),
        )


@dataclass(frozen=True, kw_only=True)
class ClassifiedBatch(BatchSums):
    right: tuple[bool, ...]  # of each image, after the update
    right_of_all: int  # images whose largest output among all is right
    right_before: int | None


@dataclass(kw_only=True)
class ClassificationMeter(Meter):
    """Metrics of classification."""

    classes: Sequence[int] | None = None  # the columns to choose from; labels keep the full numbering
    confusion: bool = False
    keep: Collection[int] = ()  # data set indices whose predictions are kept
    kept: list[SamplePrediction] = field(default_factory=list, init=False)
    counts: Tensor | None = field(default=None, init=False)  # (c, c), label by prediction

    def score(self, batches: Sequence[ClassifiedBatch], *, before: bool = False) -> float | None:
        images = sum(batch.images for batch in batches)
        right = [batch.right_before if before else sum(batch.right) for batch in batches]
        known = [count for count in right if count is not None]
        if len(known) < len(right) or (before and not images):
            return None
        return sum(known) / images if images else math.nan

    def measure(
        self, outputs: Tensor, labels: Tensor, before: Tensor | None, indices: Tensor | None
    ) -> ClassifiedBatch | None:
        """The sums over outputs (n, c) after the update and `before` it, labels (n,) and indices (n,)."""
        if outputs.ndim != 2 or len(outputs) != len(labels) or not outputs.is_floating_point():
            given = f"outputs have shape {tuple(outputs.shape)} and {outputs.dtype}"
            raise ShapeError(f"{given}; give floating ({len(labels)}, classes)")
        if len(labels) == 0:
            return None
        outputs, labels = outputs.detach().double().cpu(), labels.detach().cpu().long()
        columns = _columns(self.classes, outputs.shape[1])
        truth = _truth(labels, columns, outputs.shape[1])
        if self.probabilities:
            if (outputs < 0).any() or ((outputs.sum(1) - 1).abs() > _SUM_TOLERANCE).any():
                raise DataError("outputs declared as probabilities are negative or do not sum to 1; give logits")
            p = outputs[:, columns] / outputs[:, columns].sum(1, keepdim=True)
            log_p = p.clamp(min=_SMALLEST).log()
        else:
            log_p = outputs[:, columns].log_softmax(1)
            p = log_p.exp()
        broken = p.isnan().any(1)
        predicted = columns[outputs[:, columns].argmax(1)].where(~broken, torch.tensor(-1))
        earlier = None if before is None else _predict(before.detach().cpu(), columns)
        if self.confusion:
            c = outputs.shape[1]
            counts = torch.bincount((labels * c + predicted)[predicted >= 0], minlength=c * c).reshape(c, c)
            self.counts = counts if self.counts is None else self.counts + counts
        for i, index in enumerate([] if indices is None else indices.tolist()):
            if index in self.keep:
                chances = None if before is None else before[i].detach().double().cpu()[columns].softmax(0)
                self.kept.append(
                    SamplePrediction(
                        index=index,
                        label=int(labels[i]),
                        before=None if earlier is None else int(earlier[i]),
                        after=int(predicted[i]),
                        confidence=float(p[i].amax()),
                        confidence_before=None if chances is None else float(chances.amax()),
                    )
                )
        return ClassifiedBatch(
            images=len(labels),
            scored=len(labels),
            right=tuple((predicted == labels).tolist()),
            right_before=None if earlier is None else int((earlier == labels).sum()),
            right_of_all=int((_predict(outputs, torch.arange(outputs.shape[1])) == labels).sum()),
            entropy=torch.special.entr(p).sum().item(),
            nll=-log_p.gather(1, truth[:, None]).sum().item(),
            brier=(p - torch.nn.functional.one_hot(truth, p.shape[1])).square().sum().item(),
            broken=int(broken.sum()),
            bins=reliability(p.amax(1), predicted == labels),
        )

    def details(self) -> dict[str, Any]:
        right = np.array([right for batch in self.batches for right in batch.right], dtype=bool)
        right_of_all = sum(batch.right_of_all for batch in self.batches)
        return {
            "confusion": None if self.counts is None else tuple(tuple(row) for row in self.counts.tolist()),
            "predictions": tuple(self.kept),
            "correct": np.packbits(right).tobytes(),
            "accuracy_all_outputs": right_of_all / len(right) if self.classes is not None and len(right) else None,
        }


def _columns(classes: Sequence[int] | None, c: int) -> Tensor:
    """The columns of the classes to choose from, as indices (c',)."""
    if classes is None:
        return torch.arange(c)
    columns = torch.tensor(list(classes), dtype=torch.long)
    if len(columns) == 0 or len(columns.unique()) != len(columns) or columns.min() < 0 or columns.max() >= c:
        raise ConfigError(f"the class subset does not fit {c} outputs; give different indices from 0 to {c - 1}")
    return columns


def _truth(labels: Tensor, columns: Tensor, c: int) -> Tensor:
    """The index of each label among `columns` (n,)."""
    position = torch.full((c,), -1).scatter(0, columns, torch.arange(len(columns)))
    inside = (labels >= 0) & (labels < c)
    truth = position[labels.clamp(0, c - 1)].where(inside, torch.tensor(-1))
    if (truth < 0).any():
        wrong = int(labels[truth < 0][0])
        raise DataError(f"label {wrong} is not among the {len(columns)} classes being scored; check labels and mask")
    return truth


def _predict(outputs: Tensor, columns: Tensor) -> Tensor:
    """The predicted class among all outputs (n,), or -1 where the output holds a NaN."""
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


# segmentation


@dataclass(frozen=True, kw_only=True)
class PixelBatch(BatchSums):
    confusion: ConfusionCounts
    before: ConfusionCounts | None = None


@dataclass(kw_only=True)
class PixelMeter(Meter):
    """Metrics of segmentation: outputs (n, classes, h, w) are resized to labels (n, h', w').

    IoUs are ratios of pixel counts over the whole stream, not means over images.
    """

    classes: int
    keep: frozenset[int] = frozenset()  # data set indices whose masks are kept
    palette: NDArray[np.uint8] | None = None  # (classes, 3)
    masks: list[MaskSample] = field(default_factory=list, init=False)

    def score(self, batches: Sequence[PixelBatch], *, before: bool = False) -> float | None:
        """The mean IoU."""
        counts = [batch.before if before else batch.confusion for batch in batches]
        known = [count for count in counts if count is not None]
        if before and (not known or len(known) < len(counts)):
            return None
        return sum_counts(known, classes=self.classes).mean_iou

    def measure(self, outputs: Tensor, labels: Tensor, before: Logits | None, indices: Tensor | None) -> PixelBatch:
        """The sums over outputs after the update and `before` it, and labels (n, h', w')."""
        if outputs.dim() != 4 or outputs.shape[1] != self.classes or len(outputs) != len(labels):
            raise ShapeError(
                f"outputs have shape {tuple(outputs.shape)} for labels {tuple(labels.shape)}; "
                f"give (n, {self.classes}, h, w) for labels (n, h, w)"
            )
        labels = labels.to(outputs.device)
        earlier = None if before is None else _classes_at(before.detach(), labels)
        for i, index in enumerate([] if indices is None else indices.tolist()):
            if index in self.keep:
                after = _classes_at(outputs[i : i + 1].detach(), labels[i : i + 1])[0]
                truth, last = (mask_picture(mask, self.palette) for mask in (labels[i], after))
                first = None if earlier is None else mask_picture(earlier[i], self.palette)
                self.masks.append(MaskSample(index=index, truth=truth, before=first, after=last))
        size = (labels.shape[1], labels.shape[2])
        found = [self._measure_chunk(chunk, labels[:, rows]) for rows, chunk in resized_chunks(outputs.detach(), size)]
        sums = {**vars(sum_batches(found)), "images": len(labels)}
        return PixelBatch(
            **sums,
            confusion=sum_counts((one.confusion for one in found), classes=self.classes),
            before=None if earlier is None else count_confusion(earlier, labels, classes=self.classes),
        )

    def _measure_chunk(self, chunk: Tensor, labels: Tensor) -> PixelBatch:
        """The sums over some rows of the images: outputs (n, classes, rows, w), labels (n, rows, w)."""
        rows = chunk.movedim(1, -1)[labels != IGNORED].float()
        truth = labels[labels != IGNORED]
        log_p = (rows / rows.sum(1, keepdim=True)).clamp_min(1e-30).log() if self.probabilities else rows.log_softmax(1)
        p = log_p.exp()
        confidence, chosen = p.max(1)
        inside = truth < self.classes
        of_truth = log_p.gather(1, truth.clamp_max(self.classes - 1)[:, None])[:, 0]
        return PixelBatch(
            images=0,
            scored=len(truth),
            confusion=count_confusion(chunk.argmax(1), labels, classes=self.classes),
            entropy=float(torch.special.entr(p).sum()),
            nll=-float(of_truth[inside].double().sum()),
            brier=float((p.square().sum(1) - 2 * of_truth.exp() + 1)[inside].double().sum()),
            broken=int(rows.isnan().any(1).sum()),
            bins=reliability(confidence.double().cpu(), (chosen == truth).cpu()),
        )

    def details(self) -> dict[str, Any]:
        total = sum_counts((batch.confusion for batch in self.batches), classes=self.classes)
        counts = (total.right.tolist(), total.predicted.tolist(), total.labeled.tolist())
        return {
            "masks": tuple(sorted(self.masks, key=lambda kept: kept.index)),
            "pixels": tuple(zip(*counts, strict=True)),
        }


def mask_picture(mask: Tensor, palette: NDArray[np.uint8] | None) -> bytes:
    """Encode labels (h, w) as a PNG of palette indices with at most 160 pixels on its longer side."""
    scale = min(1.0, MASK_SIDE / max(mask.shape))
    small = resize_mask(mask.to(torch.uint8).cpu().numpy(), *(max(1, round(side * scale)) for side in mask.shape))
    colors = np.zeros((256, 3), dtype=np.uint8)
    if palette is not None:
        colors[: len(palette)] = palette
    picture = Image.fromarray(small)
    picture.putpalette(colors.tobytes())
    with io.BytesIO() as file:
        picture.save(file, "PNG", optimize=True)
        return file.getvalue()


def _classes_at(outputs: Logits, labels: Tensor) -> Tensor:
    """The classes that outputs (n, classes, h, w) predict at the size of their labels (n, h', w')."""
    classes = torch.empty_like(labels, dtype=torch.long)
    for rows, chunk in resized_chunks(outputs, (labels.shape[1], labels.shape[2])):
        classes[:, rows] = chunk.argmax(1)
    return classes
