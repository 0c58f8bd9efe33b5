"""Batch normalization of channel-last maps: PyTorch's, or Triton kernels on a GPU."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trust_tta.ops.functional import HAS_TRITON
from trust_tta.ops.linear import FUSED_BACKENDS

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
MIN_ELEMENTS = 1 << 20  # elements of a map that is worth several kernels of our own: they are slower to launch
MAX_SMALL_ROWS = 1024  # pixels of all images that one kernel normalizes


class BatchNorm2d(nn.BatchNorm2d):
    """PyTorch's BatchNorm2d, computed by our kernels where `backend` allows them and they support the input."""

    backend: str = "auto"

    def forward(self, x: Tensor) -> Tensor:
        return self.with_residual(x)[1] if self.uses_kernels(x) else super().forward(x)

    def with_residual(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x and the normalized x; the backward adds their gradients in its last pass over the map."""
        if self.running_mean is None or self.running_var is None:
            return batch_norm(x, self.weight, self.bias, self.eps)
        return x, fixed_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.eps)

    def uses_kernels(self, x: Tensor) -> bool:
        """Whether kernels compute it: by the batch's statistics, or by fixed ones in a forward without gradients."""
        if self.backend not in FUSED_BACKENDS or not self.affine:
            return False
        if self.running_mean is None or self.running_var is None:
            return can_use_kernels(x) or is_small(x)
        return not self.training and not torch.is_grad_enabled() and can_use_kernels(x)


def norm_with_residual(norm: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """x and norm(x), for any norm; BatchNorm2d adds both gradients in one pass."""
    own: Any = norm
    does_more = norm._forward_hooks or norm._forward_pre_hooks or norm._modules  # hooks, an activation
    if does_more or not hasattr(norm, "with_residual") or not own.uses_kernels(x):
        return x, norm(x)
    return own.with_residual(x)


def can_use_kernels(x: Tensor) -> bool:
    """Whether the kernels support x (b, c, h, w), and it is large enough for them."""
    return x.numel() >= MIN_ELEMENTS and _fits(x)


def is_small(x: Tensor) -> bool:
    """Whether x (b, c, h, w) is small enough to be normalized by its own statistics in one kernel."""
    return x.numel() < MIN_ELEMENTS and _fits(x) and 1 < x.numel() // x.shape[1] <= MAX_SMALL_ROWS


def _fits(x: Tensor) -> bool:
    if torch.compiler.is_compiling() or not (HAS_TRITON and x.is_cuda and type(x) is Tensor and x.dtype in FLOATS):
        return False
    return x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)


def triton_norm() -> Any:
    """The kernels, imported where they are first used."""
    from trust_tta.ops.triton import batch_norm as kernels

    return kernels


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance (c,), at least float32, of the channels of x (b, c, ...)."""
    if can_use_kernels(x):
        mean, variance = triton_norm().moments(_rows(x.detach()))
        return mean, variance
    wide = x.detach().to(torch.promote_types(x.dtype, torch.float32))
    variance, mean = torch.var_mean(wide, dim=[0, *range(2, x.dim())], correction=0)
    return mean, variance


def image_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance (b, c), at least float32, of each image and channel of x (b, c, ...)."""
    wide, x = (
        torch.promote_types(x.dtype, torch.float32),
        x.detach().flatten(2) if x.dim() > 2 else x.detach()[..., None],
    )
    if not x.is_cuda:  # `torch.var_mean` takes twenty times as long there
        x = x.to(wide)
        mean = x.mean(2)
        return mean, (x - mean[..., None]).square_().mean(2)
    mean = x.mean(2, dtype=wide)  # two sums over the map, without a copy of it
    square = torch.linalg.vector_norm(x, dim=2, dtype=wide).square() / x.shape[2]
    return mean, (square - mean.square()).clamp_min(0)


def fixed_norm(
    x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """x (b, c, ...) normalized by given statistics (c,), which may have more precision than the weights."""
    weight, bias = (None if t is None else t.to(mean.dtype) for t in (weight, bias))
    if weight is None or bias is None or torch.is_grad_enabled() or not can_use_kernels(x):
        return F.batch_norm(x, mean, variance, weight, bias, eps=eps)
    return _map(triton_norm().normalize(_rows(x), mean, variance, weight, bias, eps), x)


def batch_norm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, known: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """x and x normalized by batch statistics, differentiated through them; `known`: mean and variance, if computed."""
    if known is None and not is_small(x):
        known = moments(x)
    same, y = _BatchNorm.apply(x, weight, bias, known, eps)  # type: ignore[no-untyped-call]
    return same, y


def follow_stream(
    batch: tuple[Tensor, Tensor, Tensor], stream: Any, affine: tuple[Tensor, Tensor],
    mixing: tuple[float, float] | None, *, eps: float, half_life: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Weight and bias (c,) that turn a norm by the moments of the `batch` into one by the stream's statistics.

    `batch`: mean and variance (c,), and the variance () between its images. `stream`, a `triton_norm.StreamStatistics`,
    is moved by the batch. `mixing`: k^2 and T of `source_mixing.py`; None: do not mix with the source.
    """
    given = (*affine, batch, stream, mixing, eps, half_life)
    weight, bias = _FollowStream.apply(*given)  # type: ignore[no-untyped-call]
    return weight, bias


def _rows(x: Tensor) -> Tensor:
    """(b, c, h, w), channel-last in memory, as (pixels, c)."""
    return x.permute(0, 2, 3, 1).reshape(-1, x.shape[1])


def _map(rows: Tensor, like: Tensor) -> Tensor:
    """(pixels, c) as (b, c, h, w), channel-last in memory."""
    b, c, h, w = like.shape
    # `data`, not a view: autograd forbids changing a view among several outputs in place, as `out += x` does.
    return rows.view(b, h, w, c).permute(0, 3, 1, 2).data


class _BatchNorm(torch.autograd.Function):
    """By given moments, or, with None, by those that one kernel computes of a small map."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, known: tuple[Tensor, Tensor] | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        if known is None:
            y, mean, variance = triton_norm().normalize_small(_rows(x), weight, bias, eps)
        else:
            mean, variance = known
            y = triton_norm().normalize(_rows(x), mean, variance, weight, bias, eps)
        ctx.save_for_backward(x, weight, mean, variance)
        ctx.small, ctx.eps = known is None, eps
        ctx.set_materialize_grads(False)
        return x, _map(y, x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dx: Tensor | None, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return dx, *[None] * 4
        x, weight, mean, variance = ctx.saved_tensors
        kernels, rows, saved = triton_norm(), _rows(x), (mean, variance, weight)
        dy, add = _rows(dy).contiguous(), None if dx is None else _rows(dx).contiguous()  # dy of a sum repeats a number
        down = None
        if ctx.small:
            down, dbias, dweight = kernels.small_gradients(dy, rows, saved, ctx.eps, add=add)
        else:
            dbias, dweight = kernels.sums(dy, rows, mean, variance, ctx.eps)
            if ctx.needs_input_grad[0]:
                down = kernels.input_gradient(dy, rows, saved, (dbias, dweight), ctx.eps, add=add)
        dx = None if down is None else _map(down, x)
        return dx, dweight.to(weight.dtype), dbias.to(weight.dtype), None, None


class _FollowStream(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, bias: Tensor, batch: Any, stream: Any, mixing: Any, eps: float, half_life: float
    ) -> tuple[Tensor, Tensor]:
        made = triton_norm().follow_stream(batch, stream, (weight, bias), mixing, eps, -1 / half_life)
        ctx.save_for_backward(weight, made[2])
        return made[0], made[1]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dweight: Tensor, dbias: Tensor) -> tuple[Tensor | None, ...]:
        weight, (ratio, offset) = ctx.saved_tensors
        return (dweight * ratio + dbias * offset).to(weight.dtype), dbias.to(weight.dtype), *[None] * 5
