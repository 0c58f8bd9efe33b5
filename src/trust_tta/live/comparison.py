"""Comparison of the adapted network with the source: label-free evidence, and the weight of either prediction.

The evidence is how often each predicts the same class for two images: adaptation that harms predicts few classes where
the source predicts many, and adaptation that helps spreads what corruption drove to a few. It does not depend on
confidence, which adaptation changes at will (docs/results/guard.md compares others). Without evidence, the source has
most of the weight.

Labels that come in runs also make the source predict few classes, and statistics of a batch then spread predictions
over classes that are not there. Where the source's classes are few, evidence therefore counts only once a second batch
has shown the same ones, and the test leaves out the next block. Where they often change, it does not count, but other
evidence may speak for the adapted network: that it predicts one class for two images of a block, rather than of two
blocks, more often than the source does. Adaptation that harms makes the blocks alike.
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
from trust_tta.live.snapshots import check_keys, check_number
from trust_tta.live.stream_statistics import Values, Window
from trust_tta.schema import show

COMPARED_IMAGES = 256  # over which evidence for the weights is computed
BLOCK = 32  # images of one value of evidence for the test
EVIDENCE_SCALE = 0.2  # evidence that counts in full for the weights
MIN_PAIRS = 150  # pairs of one class that are added to those found: fewer are no evidence
TEST_TOLERANCE = 0.05  # nats of evidence that the test accepts as harmless
TEST_SCALE = 0.35  # nats beyond the tolerance that count in full
DISCOUNT = 0.7  # of earlier evidence, per compared batch
MAX_TOTAL = 1 / (1 - DISCOUNT) + 1e-9  # what evidence without labels can add up to
RATE = 4.0  # of the exponential weights
PRIOR = 2.0  # log odds of the source without any evidence
MIN_CHANGE = 3.0  # standard errors of a mean that count as other images, deviations of the G statistic as other classes
MAX_EQUAL = 0.25  # pairs of the source's predictions that are equal, above which its classes are few
GROUPS = 16  # of classes, in which changes are found: of a thousand, few images have the same
RECENT, MIN_CHANGES = 16, 3  # compared batches, and those of other classes than before that make runs of labels
MIN_WEIGHT, MAX_WEIGHT = 0.05, 0.95  # beyond which one network predicts alone
RUN_IMAGES = 1024  # of which pairs inside of blocks and across are compared where labels come in runs
MIN_EQUAL = 0.02  # added to shares of equal pairs: fewer are no evidence
MIN_RUN_EVIDENCE = 0.15  # nats for the adapted network, below which blocks are no evidence in runs
HARMLESS = 0.005  # share of different predictions that needs no mixture


NO_ROWS: Values = np.zeros((0, 3))


class Comparison:
    """Evidence, exponential weights and test of one stream.

    With evidence x_t in [-1, 1], positive for the source, D_t = d D_{t-1} + x_t, and the prior odds of the source, the
    weight of the adapted network is w_t = p exp(-r D_t) / (p exp(-r D_t) + 1 - p). F(D) = -log(p exp(-r D) + 1 - p) / r
    is concave with F(0) = 0 and F' = w, so that w_t x_t <= F(D_t) - F(d D_{t-1}) <= F(D_t) - d F(D_{t-1}), and

        sum_t d^(T-t) w_t x_t  <=  F(D_T)  <=  min(0, D_T) + log(1 / min(p, 1 - p)) / r.

    Against the better of both networks, the mixture loses at most 0.6 batches of full evidence, whatever the stream.
    """

    def __init__(self, *, tolerance: float = TEST_TOLERANCE) -> None:
        self.test = HarmTest()
        self.few_classes = False  # the source predicts alone
        self.total = 0.0  # discounted sum of evidence
        self.evidence: float | None = None  # log of a ratio
        self.batches = 0  # compared since the images changed
        self._tolerance = tolerance
        self._window = Window(COMPARED_IMAGES)  # of blocks
        self._changes: deque[bool] = deque(maxlen=RECENT)
        self._runs = Window(RUN_IMAGES)  # of blocks, also of before the images changed
        self._pending = NO_ROWS  # adapted and source class, log confidence of images that do not fill a block yet

    def add(self, adapted: NDArray[Any], source: NDArray[Any], log_confidence: NDArray[Any], *, classes: int) -> bool:
        """Add predicted classes (n,) and the source's log confidence (n,); returns whether the images changed.

        Small batches are gathered until they make up a block.
        """
        rows = np.stack([adapted, source, log_confidence], 1).astype(np.float64)
        self._pending = np.concatenate([self._pending, rows]) if len(self._pending) else rows
        if len(self._pending) < BLOCK:
            return False
        rows, self._pending = self._pending, NO_ROWS
        blocks = np.array_split(rows, len(rows) // BLOCK)
        totals = [_sums(block, classes) for block in blocks]
        other_classes, changed = self._find_change(len(rows), np.sum(totals, 0))
        self._changes.append(other_classes)
        if changed:
            self.forget()
        for block, total in zip(blocks, totals, strict=True):
            self._window.add(len(block), total)
            if not self._last_block_is_of_few:  # a choice by this block would bias its evidence
                pairs = block[:, :2].astype(np.int64)
                self.test.add((spread_difference(pairs, classes) - self._tolerance) / TEST_SCALE)
            self._runs.add(len(block), total)
        self.batches += 1
        in_runs = self._compare_blocks() if self.in_runs else 0.0
        self.evidence = in_runs if in_runs < -MIN_RUN_EVIDENCE else self._compare_pairs()
        self.total = DISCOUNT * self.total + min(max((self.evidence or 0.0) / EVIDENCE_SCALE, -1.0), 1.0)
        return changed

    @property
    def _last_block_is_of_few(self) -> bool:
        """Whether the source predicted few classes for the last block."""
        return bool(self._runs.entries) and bool(equal_pairs(_counts(self._runs.entries[-1][1])[1]) > MAX_EQUAL)

    def add_labels(self, adapted: NDArray[Any], source: NDArray[Any], labels: NDArray[Any]) -> None:
        """Add labels (n,) of images that both networks have predicted: exact evidence, at any later time."""
        for ours, theirs, label in zip(adapted, source, labels, strict=True):
            evidence = float(theirs == label) - float(ours == label)
            self.test.add(evidence)
            self.total = min(max(self.total + evidence, -MAX_TOTAL), MAX_TOTAL)

    def _find_change(self, n: int, total: Values) -> tuple[bool, bool]:
        """Whether the source's classes differ from the window's, and whether these or its confidence do."""
        if not self._window.images or len(self._window.mean) != len(total):
            return False, False
        new, old = (_grouped(_counts(sums)[1]) for sums in (total, self._window.mean * self._window.images))
        old, classes = old + 0.5, len(new)
        both = (old + new) / (old + new).sum()
        g = 2 * sum(float(c @ np.log(np.maximum(c, 1e-9) / (c.sum() * np.maximum(both, 1e-12)))) for c in (new, old))
        surprise = (g - (classes - 1)) / math.sqrt(2 * max(1, classes - 1))
        other_classes = surprise > MIN_CHANGE
        return other_classes, other_classes or self.is_other_confidence(total[:2] / n, n)

    def is_other_confidence(self, moments: Values, images: int) -> bool:
        """Whether the source's log confidence, given as mean and mean square, is not that of the last images."""
        known = self._window
        return known.images > 0 and differs(moments, images, known.mean[:2], known.images)

    @property
    def in_runs(self) -> bool:
        """Whether the source's classes change often."""
        return sum(self._changes) >= MIN_CHANGES

    def _compare_pairs(self) -> float | None:
        """Log of how often the adapted network predicts one class for images of two blocks, over the source's.

        None while that may be due to labels.
        """
        counts = np.array([total[3:] for _, total in self._window.entries])
        sums = counts.sum(0).reshape(2, -1)
        few = equal_pairs(sums[1]) > MAX_EQUAL
        if len(counts) < 2 or (few and self.in_runs) or ((few or self.in_runs) and self.batches < 2):
            return None
        inside = np.square(counts).sum(0).reshape(2, -1).sum(1)
        ours, theirs = (np.square(sums).sum(1) - inside) / 2 + MIN_PAIRS
        return math.log(ours / theirs)

    def _compare_blocks(self) -> float:
        """Log of how much more often the source predicts one class inside of blocks than across, over the adapted's."""
        counts = np.array([total[3:] for _, total in self._runs.entries])
        counts, images = counts.reshape(len(counts), 2, -1), counts.sum(1) / 2
        if len(counts) < 2:
            return 0.0
        across = (np.square(counts.sum(0)) - np.square(counts).sum(0)).sum(1) / (images.sum() ** 2 - (images**2).sum())
        inside = np.average(equal_pairs(counts), axis=0, weights=images)
        ours, theirs = (inside + MIN_EQUAL) / (across + MIN_EQUAL)
        return math.log(theirs / ours)

    @property
    def weight(self) -> float:
        """Weight of the adapted network's prediction."""
        if self.few_classes:
            return 0.0
        odds = min(max(RATE * self.total + PRIOR, -50.0), 50.0)
        return 1 / (1 + math.exp(odds))

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
        """Clear the evidence of the weights; the test continues."""
        self._window.clear()
        self.total, self.evidence, self.batches = 0.0, None, 0

    def start_over(self) -> None:
        """Begin the test anew, for another state of the method."""
        self.forget()
        self._runs.clear()
        self.test, self._pending = HarmTest(), NO_ROWS

    def state(self) -> dict[str, Any]:
        return {
            "test": self.test.state(),
            "few_classes": self.few_classes,
            "total": self.total,
            "batches": self.batches,
            "window": self._window.state(),
            "changes": list(self._changes),
            "runs": self._runs.state(),
            "pending": torch.from_numpy(self._pending.copy()),
        }

    def check_state(self, state: Any) -> None:
        """Refuse what `state` cannot have returned."""
        check_keys(state, self.state(), "comparison")
        HarmTest.check_state(state["test"])
        check_number(state["total"], "total", float, low=-MAX_TOTAL, high=MAX_TOTAL)
        check_number(state["batches"], "number of compared batches", int)
        check_number(state["few_classes"], "few_classes", bool)
        changes, pending = state["changes"], state["pending"]
        if not isinstance(changes, list) or len(changes) > RECENT or any(type(c) is not bool for c in changes):
            raise StateError(f"the snapshot's changes are {show(changes)}; at most {RECENT} bools are wanted")
        for name in ("window", "runs"):
            Window.check_state(name, state[name])
            for _, values in state[name]:
                odd = values.dim() != 1 or len(values) < 5 or len(values) % 2 == 0
                if odd or bool((values[1:] < 0).any()) or not float(values[3:].sum()) > 0:
                    raise StateError(f"the snapshot's window '{name}' has a sum that is not one of predictions")
        shaped = isinstance(pending, Tensor) and pending.dtype == torch.float64 and pending.shape[1:] == (3,)
        if not shaped or len(pending) >= BLOCK or not bool(pending.isfinite().all() & (pending[:, :2] >= 0).all()):
            raise StateError(f"the snapshot's pending predictions are not a tensor of fewer than {BLOCK} rows of three")

    def load(self, state: Mapping[str, Any]) -> None:
        self.test.load(state["test"])
        self.few_classes, self.total, self.batches = state["few_classes"], state["total"], state["batches"]
        self._window.load(state["window"])
        self._runs.load(state["runs"])
        self._changes = deque(state["changes"], maxlen=RECENT)
        self._pending = state["pending"].numpy().copy()


def _sums(rows: Values, classes: int) -> Values:
    """Sums over rows (adapted class, source class, log confidence): log confidence, its square, unequal, counts."""
    pairs = rows[:, :2].astype(np.int64)
    moments = rows[:, 2].sum(), np.square(rows[:, 2]).sum(), (pairs[:, 0] != pairs[:, 1]).sum()
    return np.concatenate([moments, *(np.bincount(each, minlength=classes) for each in pairs.T)])


def differs(means: Values, images: int, known: Values, known_images: int) -> bool:
    """Whether any of some means differs from a known one by more than chance; (..., 2): mean and mean square."""
    variance = (
        np.maximum(means[..., 1] - means[..., 0] ** 2, 0) + np.maximum(known[..., 1] - known[..., 0] ** 2, 0)
    ) / 2
    error = np.sqrt(np.maximum(variance, 1e-9) * (1 / images + 1 / known_images))
    return bool((np.abs(means[..., 0] - known[..., 0]) > MIN_CHANGE * error).any())


def equal_pairs(counts: Values) -> Values:
    """Shares (...) of the pairs of images that are predicted as one class, from counts (..., classes)."""
    images = counts.sum(-1)
    shares: Values = (np.square(counts).sum(-1) - images) / (images * (images - 1))
    return shares


def spread_difference(pairs: NDArray[Any], classes: int) -> float:
    """Entropy of the source's classes less that of the adapted network's, of pairs (n, 2): adapted, source."""
    ours, theirs = (_entropy(np.bincount(rows, minlength=classes)) for rows in pairs.T)
    return theirs - ours


def _counts(total: Values) -> tuple[Values, Values]:
    """Predicted classes (classes,) of the adapted network and of the source."""
    classes = (len(total) - 3) // 2
    return total[3 : 3 + classes], total[3 + classes :]


def _grouped(counts: Values) -> Values:
    """Counts (classes,) added up to at most GROUPS."""
    return np.array([counts[i::GROUPS].sum() for i in range(min(GROUPS, len(counts)))])


def _entropy(counts: Any) -> float:
    shares = counts[counts > 0] / counts.sum()
    return -float(shares @ np.log(shares))
