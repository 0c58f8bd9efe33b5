"""Linear layers over the channels of maps, fused with GELU and residual by Triton kernels on a GPU.

In float32 the kernels multiply on tensor cores, each factor as a sum of two numbers that those take (3 x TF32): faster
than any library's float32, with its error. Where the caller allows TF32 itself, or with `backend="reference"`, they
are not used.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trust_tta.ops.functional import HAS_TRITON

FUSED_BACKENDS = ("auto", "triton", "cpu")  # a layer with another backend is PyTorch's

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
MIN_ELEMENTS = 132 * 128 * 128  # elements of a result for which kernels fill a large GPU
MIN_ELEMENTS_FLOAT32 = 1 << 14  # in float32, where the library has no tensor cores, smaller tiles are worth it


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None) -> Tensor:
    """x (b, h, w, k) @ weight (n, k).T + bias (n,), plus `residual` (b, h, w, n)."""
    y = F.linear(x, weight, bias)
    return y if residual is None else residual + y


def fused_linear(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None) -> Tensor:
    """`linear` by Triton kernels."""
    given = _cast(_rows(x), weight, bias, None if residual is None else _rows(residual))
    return _Linear.apply(*given).view(*x.shape[:-1], -1)  # type: ignore[no-untyped-call]


def fused_mlp(
    x: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor, residual: Tensor | None = None
) -> Tensor:
    """Two layers (n, k) and (k, n) with GELU between them, by kernels, plus `residual`; x (b, h, w, k).

    The hidden map is recomputed in the backward.
    """
    given = _cast(_rows(x), weight1, bias1, weight2, bias2, None if residual is None else _rows(residual))
    return _Mlp.apply(*given).view(x.shape)  # type: ignore[no-untyped-call]


def can_use_kernels(x: Tensor, columns: int, residual: Tensor | None = None) -> bool:
    """Whether the kernels support x (b, h, w, k), and a product of `columns` columns is large enough for them."""
    if torch.compiler.is_compiling() or not (HAS_TRITON and x.is_cuda and type(x) is Tensor and x.dtype in FLOATS):
        return False
    dtype = autocast_dtype(x)
    least = MIN_ELEMENTS_FLOAT32 if dtype == torch.float32 else MIN_ELEMENTS
    if not x.is_contiguous() or x.numel() // x.shape[-1] * columns < least:
        return False
    if residual is not None and (residual.dtype != dtype or not residual.is_contiguous()):
        return False
    return dtype != torch.float32 or not allowed_tf32()[0]


def allowed_tf32() -> tuple[bool, bool]:
    """Whether the user allows TF32 in matrix products, and in convolutions; libraries are faster then."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    if hasattr(cudnn, "conv"):  # reading the old flags fails once the new ones were set
        return matmul.fp32_precision == "tf32", cudnn.conv.fp32_precision == "tf32"
    return matmul.allow_tf32, cudnn.allow_tf32


def autocast_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which products of x are computed on a GPU: that of autocast, or its own."""
    return torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype


def _cast(x: Tensor, *others: Tensor | None) -> list[Tensor | None]:
    """The tensors in the dtype that autocast would choose."""
    dtype = autocast_dtype(x)
    return [None if t is None else t.to(dtype) for t in (x, *others)]


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _kernels() -> Any:
    from trust_tta.ops.triton import linear as triton_linear

    return triton_linear


def _narrow_mlp(x: Tensor, weight1: Tensor) -> Any:
    """The module whose kernels compute both layers at once, or None where they do not support these sizes."""
    if x.dtype == torch.float32:
        return None
    from trust_tta.ops.triton import mlp as triton_mlp

    return triton_mlp if triton_mlp.supports(weight1.shape[1], weight1.shape[0]) else None


def _input_gradient(dy: Tensor, weight: Tensor) -> Tensor:
    """dy (m, n) @ weight (n, k)."""
    if dy.dtype != torch.float32:
        return dy @ weight
    kernels = _kernels()
    return kernels.product(dy, kernels.prepare(weight, rows=len(dy), transposed=True))


def _hidden(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """GELU(x (m, k) @ weight (n, k).T + bias); in half precision the library's own is faster, and as exact as ours."""
    if x.is_cuda and x.dtype != torch.float32:
        return torch._addmm_activation(bias, x, weight.T, use_gelu=True)
    kernels = _kernels()
    return kernels.product(x, kernels.prepare(weight, rows=len(x)), bias, gelu=True)


def _weight_gradient(dy: Tensor, x: Tensor) -> Tensor:
    """dy (m, n).T @ x (m, k)."""
    if dy.dtype != torch.float32 or _kernels().is_small(len(dy), dy.shape[1]):
        return dy.T @ x
    return _kernels().weight_gradient(dy, x)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        kernels = _kernels()
        return kernels.product(x, kernels.prepare(weight, rows=len(x)), bias, add=residual)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wanted, dy = ctx.needs_input_grad, dy.contiguous()
        return (
            _input_gradient(dy, weight) if wanted[0] else None,
            _weight_gradient(dy, x) if wanted[1] else None,
            dy.sum(0) if wanted[2] else None,
            dy if wanted[3] else None,
        )


class _Mlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor, residual: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight1, bias1, weight2)
        kernels, whole = _kernels(), _narrow_mlp(x, weight1)
        y: Tensor
        if whole is not None:
            y = whole.mlp(x, weight1, bias1, weight2, bias2, residual)
            return y
        hidden = _hidden(x, weight1, bias1)
        if x.dtype != torch.float32:  # the library's product is faster than ours
            y = F.linear(hidden, weight2, bias2)
            return y if residual is None else y.add_(residual)
        y = kernels.product(hidden, kernels.prepare(weight2, rows=len(x)), bias2, add=residual)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight1, bias1, weight2 = ctx.saved_tensors
        wanted, dy, kernels = ctx.needs_input_grad, dy.contiguous(), _kernels()
        whole = _narrow_mlp(x, weight1)
        if whole is not None and wanted[0] and not any(wanted[1:5]):
            dx = whole.mlp_input_gradient(dy, x, weight1, bias1, weight2)
            return dx, None, None, None, None, dy if wanted[5] else None
        first = kernels.prepare(weight1, rows=len(x))
        second = kernels.prepare(weight2, rows=len(x), transposed=True)
        dx = dweight1 = dbias1 = dweight2 = hidden = None
        if x.dtype != torch.float32:
            hidden = F.linear(x, weight1, bias1)
        elif kernels.is_small(len(x), len(weight1)):
            hidden = kernels.product(x, first, bias1)
        if any(wanted[:3]):
            if hidden is None:
                dhidden = kernels.hidden_gradient(dy, x, first, bias1, second)
            else:
                dhidden = kernels.product(dy, second, slope_at=hidden)
            dx = _input_gradient(dhidden, weight1) if wanted[0] else None
            dweight1 = _weight_gradient(dhidden, x) if wanted[1] else None
            dbias1 = dhidden.sum(0) if wanted[2] else None
        if wanted[3]:
            active = kernels.product(x, first, bias1, gelu=True) if hidden is None else F.gelu(hidden)
            dweight2 = _weight_gradient(dy, active)
        return dx, dweight1, dbias1, dweight2, dy.sum(0) if wanted[4] else None, dy if wanted[5] else None
