"""LAME: correct the predictions of a batch by the neighbourhood of its features; the network stays as it is.

Boudiaf et al., "Parameter-Free Online Test-Time Adaptation", CVPR 2022.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trust_tta.errors import ConfigError, ShapeError
from trust_tta.methods.base import Method, MethodOptions
from trust_tta.schema import Count, Natural, Rate


class LameOptions(MethodOptions):
    """`affinity` of the normalized pooled features: "rbf" with the mean distance to the `k`-th nearest (each image
    counted among its own) as width, "knn" one for each of the `k` nearest others, "linear" their inner product;
    `strength` scales it."""

    affinity: Literal["rbf", "knn", "linear"] = "rbf"
    k: Count = 5
    strength: Rate = 1.0
    iterations: Natural = 100


class Lame(Method):
    """Assignments Y that are close to the predictions p and alike for similar images: Y = softmax(log p + K Y).

    The result is a distribution, not logits. Made for streams in which classes come in runs; where they are well
    mixed it tends to hurt. `predict="before"` gives the network's own probabilities.
    """

    name = "lame"
    Options = LameOptions
    options: LameOptions
    probabilities = True

    def adapted_names(self, model: nn.Module) -> list[str]:
        if not (hasattr(model, "forward_features") and hasattr(model, "forward_head")):
            raise ConfigError(
                f"LAME compares features and {type(model).__name__} has no forward_features and forward_head; "
                "add both (images to pooled features to logits)"
            )
        return []

    def adapt(self, images: Tensor) -> Tensor:
        with torch.no_grad():
            self.counters.forwards += 1
            features: Tensor = self.model.forward_features(images)  # type: ignore[operator]
            if features.dim() != 2:
                raise ShapeError(
                    f"forward_features gave shape {tuple(features.shape)}; LAME takes pooled features (n, d)"
                )
            logits: Tensor = self.model.forward_head(features)  # type: ignore[operator]
            self.logits_before = logits
            if self.options.predict == "before":
                return logits.softmax(1)
            affinity = AFFINITIES[self.options.affinity](F.normalize(features.double(), dim=1), self.options.k)
            kernel = self.options.strength * affinity
            return propagate(logits.double().log_softmax(1), kernel, iterations=self.options.iterations).to(
                logits.dtype
            )


def propagate(log_p: Tensor, kernel: Tensor, *, iterations: int = 100, tolerance: float = 1e-8) -> Tensor:
    """Assignments (n, classes) from log-predictions (n, classes) and affinities (n, n).

    For a symmetric positive kernel each round lowers `energy`; the rounds end when it changes by less than the
    relative `tolerance`.
    """
    assignments = log_p.exp()
    before = float("inf")
    for _ in range(iterations):
        pairwise = kernel @ assignments
        now = float(energy(log_p, assignments, pairwise))
        if abs(now - before) <= tolerance * abs(before) and before != float("inf"):
            break
        assignments, before = (log_p + pairwise).softmax(1), now
    return assignments


def energy(log_p: Tensor, assignments: Tensor, pairwise: Tensor) -> Tensor:
    """KL divergence from the predictions less half the agreement of neighbours, a scalar."""
    divergence = torch.xlogy(assignments, assignments) - assignments * log_p
    return (divergence - assignments * pairwise / 2).sum()


def rbf(features: Tensor, k: int) -> Tensor:
    """exp(-d^2 / 2 s^2), with s the mean distance to the k-th nearest, the image itself being the first."""
    distances = pairwise_distances(features)
    width = distances.topk(min(k, len(features)), largest=False).values[:, -1].mean()
    return torch.exp(-((distances / width.clamp_min(1e-12)) ** 2) / 2)


def nearest(features: Tensor, k: int) -> Tensor:
    """One for each of the k nearest others, (n, n); not symmetric."""
    distances = pairwise_distances(features).fill_diagonal_(float("inf"))
    neighbours = distances.topk(min(k, len(features) - 1), largest=False).indices
    return torch.zeros_like(distances).scatter_(1, neighbours, 1)


def linear(features: Tensor, k: int) -> Tensor:
    """Inner products, (n, n); there is no neighbourhood to choose."""
    del k
    return features @ features.T


AFFINITIES = {"rbf": rbf, "knn": nearest, "linear": linear}


def pairwise_distances(features: Tensor) -> Tensor:
    """Euclidean, (n, n), exactly zero between an image and itself."""
    return torch.cdist(features, features, compute_mode="donot_use_mm_for_euclid_dist")
