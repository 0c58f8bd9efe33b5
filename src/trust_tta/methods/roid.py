"""ROID: weighted by certainty and diversity, consistent with an augmented view; CMF: ROID with a filtered source.

Marsden et al., "Universal Test-time Adaptation through Weight Ensembling, Diversity Weighting, and Prior Correction",
WACV 2024; Lee and Chang, "Continual Momentum Filtering on Parameter Space for Online Test-time Adaptation", ICLR 2024.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from trust_tta.methods.augmentations import random_augmentation
from trust_tta.methods.base import Learner, LearningOptions
from trust_tta.methods.losses import entropy, soft_likelihood_ratio, symmetric_cross_entropy
from trust_tta.methods.state import Array, Number, Spec
from trust_tta.methods.validation import check_classes, check_image_logits
from trust_tta.ops.segmentation_logits import upsample
from trust_tta.schema import Count, Fraction, Natural, Positive, Rate

LEAST_GAIN, SURE = 0.89, 0.9999  # bounds of CMF's Kalman gain; above SURE it is 1
WEIGHTS = 38_400.0  # adapted weights for which CMF's `q` is stated


class WeightedOptions(LearningOptions):
    """`temperature` of the weights; `momentum_probs` of the mean prediction; `batch_size` that the loss is divided
    by, the images of the batch where it is None; `seed` of the views."""

    lr: Rate = 1e-3
    temperature: Positive = 1 / 3
    momentum_probs: Fraction = 0.9
    batch_size: Count | None = None
    seed: Natural = 0


class RoidOptions(WeightedOptions):
    """`momentum_src`: weight of the adapted weights in the average with the source after each update."""

    momentum_src: Fraction = 0.99


class Weighted(Learner):
    """The loss of ROID and CMF, and their correction of the predictions by the class prior."""

    options: WeightedOptions
    class_probs: Tensor | None

    def state_spec(self) -> dict[str, Spec]:
        return {"class_probs": Array((None,), least=0, most=1 + 1e-3)}

    def adapt(self, images: Tensor) -> Tensor:
        logits = self.correct(upsample(super().adapt(images)))
        if self.logits_before is not None:
            self.prediction_before = self.correct(self.logits_before)
        return logits

    def infer(self, images: Tensor) -> Tensor:
        return self.correct(upsample(super().infer(images)))

    def update(self, images: Tensor, logits: Tensor) -> None:
        check_image_logits(logits, self.name)
        weights, kept = self.weigh(logits.detach())
        views = self.logits_of_some(
            lambda indices: self.augment(images[indices]),
            kept.nonzero()[:, 0],
            len(images),
            stochastic_depth=self.options.stochastic_depth,
        )
        chosen, weights = logits[kept], weights[kept]
        losses = soft_likelihood_ratio(chosen) + symmetric_cross_entropy(chosen, views)
        if bool(self.step((weights * losses).sum() / (self.options.batch_size or len(images)))):
            self.update_class_probs(logits.detach())
            self.average_weights()

    def augment(self, images: Tensor) -> Tensor:
        """A view of images (n, c, h, w)."""
        return random_augmentation(
            images, self.model, seed=self.options.seed * 1_000_003 + self.counters.backwards, soft=False
        )

    def weigh(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Weights (n,) by certainty and by difference to the mean prediction, and which images are used."""
        p = logits.softmax(1)
        mean = self.mean_prediction(p)
        diversity = _scaled(1 - torch.cosine_similarity(mean[None], p, dim=1))
        certainty = _scaled(-entropy(logits))
        return torch.exp(diversity * certainty / self.options.temperature), ~(diversity < diversity.mean())

    def update_class_probs(self, logits: Tensor) -> None:
        """Update the moving mean prediction (classes,) by the whole batch."""
        p, momentum = logits.softmax(1), self.options.momentum_probs
        self.class_probs = momentum * self.mean_prediction(p) + (1 - momentum) * p.mean(0)

    def mean_prediction(self, p: Tensor) -> Tensor:
        """Mean prediction (classes,) of the stream so far, for predictions p (n, classes); uniform at first."""
        if self.class_probs is None:
            return torch.full_like(p[0], 1 / p.shape[1])
        check_classes(self.class_probs, p.shape[1])
        return self.class_probs.to(p)

    def average_weights(self) -> None:
        """Average the adapted weights with the source's; called after each update."""
        raise NotImplementedError

    def correct(self, logits: Tensor) -> Tensor:
        """Logits (n, classes) scaled by the smoothed class prior of the batch."""
        prior = logits.softmax(1).mean(0)
        smoothing = max(1 / len(logits), 1 / len(prior)) / prior.max()
        return logits * (prior + smoothing) / (1 + smoothing * len(prior))


class Roid(Weighted):
    """One update on the selected images and an augmented view of them, then a small step towards the source."""

    name = "roid"
    Options: ClassVar[type[LearningOptions]] = RoidOptions
    options: RoidOptions

    def average_weights(self) -> None:
        momentum, origin = self.options.momentum_src, self.weights.source_vector
        self.weights.load(momentum * self.weights.snapshot() + (1 - momentum) * origin)


class CmfOptions(WeightedOptions):
    """`alpha`: decay of the hidden weights towards the source; `q`: variance of their drift, for 38,400 weights;
    `gamma`: weight of the adapted weights in the average with the hidden ones."""

    alpha: Fraction = 0.99
    gamma: Fraction = 0.99
    q: Rate = 0.005


class Cmf(Weighted):
    """ROID, but the weights are averaged with hidden ones, which a Kalman filter estimates."""

    Options: ClassVar[type[LearningOptions]] = CmfOptions
    options: CmfOptions
    hidden: Tensor | None

    def reset_state(self) -> None:
        super().reset_state()
        self.variance = 0.0

    def state_spec(self) -> dict[str, Spec]:
        return {**super().state_spec(), "hidden": Array.like(self.weights.vector), "variance": Number(float, least=0)}

    def average_weights(self) -> None:
        alpha, gamma = self.options.alpha, self.options.gamma
        theta, origin = self.weights.snapshot(), self.weights.source_vector
        hidden = origin if self.hidden is None else self.hidden.to(theta)
        drift = self.options.q * len(theta) / WEIGHTS
        hidden = alpha * hidden + (1 - alpha) * origin
        variance = alpha**2 * self.variance + drift
        gain = max((1 - drift) / (variance + 1 - drift), LEAST_GAIN)
        gain = 1.0 if gain >= SURE else gain
        self.variance = gain * variance
        self.hidden = gain * hidden + (1 - gain) * theta
        self.weights.load(gamma * theta + (1 - gamma) * self.hidden)


def _scaled(values: Tensor) -> Tensor:
    """Values (n,) rescaled to 0..1; all zero where they are equal, as of a single image."""
    low, high = values.aminmax()
    return (values - low) / torch.where(high == low, 1, high - low)
