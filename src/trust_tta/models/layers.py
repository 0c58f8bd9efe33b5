"""Layers on maps (b, c, h, w) whose parameters keep upstream's names and shapes.

Maps are channel-last in memory: a linear layer or a LayerNorm over the channels then needs no copy.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trust_tta.models.config import VMambaConfig
from trust_tta.ops import layer_norm as layer_norm_ops
from trust_tta.ops import linear as linear_ops
from trust_tta.ops.batch_norm import BatchNorm2d
from trust_tta.ops.convolution import StridedConv2d
from trust_tta.ops.cpu import onednn
from trust_tta.ops.linear import FUSED_BACKENDS


class Linear2d(nn.Linear):
    """A linear layer over the channels of (b, c, h, w); the weight is stored (out, in)."""

    cast_parameters: ClassVar[tuple[str, ...]] = ("weight", "bias")
    backend: str = "auto"

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """The output (b, out, h, w), plus `residual`."""
        return linear_of_pixels(x, self.weight, self.bias, residual, self.backend)


class PointwiseConv2d(nn.Conv2d):
    """1x1 convolution; on a GPU, computed as a linear layer. The weight is stored (out, in, 1, 1)."""

    backend: str = "auto"

    def __init__(self, channels: int, out_channels: int, *, bias: bool = True) -> None:
        super().__init__(channels, out_channels, 1, bias=bias)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """The output (b, out, h, w), plus `residual`."""
        if x.is_cuda and not torch.compiler.is_compiling():
            return linear_of_pixels(x, self.weight.flatten(1), self.bias, residual, self.backend)
        y = super().forward(x)
        return y if residual is None else residual + y


def linear_of_pixels(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, backend: str) -> Tensor:
    """x (b, k, h, w) times `weight` (n, k) over its channels, plus `bias` (n,) and `residual` (b, n, h, w)."""
    x, residual = x.permute(0, 2, 3, 1), None if residual is None else residual.permute(0, 2, 3, 1)
    usable = backend in FUSED_BACKENDS and linear_ops.can_use_kernels(x, len(weight), residual)
    call = linear_ops.linear
    if backend in FUSED_BACKENDS and onednn.takes(x, weight):
        call = onednn.linear
    # In half precision the library is as fast, unless something follows.
    elif usable and (residual is not None or linear_ops.autocast_dtype(x) == torch.float32):
        call = linear_ops.fused_linear
    return call(x, weight, bias, residual).permute(0, 3, 1, 2)


class LayerNorm2d(nn.LayerNorm):
    """Layer normalization over the channels of (b, c, h, w); on a GPU, in the dtype of the map."""

    backend: str = "auto"

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x normalized, plus `residual` (b, c, h, w)."""
        if self.uses_kernels(x):
            return layer_norm_ops.layer_norm(x, self.weight, self.bias, self.eps, residual)[1]
        y = super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return y if residual is None else residual + y

    def with_residual(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x and the normalized x; the backward adds their gradients in one pass."""
        return layer_norm_ops.layer_norm(x, self.weight, self.bias, self.eps)

    def uses_kernels(self, x: Tensor) -> bool:
        return self.weight is not None and self.bias is not None and layer_norm_ops.can_use_kernels(x, self.backend)


def make_norm(norm: str, channels: int) -> nn.Module:
    """LayerNorm2d for "layer", BatchNorm2d for "batch"."""
    return BatchNorm2d(channels) if norm == "batch" else LayerNorm2d(channels)


class StochasticDepth(nn.Module):
    """Drop a residual branch for whole images at random, in training mode only."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    @property
    def drops(self) -> bool:
        return self.training and self.rate > 0

    def forward(self, x: Tensor) -> Tensor:
        if not self.drops:
            return x
        keep = x.new_empty(x.shape[0], *(1,) * (x.dim() - 1)).bernoulli_(1 - self.rate)
        return x * keep / (1 - self.rate)

    def extra_repr(self) -> str:
        return f"rate={self.rate:g}"


class Mlp(nn.Module):
    """Two linear layers over the channels with GELU between them."""

    backend: str = "auto"

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = Linear2d(dim, hidden)
        self.fc2 = Linear2d(hidden, dim)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """The output (b, dim, h, w), plus `residual`."""
        by_onednn = self._is_plain() and onednn.takes(x.permute(0, 2, 3, 1), self.fc1.weight)
        if not by_onednn and not self.uses_kernels(x, residual):
            return self.fc2(F.gelu(self.fc1(x)), residual)
        given = None if residual is None else residual.permute(0, 2, 3, 1)
        weights = self.fc1.weight, self.fc1.bias, self.fc2.weight, self.fc2.bias
        call = onednn.mlp if by_onednn else linear_ops.fused_mlp
        return call(x.permute(0, 2, 3, 1), *weights, given).permute(0, 3, 1, 2)

    def _is_plain(self) -> bool:
        """Whether both layers may be computed at once."""
        watched = any(type(layer) is not Linear2d or layer._forward_hooks for layer in (self.fc1, self.fc2))
        return self.backend in FUSED_BACKENDS and not watched

    def uses_kernels(self, x: Tensor, residual: Tensor | None) -> bool:
        if not self._is_plain():
            return False
        given = None if residual is None else residual.permute(0, 2, 3, 1)
        return linear_ops.can_use_kernels(x.permute(0, 2, 3, 1), self.fc2.out_features, given)


class PatchMerging(nn.Module):
    """Halve the resolution: concatenate the four pixels of each 2x2 cell, normalize, project."""

    def __init__(self, dim: int, out_dim: int, norm: str) -> None:
        super().__init__()
        self.reduction = Linear2d(4 * dim, out_dim, bias=False)
        self.norm = make_norm(norm, 4 * dim)

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(x, (0, x.shape[3] % 2, 0, x.shape[2] % 2))
        cells = [x[:, :, i::2, j::2] for j in (0, 1) for i in (0, 1)]
        return self.reduction(self.norm(torch.cat(cells, dim=1)))


def make_downsample(config: VMambaConfig, i: int) -> nn.Module:
    """From stage i to the next, at half the resolution; nothing after the last."""
    if i + 1 == len(config.dims):
        return nn.Identity()
    dim, out_dim = config.dims[i : i + 2]
    if config.merging_downsample:
        return PatchMerging(dim, out_dim, config.norm)
    conv = StridedConv2d(dim, out_dim, 3, stride=2, padding=1)
    return nn.Sequential(nn.Identity(), conv, nn.Identity(), make_norm(config.norm, out_dim))


@torch.no_grad()
def reset_steps(weight: Tensor, bias: Tensor) -> None:
    """Mamba's initial projection (.., c, r) of the step sizes, which its bias makes log-uniform in [0.001, 0.1]."""
    bound = weight.shape[-1] ** -0.5
    nn.init.uniform_(weight, -bound, bound)
    steps = torch.exp(torch.rand_like(bias) * math.log(100) + math.log(1e-3)).clamp(min=1e-4)
    bias.copy_(steps + torch.log(-torch.expm1(-steps)))  # the inverse of softplus


def initialize_linear(module: nn.Module) -> None:
    """Upstream's initialization of linear layers, for `Module.apply`."""
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
