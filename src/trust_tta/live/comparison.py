"""Comparison of the adapted network with the source: label-free evidence, and the weight of either prediction.

The evidence is how many classes each predicts for the same images: adaptation that harms predicts few classes where the
source predicts many, and adaptation that helps spreads what corruption drove to a few. Entropies of the predicted
classes do not depend on confidence, which adaptation changes at will (docs/results/guard.md compares others).

Where labels come in runs, statistics of a batch spread its predictions over classes that are not there. Runs show in
the source's classes, which change from batch to batch; there, the evidence is the information that predicted classes
carry about the batch they are in.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trust_tta.errors import StateError
from trust_tta.live.sequential_test import HarmTest
from trust_tta.live.stream_statistics import Values, Window
from trust_tta.schema import show

COMPARED_IMAGES = 256  # over which evidence for the weights is computed
BLOCK = 32  # images of one value of evidence for the test
EVIDENCE_SCALE = 0.05  # nats of evidence that count in full for the weights
BALANCING = 0.02  # nats by which batch statistics even classes out on images where they do not help
TEST_TOLERANCE = 0.05  # nats of evidence that the test accepts as harmless
TEST_SCALE = 0.35  # nats beyond the tolerance that count in full
DISCOUNT = 0.7  # of earlier evidence, per compared batch
MAX_TOTAL = 1 / (1 - DISCOUNT) + 1e-9  # what evidence without labels can add up to
RATE = 2.0  # of the exponential weights
PRIOR = 0.5  # log odds of the source without any evidence
REFERENCE_PRIOR = 3.0  # the same for images like the reference, on which there is nothing to gain
MIN_CHANGE = 3.5  # standard errors of the mean log confidence that count as other images
MIN_CLASS_CHANGE = 6.0  # standard deviations of the G statistic that count as other classes
RECENT, MIN_CHANGES = 6, 3  # compared batches, and those of other classes than before that make runs of labels
RUNS_SCALE = 2.0  # evidence of runs over that of spread
MIN_WEIGHT, MAX_WEIGHT = 0.05, 0.95  # beyond which one network predicts alone
HARMLESS = 0.02  # share of different predictions that needs no mixture


NO_ROWS: Values = np.zeros((0, 3))


class Comparison:
    """Evidence, exponential weights and test of one stream.

    With evidence x_t in [-1, 1], positive for the source, D_t = d D_{t-1} + x_t, and the prior odds of the source, the
    weight of the adapted network is w_t = p exp(-r D_t) / (p exp(-r D_t) + 1 - p). F(D) = -log(p exp(-r D) + 1 - p) / r
    is concave with F(0) = 0 and F' = w, so that w_t x_t <= F(D_t) - F(d D_{t-1}) <= F(D_t) - d F(D_{t-1}), and

        sum_t d^(T-t) w_t x_t  <=  F(D_T)  <=  min(0, D_T) + log(1 / min(p, 1 - p)) / r.

    Against the better of both networks, the mixture loses at most 0.5 batches of full evidence, whatever the stream.
    """

    def __init__(self, *, reference_confidence: float | None = None, tolerance: float = TEST_TOLERANCE) -> None:
        self.test = HarmTest()
        self.few_classes = False  # the source predicts alone
        self.total = 0.0  # discounted sum of evidence
        self.evidence: float | None = None  # nats
        self._reference_confidence, self._tolerance = reference_confidence, tolerance
        self._window, self._recent = Window(COMPARED_IMAGES), Window(COMPARED_IMAGES)
        self._changes: deque[bool] = deque(maxlen=RECENT)
        self._pending = NO_ROWS  # adapted and source class, log confidence of images that do not fill a block yet

    def add(self, adapted: NDArray[Any], source: NDArray[Any], log_confidence: NDArray[Any], *, classes: int) -> bool:
        """Take predicted classes (n,) and the source's log confidence (n,); returns whether the images changed.

        Small batches are gathered until they make up a block.
        """
        rows = np.stack([adapted, source, log_confidence], 1).astype(np.float64)
        self._pending = np.concatenate([self._pending, rows]) if len(self._pending) else rows
        if len(self._pending) < BLOCK:
            return False
        rows, self._pending = self._pending, NO_ROWS
        n, pairs = len(rows), rows[:, :2].astype(np.int64)
        counts = [np.bincount(each, minlength=classes) for each in pairs.T]
        moments = rows[:, 2].sum(), np.square(rows[:, 2]).sum(), (pairs[:, 0] != pairs[:, 1]).sum()
        total = np.concatenate([moments, *counts])
        other_classes, other_confidence = self._find_change(n, total)
        self._changes.append(other_classes)
        changed = (other_classes or other_confidence) and not self.in_runs
        if changed:
            self.forget()
        self._window.add(n, total)
        self._recent.add(n, total)
        self.evidence = self._information() if self.in_runs else self._spread()
        self.total = DISCOUNT * self.total + min(max(self.evidence / EVIDENCE_SCALE, -1.0), 1.0)
        for block in np.array_split(pairs, n // BLOCK):
            self.test.add((spread_difference(block, classes) - self._tolerance) / TEST_SCALE)
        return changed

    def add_labels(self, adapted: NDArray[Any], source: NDArray[Any], labels: NDArray[Any]) -> None:
        """Take labels (n,) of images that both networks have predicted: exact evidence, at any later time."""
        for ours, theirs, label in zip(adapted, source, labels, strict=True):
            evidence = float(theirs == label) - float(ours == label)
            self.test.add(evidence)
            self.total = min(max(self.total + evidence, -MAX_TOTAL), MAX_TOTAL)

    def _find_change(self, n: int, total: Values) -> tuple[bool, bool]:
        """Whether the source's classes, or its confidence, differ from the window's."""
        if not self._window.images or len(self._window.mean) != len(total):
            return False, False
        (_, new), (_, old) = _counts(total), _counts(self._window.mean * self._window.images)
        old, classes = old + 0.5, len(new)
        both = (old + new) / (old + new).sum()
        g = 2 * sum(float(c @ np.log(np.maximum(c, 1e-9) / (c.sum() * np.maximum(both, 1e-12)))) for c in (new, old))
        surprise = (g - (classes - 1)) / math.sqrt(2 * max(1, classes - 1))
        confidence = differs(total[:2] / n, n, self._window.mean[:2], self._window.images)
        return surprise > MIN_CLASS_CHANGE, confidence

    @property
    def in_runs(self) -> bool:
        """Whether the source's classes change from batch to batch."""
        return sum(self._changes) >= MIN_CHANGES

    def _spread(self) -> float:
        ours, theirs = map(_entropy, _counts(self._window.mean))
        return theirs - ours + BALANCING

    def _information(self) -> float:
        """The source's mutual information of batch and predicted class over the last images, less the adapted one's."""
        images, inside = self._recent.images, np.zeros(2)
        for n, total in self._recent.entries:
            inside += n * np.array([_entropy(c) for c in _counts(total)])
        ours, theirs = np.array([_entropy(c) for c in _counts(self._recent.mean)]) - inside / images
        return float(theirs - ours) / RUNS_SCALE

    @property
    def weight(self) -> float:
        """Weight of the adapted network's prediction."""
        if self.few_classes:
            return 0.0
        odds = min(max(RATE * self.total + self._prior, -50.0), 50.0)
        return 1 / (1 + math.exp(odds))

    @property
    def _prior(self) -> float:
        known = self._reference_confidence
        if known is None or not self._window.images:
            return PRIOR
        return REFERENCE_PRIOR if self._window.mean[0] >= known else PRIOR

    @property
    def agreement(self) -> float | None:
        """Share of the last compared images for which both predict the same class."""
        return 1 - float(self._window.mean[2]) if self._window.images else None

    @property
    def compared(self) -> int:
        return self._window.images

    @property
    def in_doubt(self) -> bool:
        """Whether the source should predict every image."""
        if self.few_classes or not self._window.images:
            return True
        differing = 1 - (self.agreement or 0.0)
        equal = differing == 0 or (differing <= HARMLESS and self._window.images >= COMPARED_IMAGES // 2)
        return self.weight < MAX_WEIGHT and not equal

    def forget(self) -> None:
        """Begin in doubt again; the test goes on."""
        self._window.clear()
        self.total, self.evidence = 0.0, None

    def start_over(self) -> None:
        """Begin the test anew, for another state of the method."""
        self.forget()
        self.test, self._pending = HarmTest(), NO_ROWS

    def state(self) -> dict[str, Any]:
        return {
            "test": self.test.state(),
            "few_classes": self.few_classes,
            "total": self.total,
            "window": self._window.state(),
            "recent": self._recent.state(),
            "changes": list(self._changes),
            "pending": torch.from_numpy(self._pending.copy()),
        }

    def check_state(self, state: Any) -> None:
        """Refuse what `state` cannot have returned."""
        if not isinstance(state, Mapping) or set(state) != set(self.state()):
            raise StateError(f"the snapshot's comparison is not a dict of {', '.join(self.state())}")
        HarmTest.check_state(state["test"])
        total, changes, pending = state["total"], state["changes"], state["pending"]
        if type(total) is not float or not abs(total) <= MAX_TOTAL:
            raise StateError(f"the snapshot's total is {show(total)}; a number up to {MAX_TOTAL:.1f} is wanted")
        if type(state["few_classes"]) is not bool:
            raise StateError(f"the snapshot's few_classes is {show(state['few_classes'])}; a bool is wanted")
        if not isinstance(changes, list) or len(changes) > RECENT or any(type(c) is not bool for c in changes):
            raise StateError(f"the snapshot's changes are {show(changes)}; at most {RECENT} bools are wanted")
        for name in ("window", "recent"):
            Window.check_state(name, state[name])
            for _, values in state[name]:
                odd = values.dim() != 1 or len(values) < 5 or len(values) % 2 == 0
                if odd or bool((values[1:] < 0).any()) or not float(values[3:].sum()) > 0:
                    raise StateError(f"the snapshot's window '{name}' has a sum that is not one of predictions")
        shaped = isinstance(pending, Tensor) and pending.dtype == torch.float64 and pending.shape[1:] == (3,)
        if (
            not shaped
            or len(pending) >= BLOCK
            or not bool(pending.isfinite().all())
            or bool((pending[:, :2] < 0).any())
        ):
            raise StateError(f"the snapshot's pending predictions are not a tensor of fewer than {BLOCK} rows of three")

    def load(self, state: Mapping[str, Any]) -> None:
        self.test.load(state["test"])
        self.few_classes, self.total = state["few_classes"], state["total"]
        self._window.load(state["window"])
        self._recent.load(state["recent"])
        self._changes = deque(state["changes"], maxlen=RECENT)
        self._pending = state["pending"].numpy().copy()


def differs(means: Values, images: int, known: Values, known_images: int) -> bool:
    """Whether any of some means differs from a known one by more than chance; (..., 2): mean and mean square."""
    variance = (
        np.maximum(means[..., 1] - means[..., 0] ** 2, 0) + np.maximum(known[..., 1] - known[..., 0] ** 2, 0)
    ) / 2
    error = np.sqrt(np.maximum(variance, 1e-9) * (1 / images + 1 / known_images))
    return bool((np.abs(means[..., 0] - known[..., 0]) > MIN_CHANGE * error).any())


def spread_difference(pairs: NDArray[Any], classes: int) -> float:
    """Entropy of the source's classes less that of the adapted network's, of pairs (n, 2): adapted, source."""
    ours, theirs = (_entropy(np.bincount(rows, minlength=classes)) for rows in pairs.T)
    return theirs - ours


def _counts(total: Values) -> tuple[Values, Values]:
    """Predicted classes (classes,) of the adapted network and of the source."""
    classes = (len(total) - 3) // 2
    return total[3 : 3 + classes], total[3 + classes :]


def _entropy(counts: Any) -> float:
    shares = counts[counts > 0] / counts.sum()
    return -float(shares @ np.log(shares))
