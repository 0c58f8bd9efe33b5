"""LAME: predictions of a batch made consistent with the affinity of its features; no weight changes.

Boudiaf et al., "Parameter-Free Online Test-Time Adaptation", CVPR 2022.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trust_tta.methods.base import Method, MethodOptions
from trust_tta.methods.features import features_and_logits, require_features
from trust_tta.schema import Count, Natural, Rate


class LameOptions(MethodOptions):
    """`affinity` of the normalized pooled features: "rbf" with the mean distance to the `k`-th nearest (each image
    counted among its own) as width, "knn" one for each of the `k` nearest others, "linear" their inner product;
    `strength` scales it, `force_symmetry` takes the mean of it and its transpose."""

    affinity: Literal["rbf", "knn", "linear"] = "rbf"
    k: Count = 5
    strength: Rate = 1.0
    iterations: Natural = 1000
    force_symmetry: bool = False


class Lame(Method):
    """Assignments Y that are close to the predictions p and alike for similar images: Y = softmax(log p + K Y).

    The result is a distribution, not logits. Made for streams in which classes come in runs; where they are well
    mixed it tends to hurt. `predict="before"` gives the network's own probabilities.
    """

    Options = LameOptions
    options: LameOptions
    probabilities = True

    def adapted_names(self, model: nn.Module) -> list[str]:
        require_features(model, "LAME")
        return []

    def adapt(self, images: Tensor) -> Tensor:
        with torch.no_grad():
            self.counters.forwards += 1
            features, logits = features_and_logits(self.model, images)
            self.prediction_before = logits
            if self.options.predict == "before":
                return logits.softmax(1)
            affinity = AFFINITIES[self.options.affinity](F.normalize(features.double(), dim=1), self.options.k)
            kernel = self.options.strength * affinity
            kernel = (kernel + kernel.T) / 2 if self.options.force_symmetry else kernel
            return propagate(logits.double().log_softmax(1), kernel, iterations=self.options.iterations).to(
                logits.dtype
            )


def propagate(log_p: Tensor, kernel: Tensor, *, iterations: int = 1000, tolerance: float = 1e-8) -> Tensor:
    """Assignments (n, classes) from log-predictions (n, classes) and affinities (n, n).

    The rounds end when no assignment moves by more than `tolerance`. The energy that each round lowers, for a symmetric
    positive kernel, is no measure of that: it is flat around the fixed point.
    """
    assignments = log_p.exp()
    for _ in range(iterations):
        before, assignments = assignments, (log_p + kernel @ assignments).softmax(1)
        if float((assignments - before).abs().max()) <= tolerance:
            break
    return assignments


def rbf(features: Tensor, k: int) -> Tensor:
    """exp(-d^2 / 2 s^2), with s the mean distance to the k-th nearest, the image itself being the first."""
    distances = pairwise_distances(features)
    width = distances.topk(min(k, len(features)), largest=False).values[:, -1].mean()
    return torch.exp(-((distances / width.clamp_min(1e-12)) ** 2) / 2)


def nearest(features: Tensor, k: int) -> Tensor:
    """One for each of the k nearest others, (n, n); not symmetric."""
    distances = pairwise_distances(features).fill_diagonal_(float("inf"))
    neighbors = distances.topk(min(k, len(features) - 1), largest=False).indices
    return torch.zeros_like(distances).scatter_(1, neighbors, 1)


def linear(features: Tensor, k: int) -> Tensor:
    """Inner products, (n, n); `k` has no effect."""
    del k
    return features @ features.T


AFFINITIES = {"rbf": rbf, "knn": nearest, "linear": linear}


def pairwise_distances(features: Tensor) -> Tensor:
    """Euclidean, (n, n), exactly zero between an image and itself."""
    return torch.cdist(features, features, compute_mode="donot_use_mm_for_euclid_dist")
