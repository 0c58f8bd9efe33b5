"""Which statistics the BatchNorms of a network normalize with: those of the batch, of the stream, or of training.

"stream" follows the batches since the reset: each norm keeps a moving mean and variance. An adapting pass takes the
values of the moving statistics and the gradient of the batch's (test-time batch renormalization, as in Zhao et al.,
"DELTA", ICLR 2023); a prediction normalizes as in evaluation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from trust_tta.methods.state import Array, Number, Spec, clone

StatisticsKind: TypeAlias = Literal["batch", "stream", "source"]

HALF_LIFE = 640.0  # images after which half of the memory is new
SOURCE_WORTH = 32.0  # images that the statistics of training count for at the beginning


class Statistics:
    """What the norms of one network do, and what they remember.

    `observing_without_grad`: also passes without gradients adapt, for methods that adapt no weights. `norm` makes the
    norms of a stream: a subclass of `StreamNorm` may follow it in another way.
    """

    def __init__(
        self,
        model: nn.Module,
        kind: StatisticsKind,
        *,
        observing_without_grad: bool = False,
        half_life: float = HALF_LIFE,
        source_worth: float = SOURCE_WORTH,
        norm: type[StreamNorm] | None = None,
    ) -> None:
        found = {name: module for name, module in model.named_modules() if isinstance(module, _BatchNorm)}
        self.kind, self.half_life = kind, half_life
        self.of_batches = kind == "batch" and bool(found)  # whether a batch is normalized by itself alone
        self.norms: dict[str, StreamNorm] = {}
        if kind == "batch":
            use_batch_statistics(model)
        elif kind == "stream":
            for name, module in found.items():
                stream = (norm or StreamNorm)(module, observing_without_grad=observing_without_grad)
                self.norms[name] = stream
                parent, _, leaf = name.rpartition(".")
                setattr(model.get_submodule(parent), leaf, stream)
        known = all(n.source_mean is not None for n in self.norms.values())
        self.source_worth = source_worth if known else 0.0
        self.images = self.source_worth

    def begin(self, images: int) -> None:
        """A batch of so many images comes; passes over it, however many, change the memory once."""
        if self.norms:
            norms = self.norms.values()
            torch._foreach_copy_([n.memory_mean for n in norms], [n.mean for n in norms])
            torch._foreach_copy_([n.memory_variance for n in norms], [n.variance for n in norms])
            shares = [n.share for n in norms]
            torch._foreach_zero_(shares)
            torch._foreach_add_(shares, self.share_of(images))
            self.images += images

    def share_of(self, images: int) -> float:
        """What a batch counts for: its part of a plain average at first, then that of a half-life."""
        return max(images / (self.images + images), 1 - math.pow(0.5, images / self.half_life))

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Passes inside are predictions, whatever the mode of gradients: the memory stays."""
        for module in self.norms.values():
            module.observing = False
        try:
            yield
        finally:
            for module in self.norms.values():
                module.observing = True

    def restore_source(self) -> None:
        self.images = self.source_worth
        for module in self.norms.values():
            module.restore_source()

    def state(self) -> dict[str, Any]:
        if self.kind != "stream":
            return {}
        means = {name: module.mean for name, module in self.norms.items()}
        variances = {name: module.variance for name, module in self.norms.items()}
        return {"images": self.images, "mean": clone(means), "variance": clone(variances)}

    def spec(self) -> dict[str, Spec]:
        if self.kind != "stream":
            return {}
        means: dict[str, Spec] = {name: Array.like(module.mean) for name, module in self.norms.items()}
        variances: dict[str, Spec] = {name: Array.like(module.variance, least=0) for name, module in self.norms.items()}
        return {"images": Number(float, least=0), "mean": means, "variance": variances}

    def load(self, state: Mapping[str, Any]) -> None:
        if self.kind == "stream":
            self.images = state["images"]
            for name, module in self.norms.items():
                module.mean.copy_(state["mean"][name])
                module.variance.copy_(state["variance"][name])


class StreamNorm(nn.Module):
    """A BatchNorm, over the same weights, that normalizes with moving statistics (channels,).

    `memory_mean`, `memory_variance`: as the present batch found them; `mean`, `variance`: with the last pass over it.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    memory_mean: Tensor
    memory_variance: Tensor
    mean: Tensor
    variance: Tensor
    share: Tensor

    def __init__(self, norm: _BatchNorm, *, observing_without_grad: bool) -> None:
        super().__init__()
        self.register_parameter("weight", norm.weight)
        self.register_parameter("bias", norm.bias)
        self.eps, self.observing, self.observing_without_grad = norm.eps, True, observing_without_grad
        self.source_mean, self.source_variance = norm.running_mean, norm.running_var
        like = next((t for t in (norm.running_mean, norm.weight) if t is not None), torch.zeros(norm.num_features))
        for name in ("memory_mean", "memory_variance", "mean", "variance"):
            self.register_buffer(name, torch.zeros_like(like, requires_grad=False), persistent=False)
        self.register_buffer("share", torch.zeros((), dtype=like.dtype, device=like.device), persistent=False)
        self.train(False)
        self.restore_source()

    def restore_source(self) -> None:
        with torch.no_grad():
            for mean in (self.memory_mean, self.mean):
                mean.zero_() if self.source_mean is None else mean.copy_(self.source_mean)
            for variance in (self.memory_variance, self.variance):
                variance.fill_(1) if self.source_variance is None else variance.copy_(self.source_variance)

    def forward(self, x: Tensor) -> Tensor:
        """(n, channels, ...) in and out."""
        if not (self.observing and (torch.is_grad_enabled() or self.observing_without_grad)):
            return F.batch_norm(x, self.mean, self.variance, self.weight, self.bias, eps=self.eps)
        mean, variance = self.observe(x)
        if not torch.is_grad_enabled():
            return F.batch_norm(x, self.mean, self.variance, self.weight, self.bias, eps=self.eps)
        deviation = (self.variance + self.eps).rsqrt()
        ratio, offset = (variance + self.eps).sqrt() * deviation, (mean - self.mean) * deviation
        weight = ratio if self.weight is None else self.weight * ratio
        bias = offset if self.weight is None else self.weight * offset
        bias = bias if self.bias is None else self.bias + bias
        return torch.batch_norm(x, weight, bias, None, None, True, 0.0, self.eps, torch.backends.cudnn.enabled)

    @torch.no_grad()
    def observe(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Move the statistics by the batch's share; its own mean and variance (channels,)."""
        axes = [0, *range(2, x.dim())]
        variance, mean = torch.var_mean(x.detach().to(self.mean.dtype), dim=axes, correction=0)
        share = self.share_of(mean, variance)
        torch.lerp(self.memory_mean, mean, share, out=self.mean)
        torch.lerp(self.memory_variance, variance, share, out=self.variance)
        return mean, variance

    def share_of(self, mean: Tensor, variance: Tensor) -> Tensor:
        """What the batch counts for, () or (channels,); a subclass may look at its statistics."""
        del mean, variance
        return self.share


def use_batch_statistics(model: nn.Module) -> None:
    """Normalize with the statistics of the batch at hand, in every mode; running statistics are not touched."""
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.track_running_stats = False
            module.running_mean = module.running_var = module.num_batches_tracked = None
