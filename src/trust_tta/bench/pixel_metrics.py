"""Metrics of a stream of pictures whose pixels are classified: the mean IoU takes the place of accuracy."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from trust_tta.bench.metrics import BatchSums, Meter, reliability
from trust_tta.data.masks import resize_mask
from trust_tta.errors import ShapeError
from trust_tta.models.upernet import resize
from trust_tta.overlap import IGNORED, Overlap, count_overlap, sum_overlaps
from trust_tta.results.record import MaskSample, Reliability

PICTURE_SIDE = 160  # pixels of the longer side of a kept picture


@dataclass(frozen=True, kw_only=True)
class PixelBatch(BatchSums):
    overlap: Overlap
    before: Overlap | None = None


@dataclass(kw_only=True)
class PixelMeter(Meter[PixelBatch]):
    """Outputs (n, classes, h, w), resized to the labels (n, h', w').

    Counts of overlaps are summed over the whole stream before any is divided.
    """

    classes: int
    keep: frozenset[int] = frozenset()  # indices of pictures whose true and predicted labels are kept
    palette: NDArray[np.uint8] | None = None  # (classes, 3)
    masks: list[MaskSample] = field(default_factory=list, init=False)

    def score(self, batches: Sequence[PixelBatch], *, before: bool = False) -> float | None:
        """The mean IoU."""
        overlaps = [batch.before if before else batch.overlap for batch in batches]
        known = [overlap for overlap in overlaps if overlap is not None]
        if before and (not known or len(known) < len(overlaps)):
            return None
        return sum_overlaps(known, classes=self.classes).mean_iou

    def update(
        self,
        outputs: Tensor,
        labels: Tensor,
        *,
        before: Tensor | None = None,
        indices: Tensor | None = None,
        seconds: float = 0.0,
    ) -> None:
        """Add a batch: outputs after the update and `before` it, labels (n, h', w')."""
        if outputs.dim() != 4 or outputs.shape[1] != self.classes or len(outputs) != len(labels):
            raise ShapeError(
                f"outputs have shape {tuple(outputs.shape)} for labels {tuple(labels.shape)}; "
                f"give (n, {self.classes}, h, w) for labels (n, h, w)"
            )
        for i, index in enumerate([] if indices is None else indices.tolist()):
            if index in self.keep:
                earlier_one = None if before is None else before[i]
                self.masks.append(self._kept(index, labels[i], earlier_one, outputs[i]))
        found = [self._measure(*pair) for pair in zip(outputs.detach(), labels.to(outputs.device), strict=True)]
        earlier = None
        if before is not None:
            pairs = zip(before.detach(), labels.to(before.device), strict=True)
            earlier = sum_overlaps((self._count(_full(o, t), t) for o, t in pairs), classes=self.classes)
        self.batches.append(
            PixelBatch(
                images=len(labels),
                scored=sum(one.scored for one in found),
                overlap=sum_overlaps((one.overlap for one in found), classes=self.classes),
                before=earlier,
                entropy=math.fsum(one.entropy for one in found),
                nll=math.fsum(one.nll for one in found),
                brier=math.fsum(one.brier for one in found),
                broken=sum(one.broken for one in found),
                bins=Reliability.total(one.bins for one in found),
                seconds=seconds,
            )
        )

    def _kept(self, index: int, labels: Tensor, before: Tensor | None, after: Tensor) -> MaskSample:
        truth, *predicted = (
            labels,
            *(_full(x.detach(), labels).argmax(0) for x in (before, after) if x is not None),
        )
        pictures = [mask_picture(mask.to(torch.uint8).cpu().numpy(), self.palette) for mask in (truth, *predicted)]
        return MaskSample(
            index=index, truth=pictures[0], before=pictures[1] if before is not None else None, after=pictures[-1]
        )

    def _measure(self, output: Tensor, labels: Tensor) -> PixelBatch:
        """One picture: output (classes, h, w), labels (h', w')."""
        full = _full(output, labels)
        rows = full[:, labels != IGNORED].T.float()
        truth = labels[labels != IGNORED]
        log_p = (rows / rows.sum(1, keepdim=True)).clamp_min(1e-30).log() if self.probabilities else rows.log_softmax(1)
        p = log_p.exp()
        sure, chosen = p.max(1)
        inside = truth < self.classes
        of_truth = log_p.gather(1, truth.clamp_max(self.classes - 1)[:, None])[:, 0]
        return PixelBatch(
            images=1,
            scored=len(truth),
            overlap=self._count(full, labels),
            entropy=float(torch.special.entr(p).sum()),
            nll=-float(of_truth[inside].double().sum()),
            brier=float((p.square().sum(1) - 2 * of_truth.exp() + 1)[inside].double().sum()),
            broken=int(rows.isnan().any(1).sum()),
            bins=reliability(sure.double().cpu(), (chosen == truth).cpu()),
        )

    def _count(self, full: Tensor, labels: Tensor) -> Overlap:
        return count_overlap(full.argmax(0), labels, classes=self.classes)

    def details(self) -> dict[str, Any]:
        total = sum_overlaps((batch.overlap for batch in self.batches), classes=self.classes)
        counts = (total.right.tolist(), total.predicted.tolist(), total.labeled.tolist())
        return {
            "masks": tuple(sorted(self.masks, key=lambda kept: kept.index)),
            "pixels": tuple(zip(*counts, strict=True)),
        }


def mask_picture(mask: NDArray[np.uint8], palette: NDArray[np.uint8] | None) -> bytes:
    """Labels (h, w) as a PNG of palette indices, scaled down until the longer side has at most 160 pixels."""
    scale = min(1.0, PICTURE_SIDE / max(mask.shape))
    small = resize_mask(mask, *(max(1, round(side * scale)) for side in mask.shape))
    colors = np.zeros((256, 3), dtype=np.uint8)
    if palette is not None:
        colors[: len(palette)] = palette
    picture = Image.fromarray(small)
    picture.putpalette(colors.tobytes())
    with io.BytesIO() as file:
        picture.save(file, "PNG", optimize=True)
        return file.getvalue()


def _full(output: Tensor, labels: Tensor) -> Tensor:
    """An output (classes, h, w) at the size of its labels (h', w')."""
    return resize(output[None], labels.shape)[0]
