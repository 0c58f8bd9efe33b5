"""BN-alpha and BN-EMA: source statistics mixed with those of the batch, or updated by them; no weight changes.

Schneider et al., "Improving Robustness against Common Corruptions by Covariate Shift Adaptation", NeurIPS 2020. The
norms here are also those of RoTTA.
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from trust_tta.errors import DataError
from trust_tta.methods.base import MethodOptions
from trust_tta.methods.source import Source
from trust_tta.methods.statistics import Statistics, StatisticsKind
from trust_tta.methods.stream_norm import AdaptiveNorm
from trust_tta.methods.validation import all_finite
from trust_tta.ops.batch_norm import fixed_norm
from trust_tta.ops.segmentation_logits import Logits
from trust_tta.schema import Fraction


class RunningNorm(AdaptiveNorm):
    """Running statistics that are updated with `momentum`; None: the layer's own momentum.

    Subclasses implement `update`.
    """

    def __init__(self, norm: _BatchNorm, like: Tensor, *, momentum: float | None) -> None:
        super().__init__(norm, like)
        momentum = norm.momentum if momentum is None else momentum
        self.momentum = 0.1 if momentum is None else float(momentum)

    def normalize(self, x: Tensor, *, updating: bool) -> Tensor:
        if not updating:
            return fixed_norm(x, self.mean, self.variance, self.weight, self.bias, self.eps)
        wide = x.to(self.mean.dtype)
        mean, variance = self.update(wide)
        shape = (1, -1, *(1 for _ in x.shape[2:]))
        scale = (variance + self.eps).rsqrt()
        scale = scale if self.weight is None else scale * self.weight
        normal = (wide - mean.view(shape)) * scale.view(shape)
        return (normal if self.bias is None else normal + self.bias.view(shape)).to(x.dtype)

    def update(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Update the running statistics by x; returns the mean and variance (channels,) to normalize x with."""
        raise NotImplementedError

    def average(self, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """Running statistics updated by the mean and variance (channels,) of a batch."""
        stays = 1 - self.momentum
        return stays * self.mean + self.momentum * mean, stays * self.variance + self.momentum * variance

    def store(self, mean: Tensor, variance: Tensor) -> None:
        self.mean.copy_(mean.detach())
        self.variance.copy_(variance.detach())


class AlphaNorm(RunningNorm):
    """Source statistics averaged with those of the batch in every forward; nothing is stored."""

    def normalize(self, x: Tensor, *, updating: bool) -> Tensor:
        return super().normalize(x, updating=True)

    def update(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.average(*_statistics(x, correction=1))


class EmaNorm(RunningNorm):
    """An updating forward normalizes by the batch's statistics and updates the running ones, as in training."""

    def update(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, unbiased = _statistics(x, correction=1)
        self.store(*self.average(mean, unbiased))
        return _statistics(x, correction=0)


class RobustNorm(RunningNorm):
    """RoTTA's: running statistics are updated, then used; gradients flow through the batch's part of them."""

    def update(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, variance = self.average(*_statistics(x, correction=0))
        self.store(mean, variance)
        return mean, variance


class BnAlphaOptions(MethodOptions):
    """`alpha`: weight of the batch's statistics, for `statistics="batch"`."""

    alpha: Fraction = 0.1


class BnAlpha(Source):
    """Each BatchNorm takes (1 - alpha) of the source's mean and variance and alpha of the batch's."""

    name = "bn_alpha"
    Options: ClassVar[type[MethodOptions]] = BnAlphaOptions
    options: BnAlphaOptions

    def make_statistics(self) -> Statistics:
        if self.options.statistics != "batch":
            return super().make_statistics()
        return Statistics(self.model, "source", make_norm=partial(AlphaNorm, momentum=self.options.alpha))


class BnEmaOptions(MethodOptions):
    """`momentum` of the running statistics; None takes each layer's own."""

    statistics: StatisticsKind = "stream"
    momentum: Fraction | None = None


class BnEma(Source):
    """A forward that updates the running statistics of training, then the prediction."""

    name = "bn_ema"
    Options = BnEmaOptions
    options: BnEmaOptions

    def make_statistics(self) -> Statistics:
        if self.options.statistics != "stream":
            return super().make_statistics()
        return Statistics(self.model, "stream", make_norm=partial(EmaNorm, momentum=self.options.momentum))

    def adapt(self, images: Tensor) -> Logits:
        before = super().adapt(images) if self.options.predict == "before" else None
        self.prediction_before = before
        if self.options.statistics == "stream":
            self.observe_statistics(images)
            check_moved(self.statistics, images)
        return super().adapt(images) if before is None else before


def check_moved(statistics: Statistics, images: Tensor) -> None:
    """Refuse a batch that makes running statistics not finite."""
    moved = [norm.mean.abs().amax() + norm.variance.amax() for norm in statistics.norms.values()]
    if moved and not bool(all_finite(torch.stack(moved))):
        raise DataError(
            f"the statistics of this batch are not finite (its largest pixel is {float(images.abs().max()):.3g}); "
            "nothing was changed: check the preprocessing"
        )


def _statistics(x: Tensor, *, correction: int) -> tuple[Tensor, Tensor]:
    """Mean and variance (channels,); the variance of a single value is zero."""
    variance, mean = torch.var_mean(
        x, dim=[0, *range(2, x.dim())], correction=min(correction, x.numel() // x.shape[1] - 1)
    )
    return mean, variance
