"""Monitor of an adapting method: lets the source predict a share of the images, and finds streams of few classes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from trust_tta.errors import StateError
from trust_tta.live.calibration import Reference
from trust_tta.live.comparison import (
    BLOCK,
    COMPARED_IMAGES,
    MIN_WEIGHT,
    RUN_IMAGES,
    TEST_TOLERANCE,
    Comparison,
    differs,
)
from trust_tta.live.guard import Guard
from trust_tta.live.snapshots import check_keys, check_number
from trust_tta.live.source_reference import SourceReference
from trust_tta.live.stream_statistics import (
    ImageStats,
    Reading,
    Window,
    effective_classes,
    probability_rows,
    weight_distance,
)
from trust_tta.methods.base import Method
from trust_tta.methods.tide.constants import TIDE
from trust_tta.ops.segmentation_logits import Logits, upsample

MAX_COMPARED = 64  # images of a batch that are compared, unless the source predicts all of them
FEW_CLASSES_WINDOW = 64  # images that suffice to say that they are of few classes
MAX_FEW_CLASSES = 1 / 3  # the source's effective number of classes over the adapted network's, on images of few classes
MIN_MANY_CLASSES = 0.5  # the same, above which they are of many classes again
NO_NORMS = 2 / 3  # times these where no statistics of norms tell few classes from a corruption
MAX_SEVERAL = 1.5  # likeness of the mean prediction to that of one class, below which there are others again
# `SourceReference.depth_distances` of images of few classes: the middle one, and the last one over it.
MAX_MIDDLE_DISTANCE, MIN_DEPTH_RATIO = 0.15, 3.0
EARLIER_COMPARISON = {"test", "few_classes", "total", "batches", "window", "changes", "pending"}
AMOUNTS = ("allowance", "credit", "passes", "spent")
EARLIER_MONITOR = {"comparison", "few_classes", "served", "step_passes", *AMOUNTS}


class Monitor:
    """Source network, comparison and budget of one method, in forward passes of one image.

    `passes`: what the method alone would have taken; `spent`: what method and source took; `credit`: what the budget
    still allows; `allowance`: its share since the last comparison. A backward pass counts as one forward pass, which is
    less than it takes.
    """

    def __init__(self, method: Method, guard: Guard, *, reference: Reference | None) -> None:
        self.guard, self.source, self._probabilities = guard, SourceReference(method), method.probabilities
        self.comparison = Comparison(tolerance=reference.tolerance if reference else TEST_TOLERANCE)
        self.allowance = self.credit = self.passes = self.spent = 0.0
        self.step_passes = 1  # of the method's last update, per image
        self._few = Window(FEW_CLASSES_WINDOW)
        # One class after others harms through statistics alone: without norms, the window is long.
        self._log_p = Window(FEW_CLASSES_WINDOW if self.source.references else RUN_IMAGES)
        # Log confidence of the adapted network, contrast and brightness: sums and sums of squares (3, 2).
        self._served = Window(COMPARED_IMAGES)
        self._surprised = False
        self._distance: float | None = None  # of the weights, as of the last comparison

    @property
    def overdrawn(self) -> bool:
        """Whether the budget is spent: an update should be skipped, which pays for the source's predictions."""
        return self.credit < -COMPARED_IMAGES

    def find_single(self, *, adapt: bool) -> Literal["adapted", "source"] | None:
        """The network that should predict the next batch alone, where there are no updates to skip; None: as usual."""
        if not self.overdrawn or not self.comparison.in_doubt or (adapt and self.step_passes > 1):
            return None
        return "source" if self.comparison.weight < 0.5 else "adapted"

    def predict_alone(self, images: Tensor, *, adapt: bool) -> tuple[Logits, bool]:
        """The source's logits in place of the method's, and whether the images changed."""
        self._pay(len(images), taken=1, alone=self.step_passes if adapt else 1)
        logits = self.source(images)
        self._rows = probability_rows(logits).cpu().numpy()
        confidence = np.log(np.maximum(self._rows.max(1), 1e-30))
        moments = np.array([confidence.mean(), np.square(confidence).mean()])
        changed = len(images) >= BLOCK and self.comparison.is_other_confidence(moments, len(images))
        if changed:
            self.comparison.forget()
        return logits, changed

    def add(self, stats: ImageStats, output: Tensor, *, passes: int, adapt: bool, adapted: bool) -> bool:
        """Add a batch's image statistics and prediction; returns whether the source should predict the batch, too.

        `passes`: forward and backward passes that the method took, `adapted`: for an update.
        """
        images = stats.shape[1]
        self.step_passes = passes if adapted else max(passes, self.step_passes)
        self._pay(images, taken=passes, alone=self.step_passes if adapt else passes)
        self._rows = probability_rows(output, probabilities=self._probabilities).cpu().numpy()
        confidence = np.log(np.maximum(self._rows.max(1), 1e-30))
        lowest, highest, sums = stats.astype(np.float64).mean(2)
        total = images * np.array([[f.mean(), np.square(f).mean()] for f in (confidence, highest - lowest, sums)])
        known = self._served
        self._surprised = known.images > 0 and differs(total / images, images, known.mean, known.images)
        if self._surprised:
            known.clear()
        known.add(images, total)
        return self._surprised or self.comparison.in_doubt or self.allowance >= min(images, BLOCK)

    def _pay(self, images: int, *, taken: int, alone: int) -> None:
        self.passes += images * alone
        self.spent += images * taken
        self.allowance += self.guard.budget * images * alone
        self.credit = min(self.credit + images * ((1 + self.guard.budget) * alone - taken), 2.0 * MAX_COMPARED)

    def mix(self, images: Tensor, logits: Tensor, source: Logits | None) -> Tensor:
        """The logits to serve: the adapted network's, the source's, or the logarithm of a mixture of both.

        Probabilities where the method returns these. `source`: the source's logits, if it predicted all images.
        """
        weight, dense = self.comparison.weight, logits.dim() > 2  # maps are large, and not mixed
        if not self.comparison.in_doubt or (dense and weight >= 0.5):
            return logits
        if source is None:
            self.spent += len(images)
            self.credit -= len(images)
            source = self.source(images)
        theirs = upsample(source).to(logits)
        if weight < MIN_WEIGHT or dense:
            return theirs.softmax(1) if self._probabilities else theirs
        ours = logits.clamp_min(1e-9).log() if self._probabilities else logits
        # Methods change the scale of logits, and the surer network would prevail.
        target, margin = ((each.amax(1) - each.mean(1)).mean() for each in (theirs, ours))
        ours = target / margin.clamp_min(1e-6) * ours
        mixture = weight * ours.softmax(1) + (1 - weight) * theirs.softmax(1)
        return mixture if self._probabilities else mixture.clamp_min(1e-30).log()

    def compare(self, images: Tensor, output: Tensor) -> tuple[Logits | None, bool, Tensor | None]:
        """Let the source predict a batch, or a sample of it, and compare its classes with the method's.

        Returns the source's logits (None for a sample), whether the images changed, and the classes (n, 2) of both
        networks, -1 for images that were not compared; None for segmentation.
        """
        share = min(len(images), MAX_COMPARED, max(1, int(self.allowance)))
        stride = 1 if self._surprised or self.comparison.in_doubt else -(-len(images) // share)
        sample, output = images[::stride], output[::stride]
        logits, moments = self.source.predict(sample)
        self.spent += len(sample)
        self.credit -= len(sample)
        self.allowance = 0.0
        source, adapted = probability_rows(logits), probability_rows(output, probabilities=self._probabilities)
        pairs: Tensor | None = None
        if len(source) == len(sample):
            pairs = torch.full((len(images), 2), -1)
            pairs[::stride] = torch.stack([adapted.argmax(1), source.argmax(1)], 1).cpu()
        else:  # pixels, which depend on each other: one block for a batch
            step = len(source) // BLOCK or 1
            source, adapted = source[::step][:BLOCK], adapted[::step][:BLOCK]
        confidence, theirs = (values.cpu().numpy() for values in source.max(1))
        ours, classes = adapted.argmax(1).cpu().numpy(), source.shape[1]
        changed = self.comparison.add(ours, theirs, np.log(np.maximum(confidence, 1e-30)), classes=classes)
        counts = [np.bincount(rows, minlength=classes) for rows in (ours, theirs)]
        self._few.add(len(sample), np.concatenate(counts if moments is None else [*counts, len(sample) * moments]))
        self._add_log_p(source)
        if self._few.images >= FEW_CLASSES_WINDOW // 2:
            self.comparison.few_classes = self._has_few_classes(classes)
        self._distance = None
        return (logits if stride == 1 else None), changed, pairs

    def _has_few_classes(self, classes: int) -> bool:
        """Whether the last images are of one class, or of few, which batch statistics hide from the adapted network."""
        ours, theirs, moments = np.split(self._few.mean, [classes, 2 * classes])
        known, log_p = self.comparison.few_classes, self._log_p.mean
        alike = float(self.source.nearest_class(torch.from_numpy(log_p[None, :-1].copy()))[0]) / max(log_p[-1], 1e-6)
        one_class = bool(alike > (MAX_SEVERAL if known else TIDE.one_class))
        limit = MIN_MANY_CLASSES if known else MAX_FEW_CLASSES
        fewer = effective_classes(theirs) / effective_classes(ours)
        if not len(moments):
            return one_class or fewer < NO_NORMS * limit
        middle, last = self.source.depth_distances(moments)
        return middle < MAX_MIDDLE_DISTANCE and (one_class or (fewer < limit and last > MIN_DEPTH_RATIO * middle))

    def _add_log_p(self, source: Tensor) -> None:
        """Add the source's probabilities (n, classes): their centered logarithms, and how near single ones are a class.

        As in `tide/label_shift.py`.
        """
        log_p, known = source.clamp_min(1e-12).log(), self._log_p
        log_p = log_p - log_p.mean(1, keepdim=True)
        total = log_p.sum(0)
        before = torch.from_numpy(known.mean[:-1] * known.images).to(total) if known.images else 0 * total
        own = self.source.nearest_class(log_p - (before + total) / (known.images + len(source))).sum()
        known.add(len(source), torch.cat([total, own[None]]).cpu())

    def read(self, method: Method, images: int, *, leading_since: int) -> Reading:
        """The `Reading` after a batch."""
        if self._distance is None:
            self._distance = weight_distance(method)
        rows, comparison = self._rows, self.comparison
        return Reading(
            images=images,
            entropy=-float((rows * np.log(np.maximum(rows, 1e-37))).sum()) / len(rows),
            confidence=float(rows.max(1).mean()),
            effective_classes=effective_classes(rows.mean(0)),
            compared=comparison.compared,
            agreement=comparison.agreement,
            evidence=comparison.evidence,
            weight=comparison.weight if comparison.in_doubt else 1.0,
            certainty=comparison.test.certainty,
            e_value=comparison.test.e_value,
            leading_since=leading_since or None,
            cost=self.spent / max(self.passes, 1.0) - 1 if self.passes else 0.0,
            weight_distance=self._distance,
            skipped=method.counters.skipped,
        )

    def start_over(self) -> None:
        """Begin anew with another state of the method."""
        self.comparison.start_over()
        self._served.clear()
        self._distance = None

    def state(self) -> dict[str, Any]:
        return {
            "comparison": self.comparison.state(),
            "few_classes": self._few.state(),
            "served": self._served.state(),
            "log_p": self._log_p.state(),
            "step_passes": self.step_passes,
            **{name: getattr(self, name) for name in AMOUNTS},
        }

    def check_state(self, state: Any) -> None:
        """Refuse what `state` cannot have returned; that of an earlier version is accepted, and ignored."""
        if _is_earlier(state):
            return
        check_keys(state, self.state(), "monitor")
        for name in AMOUNTS:
            check_number(state[name], name, float, low=-1e18 if name == "credit" else 0, high=1e18)
        check_number(state["step_passes"], "step_passes", int)
        self.comparison.check_state(state["comparison"])
        for name in ("few_classes", "served", "log_p"):
            Window.check_state(name, state[name])
            for _, total in state[name]:
                if (total.shape != (3, 2)) if name == "served" else (total.dim() != 1 or len(total) < 2):
                    raise StateError(f"the snapshot's window '{name}' has a sum that is not one of predictions")

    def load(self, state: Mapping[str, Any]) -> None:
        if not _is_earlier(state):
            self.comparison.load(state["comparison"])
            self._few.load(state["few_classes"])
            self._served.load(state["served"])
            self._log_p.load(state["log_p"])
            self.step_passes = state["step_passes"]
            for name in AMOUNTS:
                setattr(self, name, state[name])
        self._distance = None


def _is_earlier(state: Any) -> bool:
    """Whether this is the state of a monitor of an earlier version: with other windows, or another comparison."""
    if not isinstance(state, Mapping):
        return False
    comparison = state.get("comparison")
    keys = comparison.keys() if isinstance(comparison, Mapping) else set()
    return "monitors" in state or "recent" in keys or keys == EARLIER_COMPARISON or state.keys() == EARLIER_MONITOR
