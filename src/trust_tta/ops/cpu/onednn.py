"""Linear layers over the channels of float32 maps on a CPU by oneDNN, faster than the BLAS that PyTorch calls.

Its operator has no derivative, so that the layers have theirs here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trust_tta.ops.cpu.native import array_fields, load_kernel
from trust_tta.ops.cpu.threads import run_tasks

SPAN = 1 << 14  # elements of a task of GELU
MIN_ELEMENTS = 1 << 24  # multiplications of a product that is worth a call
AVAILABLE = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def takes(x: Tensor, weight: Tensor) -> bool:
    """Whether oneDNN supports x (b, h, w, k) @ weight (n, k).T, and it is large enough."""
    if torch.compiler.is_compiling() or not AVAILABLE or type(x) is not Tensor or x.device.type != "cpu":
        return False
    if x.dtype != torch.float32 or weight.dtype != torch.float32 or not x.is_contiguous():
        return False
    watched = torch.is_autocast_enabled("cpu") or torch._C._functorch.peek_interpreter_stack() is not None
    return not watched and torch._C._get_mkldnn_enabled() and x.numel() * weight.shape[0] >= MIN_ELEMENTS


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None) -> Tensor:
    """`linear_ops.linear` by oneDNN."""
    return _OneDnnLinear.apply(x, weight, bias, residual)  # type: ignore[no-untyped-call]


def mlp(
    x: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor, residual: Tensor | None = None
) -> Tensor:
    """`linear_ops.fused_mlp` by oneDNN; keeps the derivative of GELU instead of the hidden map."""
    return _OneDnnMlp.apply(x, weight1, bias1, weight2, bias2, residual)  # type: ignore[no-untyped-call]


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (.., k) @ weight (n, k).T + bias."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def _weight_gradient(dy: Tensor, x: Tensor) -> Tensor:
    return dy.flatten(0, -2).T @ x.flatten(0, -2)


def _sum(dy: Tensor) -> Tensor:
    return dy.flatten(0, -2).sum(0)


def gelu_and_slope(x: Tensor, out: Tensor) -> None:
    """out = GELU(x), and x becomes its derivative there, for the backward; both contiguous float32."""
    kernel, values, results = load_kernel("gelu", x.dtype), x.view(-1), out.view(-1)

    def work(first: int, last: int) -> None:
        kernel(*array_fields(values[first * SPAN : last * SPAN], results[first * SPAN : last * SPAN]))

    run_tasks(work, -(-x.numel() // SPAN), x.numel())


class _OneDnnLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        y = _product(x, weight, bias)
        return y if residual is None else y.add_(residual)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), wanted, dy = ctx.saved_tensors, ctx.needs_input_grad, dy.contiguous()
        return (
            _product(dy, weight.T) if wanted[0] else None,
            _weight_gradient(dy, x) if wanted[1] else None,
            _sum(dy) if wanted[2] else None,
            dy if wanted[3] else None,
        )


class _OneDnnMlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor, residual: Tensor | None
    ) -> Tensor:
        hidden = _product(x, weight1, bias1)
        if any(ctx.needs_input_grad):
            active = torch.empty_like(hidden)
            gelu_and_slope(hidden, active)
            slope, kept = hidden, (ctx.needs_input_grad[1], ctx.needs_input_grad[3])
            ctx.save_for_backward(x if kept[0] else None, active if kept[1] else None, slope, weight1, weight2)
        else:
            active = torch.ops.aten.gelu_(hidden)
        y = _product(active, weight2, bias2)
        return y if residual is None else y.add_(residual)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, active, slope, weight1, weight2 = ctx.saved_tensors
        wanted, dy = ctx.needs_input_grad, dy.contiguous()
        dx = dweight1 = dbias1 = None
        if any(wanted[:3]):
            dhidden = _product(dy, weight2.T).mul_(slope)
            dx = _product(dhidden, weight1.T) if wanted[0] else None
            dweight1 = _weight_gradient(dhidden, x) if wanted[1] else None
            dbias1 = _sum(dhidden) if wanted[2] else None
        dweight2 = _weight_gradient(dy, active) if wanted[3] else None
        return dx, dweight1, dbias1, dweight2, _sum(dy) if wanted[4] else None, dy if wanted[5] else None
