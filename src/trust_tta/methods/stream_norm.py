"""BatchNorm layers whose running statistics are updated at test time.

In an adapting forward, `StreamNorm` normalizes by the running statistics and differentiates through those of the batch
(test-time batch renormalization, as in Zhao et al., "DELTA", ICLR 2023); a prediction normalizes as a BatchNorm does in
evaluation mode.
"""

from __future__ import annotations

import math
from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from trust_tta.methods.state import StateModule
from trust_tta.methods.tide.constants import TIDE
from trust_tta.methods.tide.source_mixing import mix_statistics, stream_share
from trust_tta.ops.batch_norm import (
    batch_norm,
    can_use_kernels,
    fixed_norm,
    follow_stream,
    image_moments,
    moments,
    triton_norm,
)


class AdaptiveNorm(StateModule):
    """A BatchNorm with the affine parameters of `norm`, whose running statistics start at those of the source.

    `mean`, `variance` (channels,): running statistics. `source_mean`, `source_variance` (channels,): those of training,
    0 and 1 where the network keeps none. `updating`: forwards update the running statistics, those without gradients
    only if `updating_without_grad`. Subclasses implement `normalize`.
    """

    STATE: ClassVar[tuple[str, ...]] = ("mean", "variance")
    LIMITS = {"mean": {}, "group_mean": {}}  # noqa: RUF012
    weight: nn.Parameter | None
    bias: nn.Parameter | None
    mean: Tensor
    variance: Tensor
    source_mean: Tensor
    source_variance: Tensor

    def __init__(self, norm: _BatchNorm, like: Tensor, *, updating: bool = False) -> None:
        super().__init__()
        self.register_parameter("weight", norm.weight)
        self.register_parameter("bias", norm.bias)
        self.eps, self.updating, self.updating_without_grad = norm.eps, updating, False
        # timm's BatchNormAct holds a dropout and an activation, which it applies after the norm.
        self.activation = nn.Sequential(*norm.children()) if any(True for _ in norm.children()) else None
        self.has_source = norm.running_mean is not None and norm.running_var is not None
        like = next((t for t in (norm.running_mean, norm.weight) if t is not None), like)
        like = like.to(torch.promote_types(like.dtype, torch.float32))  # half precision would lose small updates
        mean, variance = norm.running_mean, norm.running_var
        zeros, ones = like.new_zeros(norm.num_features), like.new_ones(norm.num_features)
        self.register_buffer("source_mean", zeros if mean is None else mean.to(like.dtype), persistent=False)
        self.register_buffer("source_variance", ones if variance is None else variance.to(like.dtype), persistent=False)
        for name in self.STATE:
            value = zeros if name in ("mean", "variance") else like.new_zeros(())
            self.register_buffer(name, value.clone(), persistent=False)
        self.train(False)

    @torch.no_grad()
    def restore_source(self) -> None:
        self.mean.copy_(self.source_mean)
        self.variance.copy_(self.source_variance)

    def forward(self, x: Tensor) -> Tensor:
        """(n, channels, ...) in and out."""
        normal = self.normalize(x, updating=self.updating and (torch.is_grad_enabled() or self.updating_without_grad))
        return normal if self.activation is None else self.activation(normal)

    def normalize(self, x: Tensor, *, updating: bool) -> Tensor:
        """x (n, channels, ...), normalized; `updating` updates the running statistics first."""
        raise NotImplementedError

    def prediction_statistics(self) -> tuple[Tensor, Tensor]:
        """The mean and the variance (channels,) that a prediction normalizes with."""
        return self.mean, self.variance


class StreamNorm(AdaptiveNorm):
    """A BatchNorm that normalizes by running statistics of the stream, mixed with the source's.

    `mean`, `variance` (channels,): running statistics, the present batch included; `images` (): their effective number
    of images; `image_variance` (): variance of the standard moments between images; `share` (): proportion of the
    stream in the mixture with the source (`tide/source_mixing.py`). `previous_*`: the same before the present batch, so
    that several forwards over one batch count once. `group_*` (clusters, ...): the same for each domain of a mixed
    stream; `groups` (n,): the domain of each image of the batch, or None. Set per batch by `Statistics`: `count` (),
    images of the batch; `samples` (), weight of each image; `batch_weight` (), momentum.
    """

    STATE = ("mean", "variance", "images", "image_variance", "share")
    GROUP_STATE = tuple(f"group_{name}" for name in STATE)
    images: Tensor
    share: Tensor
    image_variance: Tensor
    previous_images: Tensor
    count: Tensor
    samples: Tensor
    batch_weight: Tensor
    group_mean: Tensor
    group_variance: Tensor
    group_images: Tensor
    group_image_variance: Tensor
    group_share: Tensor
    previous_group_images: Tensor

    def __init__(
        self, norm: _BatchNorm, like: Tensor, *, updating_without_grad: bool = False, mix_source: bool = True
    ) -> None:
        super().__init__(norm, like, updating=True)
        self.updating_without_grad = updating_without_grad
        self.mix_source = mix_source and self.has_source
        self.groups: Tensor | None = None
        self.trust = 1.0  # factor of the stream's share
        for name, group_name in zip(self.STATE, self.GROUP_STATE, strict=True):
            value = getattr(self, name)
            self.register_buffer(group_name, value.expand(TIDE.clusters, *value.shape).clone(), persistent=False)
        for name in (*self.STATE, *self.GROUP_STATE):
            self.register_buffer(f"previous_{name}", getattr(self, name).clone(), persistent=False)
        for name in ("count", "samples", "batch_weight"):
            self.register_buffer(name, torch.ones_like(self.images), persistent=False)

    @torch.no_grad()
    def restore_source(self) -> None:
        super().restore_source()
        self.images.zero_()
        self.image_variance.zero_()
        self.share.fill_(not self.mix_source)
        for name in self.STATE:
            getattr(self, f"previous_{name}").copy_(getattr(self, name))
        self.restore_groups()

    @torch.no_grad()
    def restore_groups(self) -> None:
        """Reset the statistics of each domain to the source's."""
        self.group_mean.copy_(self.source_mean)
        self.group_variance.copy_(self.source_variance)
        self.group_images.zero_()
        self.group_image_variance.zero_()
        self.group_share.fill_(not self.mix_source)

    def normalize(self, x: Tensor, *, updating: bool) -> Tensor:
        if self.groups is not None:
            return self._normalize_groups(x, self.groups.repeat(len(x) // len(self.groups)), updating=updating)
        if self.uses_kernels(x):
            return self.with_residual(x)[1]
        if updating:
            with torch.no_grad():
                batch_mean, batch_variance = self._update(*image_moments(x.to(self.mean.dtype)))
        mean, variance = self.prediction_statistics()
        if not updating or not torch.is_grad_enabled():
            return fixed_norm(x, mean, variance, self.weight, self.bias, self.eps)
        scale = (variance + self.eps).rsqrt()
        ratio, offset = (batch_variance + self.eps).sqrt() * scale, (batch_mean - mean) * scale
        weight = ratio if self.weight is None else self.weight * ratio
        bias = offset if self.weight is None else self.weight * offset
        bias = bias if self.bias is None else self.bias + bias
        return torch.batch_norm(x, weight, bias, None, None, True, 0.0, self.eps, torch.backends.cudnn.enabled)

    def uses_kernels(self, x: Tensor) -> bool:
        """Whether `with_residual` computes an adapting forward of x (n, channels, ...)."""
        plain = self.updating and self.groups is None and self.trust == 1
        if not (plain and torch.is_grad_enabled() and can_use_kernels(x)):
            return False
        tensors = (self.mean, self.weight, self.bias)
        return self.has_source and all(t is not None and t.dtype == torch.float32 for t in tensors)

    def with_residual(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x and the normalized x of an adapting forward, by Triton kernels; the backward adds both gradients."""
        batch = moments(x)
        image_variance = self.image_variance
        if self.mix_source:
            with torch.no_grad():
                image_variance = self.standard_moments(*image_moments(x)).var(1, correction=0).mean()
        previous = (f"previous_{name}" for name in self.STATE[:4])
        names = (*previous, "count", "samples", *self.STATE, "source_mean", "source_variance")
        weight, bias = follow_stream(
            (*batch, image_variance),
            triton_norm().StreamStatistics(*(getattr(self, name) for name in names)),
            (cast(Tensor, self.weight), cast(Tensor, self.bias)),
            (TIDE.standard_errors**2, TIDE.clean_distance) if self.mix_source else None,
            eps=self.eps,
            half_life=TIDE.stream_memory,
        )
        return batch_norm(x, weight, bias, self.eps, batch)

    def _normalize_groups(self, x: Tensor, groups: Tensor, *, updating: bool) -> Tensor:
        """x (n, channels, ...), each image normalized by the statistics of its domain in `groups` (n,)."""
        shape = (len(x), -1, *[1] * (x.dim() - 2))
        batch = self._update_groups(x, groups) if updating else None
        mean, variance = self.prediction_statistics("group_")
        mean, scale = mean[groups], (variance[groups] + self.eps).rsqrt()
        if batch is not None and torch.is_grad_enabled():  # values of the running statistics, gradients of the batch's
            batch_mean, batch_scale = batch[0][groups], (batch[1][groups] + self.eps).rsqrt()
            normal = (x - batch_mean.view(shape)) * batch_scale.view(shape)
            normal = normal * (scale / batch_scale).detach().view(shape)
            normal = normal + ((batch_mean - mean) * scale).detach().view(shape)
        else:
            normal = (x - mean.view(shape)) * scale.view(shape)
        normal = normal if self.weight is None else normal * self.weight.view(-1, *shape[2:])
        return (normal if self.bias is None else normal + self.bias.view(-1, *shape[2:])).to(x.dtype)

    @torch.no_grad()
    def prediction_statistics(self, prefix: str = "") -> tuple[Tensor, Tensor]:
        """Mean and variance (channels,) of the mixture of stream and source; with "group_", (clusters, channels)."""
        mean, variance, share = (getattr(self, prefix + name) for name in ("mean", "variance", "share"))
        if not self.mix_source:
            return mean, variance
        return mix_statistics((mean, variance), (self.source_mean, self.source_variance), share[..., None])

    def _update(self, means: Tensor, variances: Tensor) -> tuple[Tensor, Tensor]:
        """Update the running statistics by those (n, channels) of images; returns the batch's (channels,)."""
        mean = means.mean(0)
        variance = variances.mean(0) + (means - mean).square().mean(0)
        between = None
        if self.mix_source:
            middle = self.standard_moments(mean, variance)
            between = (self.standard_moments(means, variances) - middle[:, None]).square().mean()
        self._average("", (mean, variance, between), self.batch_weight, self.count / self.batch_weight)
        return mean, variance

    def _update_groups(self, x: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
        """Update the statistics of each domain by its images; returns the batch's (clusters, channels)."""
        members = F.one_hot(groups, TIDE.clusters).to(self.mean.dtype)
        averaging = members.T / members.sum(0).clamp_min(1)[:, None]
        x = x.to(self.mean.dtype).flatten(2)
        mean = averaging @ x.mean(2)
        variance = averaging @ (x - mean[groups][:, :, None]).square().mean(2)
        with torch.no_grad():
            images, between = image_moments(x), None
            if self.mix_source:
                middle = self.standard_moments(mean, variance)
                between = averaging @ (self.standard_moments(*images) - middle[:, groups]).square().mean((0, 2))
            count = members.sum(0) * self.count / len(x)
            weight = average_weight(self.previous_group_images, count)
            total = torch.where(count > 0, count / weight, self.previous_group_images)
            self._average("group_", (mean, variance, between), weight, total)
            self._update(*images)  # used when the stream stops being mixed
        return mean, variance

    def _average(
        self, prefix: str, batch: tuple[Tensor, Tensor, Tensor | None], weight: Tensor, images: Tensor
    ) -> None:
        """Update running statistics with momentum `weight` (...); then estimate the share of the stream.

        `batch`: mean and variance (..., channels), and the variance (...) between images, None where the source is not
        mixed in. `images` (...): their effective number afterwards.
        """
        names = ("mean", "variance", "image_variance")
        old_mean, old_variance, old_between = (getattr(self, f"previous_{prefix}{name}") for name in names)
        mean, variance, between = batch
        between_means = weight * (1 - weight)  # factor of the variance between two means
        pooled = torch.lerp(old_variance, variance, weight[..., None])
        pooled = pooled + between_means[..., None] * (mean - old_mean).square()
        getattr(self, f"{prefix}mean").copy_(torch.lerp(old_mean, mean, weight[..., None]))
        getattr(self, f"{prefix}variance").copy_(pooled)
        getattr(self, f"{prefix}images").copy_(images)
        if between is not None:
            moved = self.standard_moments(mean, variance) - self.standard_moments(old_mean, old_variance)
            between = torch.lerp(old_between, between, weight) + between_means * moved.square().mean((0, -1))
            getattr(self, f"{prefix}image_variance").copy_(between)
            mean, variance, images, image_variance, share = (getattr(self, prefix + name) for name in self.STATE)
            distance = self.standard_moments(mean, variance).square().mean((0, -1))
            share.copy_(stream_share(distance, image_variance, images / self.samples) * self.trust)

    def standard_moments(self, mean: Tensor, variance: Tensor) -> Tensor:
        """Means and mean squares (2, ..., channels) in units of the source, 0 where they equal it.

        Half the sum of their squares is, to second order, the Kullback-Leibler divergence from the source.
        """
        scale = 1 / (self.source_variance + self.eps)
        away = mean - self.source_mean
        return torch.stack([away * scale.sqrt(), ((variance + away.square()) * scale - 1) / math.sqrt(2)])


def average_weight(previous: Tensor, new: Tensor) -> Tensor:
    """Weight of `new` images in the exponentially decayed average with `previous` ones."""
    return torch.maximum(new / (previous + new).clamp_min(1e-6), 1 - torch.exp2(-new / TIDE.stream_memory))
