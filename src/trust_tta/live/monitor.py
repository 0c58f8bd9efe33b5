"""Monitor of an adapting method: lets the source predict a share of the images, and finds streams of few classes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trust_tta.errors import StateError
from trust_tta.live.calibration import Reference
from trust_tta.live.comparison import BLOCK, COMPARED_IMAGES, TEST_TOLERANCE, Comparison, differs
from trust_tta.live.guard import Guard
from trust_tta.live.inputs import ImageStats
from trust_tta.live.source_reference import SourceReference
from trust_tta.live.stream_statistics import (
    Reading,
    Values,
    Window,
    effective_classes,
    probability_rows,
    weight_distance,
)
from trust_tta.methods.base import Method
from trust_tta.ops.segmentation_logits import Logits
from trust_tta.schema import show

MAX_COMPARED = 64  # images of a batch that are compared, unless the source predicts all of them
FEW_CLASSES_WINDOW = 64  # images that suffice to say that they are of few classes
MAX_FEW_CLASSES = 0.5  # the source's effective number of classes over the adapted network's, on images of few classes
MIN_MANY_CLASSES = 0.75  # the same, above which they are of many classes again
NO_NORMS = 2 / 3  # times these where no statistics of norms tell few classes from a corruption
MIN_DEPTH_RATIO = 3.0  # `SourceReference.depth_ratio` of images of few classes
STATE_NAMES = ("comparison", "few_classes", "served", "surprised", "credit", "passes", "spent")


class Monitor:
    """Source network, comparison and budget of one method. `credit`: images that the source may still predict."""

    def __init__(self, method: Method, guard: Guard, *, reference: Reference | None) -> None:
        self.guard, self.source, self._probabilities = guard, SourceReference(method), method.probabilities
        self.comparison = Comparison(
            reference_confidence=reference.confidence if reference else None,
            tolerance=reference.tolerance if reference else TEST_TOLERANCE,
        )
        self.credit = self.passes = self.spent = 0.0  # in forward passes of one image
        self._few = Window(FEW_CLASSES_WINDOW)
        # Log confidence of the adapted network, contrast and brightness: sums and sums of squares (3, 2).
        self._served = Window(COMPARED_IMAGES)
        self._surprised = False
        self._distance: float | None = None  # of the weights, as of the last comparison

    def add(self, stats: ImageStats, output: Tensor, *, passes: int) -> bool:
        """Take a batch's image statistics and prediction; returns whether the source should predict the batch too.

        `passes`: forward passes that the method took for it, a share of which pays for the source's.
        """
        images = stats.shape[1]
        self.passes += images * passes
        self.credit = min(self.credit + self.guard.budget * images * passes, 2 * MAX_COMPARED)
        self._rows = probability_rows(output, probabilities=self._probabilities).cpu().numpy()
        confidence = np.log(np.maximum(self._rows.max(1), 1e-30))
        lowest, highest, sums = stats.astype(np.float64).mean(2)
        total = images * np.array([[f.mean(), np.square(f).mean()] for f in (confidence, highest - lowest, sums)])
        surprised, known = self._surprised, self._served
        self._surprised = known.images > 0 and differs(total / images, images, known.mean, known.images)
        known.add(images, total)
        new = self._surprised and not surprised  # once: it may stay so for good
        return new or self.comparison.in_doubt or self.credit >= min(images, MAX_COMPARED)

    def compare(self, images: Tensor, output: Tensor) -> tuple[Logits | None, bool, Tensor | None]:
        """Compare a prediction; returns the source's, None if only of a sample, and whether the images changed.

        And the classes (n, 2) that both predict, -1 for images that were not compared; None for segmentation.
        """
        stride = 1 if self.comparison.in_doubt else -(-len(images) // MAX_COMPARED)
        sample, output = images[::stride], output[::stride]
        logits, moments = self.source.predict(sample)
        self.spent += len(sample)
        self.credit = max(0.0, self.credit - len(sample))
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
        self._follow_few_classes(len(sample), np.concatenate([*counts, len(sample) * _or_empty(moments)]), classes)
        self._distance = None
        return (logits if stride == 1 else None), changed, pairs

    def _follow_few_classes(self, images: int, total: Values, classes: int) -> None:
        """Find images of few classes, which batch statistics hide from the adapted network."""
        self._few.add(images, total)
        if self._few.images < FEW_CLASSES_WINDOW // 2:
            return
        ours, theirs, moments = np.split(self._few.mean, [classes, 2 * classes])
        limit = MIN_MANY_CLASSES if self.comparison.few_classes else MAX_FEW_CLASSES
        few = effective_classes(theirs) < (limit if len(moments) else NO_NORMS * limit) * effective_classes(ours)
        self.comparison.few_classes = few and (not len(moments) or self.source.depth_ratio(moments) > MIN_DEPTH_RATIO)

    def read(self, method: Method, images: int, *, leading_since: int) -> Reading:
        """The state after a batch, for people."""
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
            cost=self.spent / max(self.passes, 1.0),
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
            "surprised": self._surprised,
            "credit": self.credit,
            "passes": self.passes,
            "spent": self.spent,
        }

    def check_state(self, state: Any) -> None:
        """Refuse what `state` cannot have returned; that of an earlier version is accepted, and ignored."""
        if isinstance(state, Mapping) and "monitors" in state:
            return
        if not isinstance(state, Mapping) or set(state) != set(STATE_NAMES):
            raise StateError(f"the snapshot's monitor is {show(state)}; a dict of {', '.join(STATE_NAMES)} is wanted")
        for name in ("credit", "passes", "spent"):
            if type(state[name]) is not float or not 0 <= state[name] <= 1e18:
                raise StateError(f"the snapshot's {name} is {show(state[name])}; a number from 0 on is wanted")
        self.comparison.check_state(state["comparison"])
        if type(state["surprised"]) is not bool:
            raise StateError(f"the snapshot's surprised is {show(state['surprised'])}; a bool is wanted")
        for name in ("few_classes", "served"):
            Window.check_state(name, state[name])
            for _, total in state[name]:
                if (total.shape != (3, 2)) if name == "served" else (total.dim() != 1 or len(total) < 2):
                    raise StateError(f"the snapshot's window '{name}' has a sum that is not one of predictions")

    def load(self, state: Mapping[str, Any]) -> None:
        if "monitors" not in state:
            self.comparison.load(state["comparison"])
            self._few.load(state["few_classes"])
            self._served.load(state["served"])
            self._surprised = state["surprised"]
            self.credit, self.passes, self.spent = state["credit"], state["passes"], state["spent"]
        self._distance = None


def _or_empty(moments: Values | None) -> Values:
    return np.zeros(0) if moments is None else moments
