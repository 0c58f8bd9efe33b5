"""LayerNorm over the channels of channel-last maps: PyTorch's, or Triton kernels on a GPU.

The kernels keep the dtype of the map, as batch normalization does, with statistics in float32; PyTorch's autocast would
make it float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trust_tta.ops.functional import uses_triton
from trust_tta.ops.tensors import to_pixels

MAX_CHANNELS = 4096  # that a program holds


def can_use_kernels(x: Tensor, backend: str = "auto") -> bool:
    """Whether the kernels support x (b, c, h, w)."""
    return uses_triton(x, backend) and x.dim() == 4 and x.numel() > 0 and x.shape[1] <= MAX_CHANNELS


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """x (b, c, h, w), and x normalized over c by kernels, plus `residual` (b, c, h, w).

    The backward adds the gradients of both in its pass over the map.
    """
    if residual is not None:
        residual = residual.to(x.dtype)
    same, y = _LayerNorm.apply(x, weight, bias, residual, eps)  # type: ignore[no-untyped-call]
    return same, y


def _kernels() -> Any:
    from trust_tta.ops.triton import layer_norm as kernels

    return kernels


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        add = None if residual is None else to_pixels(residual)
        y, mean, scale = _kernels().layer_norm(to_pixels(x), weight, bias, eps, add=add)
        ctx.save_for_backward(x, mean, scale, weight)
        ctx.set_materialize_grads(False)
        # `data`, not a view: autograd forbids changing a view among several outputs in place, as `out += x` does.
        return x, y.permute(0, 3, 1, 2).data

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dx: Tensor | None, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return dx, *[None] * 4
        x, mean, scale, weight = ctx.saved_tensors
        add, train = None if dx is None else to_pixels(dx), any(ctx.needs_input_grad[1:3])
        given = (to_pixels(dy), to_pixels(x), mean, scale, weight)
        down, dweight, dbias = _kernels().layer_norm_backward(*given, train=train, add=add)
        parameters = (dweight.to(weight.dtype), dbias.to(weight.dtype)) if train else (None, None)
        return down.permute(0, 3, 1, 2), *parameters, dy if ctx.needs_input_grad[3] else None, None
