"""BN-alpha and BN-EMA: statistics of the source, mixed with those of the batch or moved by them; no weight changes.

Schneider et al., "Improving Robustness against Common Corruptions by Covariate Shift Adaptation", NeurIPS 2020. The
norms here are also those of RoTTA.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from trust_tta.methods.base import MethodOptions
from trust_tta.methods.source import Source
from trust_tta.methods.state import Array, Spec, clone
from trust_tta.methods.statistics import Statistics, StatisticsKind
from trust_tta.schema import Fraction


class MovingNorm(nn.Module):
    """A BatchNorm, over the same weights, with a mean and a variance (channels,) of its own that start at the source's.

    Subclasses say in `observe` what a pass that adapts normalizes with, and what it leaves behind.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    mean: Tensor
    variance: Tensor

    def __init__(self, norm: _BatchNorm, *, like: Tensor, share: float | None, observing: bool = False) -> None:
        super().__init__()
        self.register_parameter("weight", norm.weight)
        self.register_parameter("bias", norm.bias)
        self.eps, self.observing = norm.eps, observing
        self.share = 0.1 if (share := norm.momentum if share is None else share) is None else float(share)
        self.source = norm.running_mean, norm.running_var
        like = next((t for t in (norm.running_mean, norm.weight) if t is not None), like)
        for name in ("mean", "variance"):
            self.register_buffer(name, like.new_zeros(norm.num_features), persistent=False)
        self.train(False)
        self.restore_source()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """After a copy or a pickle: statistics of its own, also where tensors came as shared memory."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        for name, buffer in self.named_buffers():
            setattr(self, name, buffer.clone())

    def restore_source(self) -> None:
        mean, variance = self.source
        with torch.no_grad():
            self.mean.zero_() if mean is None else self.mean.copy_(mean)
            self.variance.fill_(1) if variance is None else self.variance.copy_(variance)

    def forward(self, x: Tensor) -> Tensor:
        """(n, channels, ...) in and out."""
        if not self.observing:
            return F.batch_norm(x, self.mean, self.variance, self.weight, self.bias, eps=self.eps)
        wide = x.to(self.mean.dtype)
        mean, variance = self.observe(wide)
        shape = (1, -1, *(1 for _ in x.shape[2:]))
        scale = (variance + self.eps).rsqrt()
        scale = scale if self.weight is None else scale * self.weight
        normal = (wide - mean.view(shape)) * scale.view(shape)
        return (normal if self.bias is None else normal + self.bias.view(shape)).to(x.dtype)

    def observe(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The mean and the variance (channels,) that a pass over x normalizes with."""
        raise NotImplementedError

    def mix(self, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """The moving statistics with those of a batch as a share of them."""
        return (1 - self.share) * self.mean + self.share * mean, (
            1 - self.share
        ) * self.variance + self.share * variance

    def keep(self, mean: Tensor, variance: Tensor) -> None:
        self.mean.copy_(mean.detach())
        self.variance.copy_(variance.detach())


class AlphaNorm(MovingNorm):
    """The source's statistics with those of the batch as a share; nothing is kept."""

    def observe(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.mix(*_statistics(x, correction=1))


class EmaNorm(MovingNorm):
    """A pass that adapts normalizes with the statistics of the batch and moves the stored ones, as in training."""

    def observe(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, unbiased = _statistics(x, correction=1)
        self.keep(*self.mix(mean, unbiased))
        return _statistics(x, correction=0)


class RobustNorm(MovingNorm):
    """RoTTA's: the stored statistics move first, and normalize then; the gradient flows through the batch's share."""

    def observe(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, variance = self.mix(*_statistics(x, correction=0))
        self.keep(mean, variance)
        return mean, variance


class MovingStatistics(Statistics):
    """The statistics of norms that `make` puts in the place of BatchNorms."""

    def __init__(self, model: nn.Module, make: Callable[[_BatchNorm, Tensor], MovingNorm]) -> None:
        super().__init__(model, "source")
        found = {name: module for name, module in model.named_modules() if isinstance(module, _BatchNorm)}
        like = next(model.parameters(), torch.empty(0))
        self.moving = {name: make(module, like) for name, module in found.items()}
        for name, module in self.moving.items():
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, module)

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Passes inside adapt the statistics."""
        for module in self.moving.values():
            module.observing = True
        try:
            yield
        finally:
            for module in self.moving.values():
                module.observing = False

    def restore_source(self) -> None:
        for module in self.moving.values():
            module.restore_source()

    def state(self) -> dict[str, Any]:
        return {key: clone({n: getattr(m, key) for n, m in self.moving.items()}) for key in ("mean", "variance")}

    def spec(self) -> dict[str, Spec]:
        means: dict[str, Spec] = {name: Array.like(m.mean) for name, m in self.moving.items()}
        variances: dict[str, Spec] = {name: Array.like(m.variance, least=0) for name, m in self.moving.items()}
        return {"mean": means, "variance": variances}

    def load(self, state: Mapping[str, Any]) -> None:
        for key in ("mean", "variance"):
            for name, module in self.moving.items():
                getattr(module, key).copy_(state[key][name])


class BnAlphaOptions(MethodOptions):
    """`alpha`: the share of the batch; with `statistics` other than "batch" there is nothing to mix."""

    alpha: Fraction = 0.1


class BnAlpha(Source):
    """Each BatchNorm takes (1 - alpha) of the source's mean and variance and alpha of the batch's."""

    name = "bn_alpha"
    Options: ClassVar[type[MethodOptions]] = BnAlphaOptions
    options: BnAlphaOptions

    def make_statistics(self) -> Statistics:
        if self.options.statistics != "batch":
            return super().make_statistics()
        alpha = self.options.alpha
        return MovingStatistics(self.model, lambda norm, like: AlphaNorm(norm, like=like, share=alpha, observing=True))


class BnEmaOptions(MethodOptions):
    """`momentum`: the share of a batch in the moving statistics; None takes each layer's own."""

    statistics: StatisticsKind = "stream"
    momentum: Fraction | None = None


class BnEma(Source):
    """The running statistics of training go on: a pass that moves them, then a prediction with them."""

    name = "bn_ema"
    Options = BnEmaOptions
    options: BnEmaOptions

    def make_statistics(self) -> Statistics:
        if self.options.statistics != "stream":
            return super().make_statistics()
        momentum = self.options.momentum
        return MovingStatistics(self.model, lambda norm, like: EmaNorm(norm, like=like, share=momentum))

    def adapt(self, images: Tensor) -> Tensor:
        before = super().adapt(images) if self.options.predict == "before" else None
        self.logits_before = before
        if isinstance(self.statistics, MovingStatistics):
            with torch.no_grad(), self.statistics.observing():
                self.counters.forwards += 1
                self.call.plain(images, self.slots_of(images, None))  # a recording could not tell it from a prediction
        return super().adapt(images) if before is None else before


def _statistics(x: Tensor, *, correction: int) -> tuple[Tensor, Tensor]:
    """Mean and variance (channels,); a single number has the variance zero."""
    variance, mean = torch.var_mean(
        x, dim=[0, *range(2, x.dim())], correction=min(correction, x.numel() // x.shape[1] - 1)
    )
    return mean, variance
