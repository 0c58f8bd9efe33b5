"""Strided convolutions as one product, where no library has a kernel for them at the device's full float32 rate."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trust_tta.scan.selective_scan import HAS_TRITON

LEAST_CHANNELS = 16  # below, the product is too thin


class StridedConv2d(nn.Conv2d):
    """A square convolution; in full float32 on a GPU the forward pass is a product over patches."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.as_product(x):
            return super().forward(x)
        y: Tensor = _Product.apply(x, self.weight, self.bias, self.stride[0], int(self.padding[0]))  # type: ignore[no-untyped-call]
        return y

    def as_product(self, x: Tensor) -> bool:
        plain = HAS_TRITON and x.is_cuda and x.dtype == torch.float32 and not torch.is_autocast_enabled("cuda")
        return plain and x.shape[1] >= LEAST_CHANNELS and not torch.compiler.is_compiling() and not _rounds_to_tf32()


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int) -> Tensor:
    """As `F.conv2d`, x (b, c, h, w), weight (out, c, k, k); the result is channel-last in memory."""
    if x.is_cuda:
        from trust_tta.models import triton_patches

        patches = triton_patches.cut_patches(x, weight.shape[2], stride, padding)
    else:
        patches = cut_patches(x, weight.shape[2], stride, padding)
    matrix = weight.permute(0, 2, 3, 1).flatten(1).T
    rows = patches.view(-1, len(matrix))
    y = rows @ matrix if bias is None else torch.addmm(bias, rows, matrix)
    return y.view(*patches.shape[:3], -1).permute(0, 3, 1, 2)


def cut_patches(x: Tensor, size: int, stride: int, padding: int) -> Tensor:
    """What a kernel sees of x (b, c, h, w) at each of its places, (b, height, width, size, size, c)."""
    padded = F.pad(x.permute(0, 2, 3, 1), (0, 0, padding, padding, padding, padding))
    return padded.unfold(1, size, stride).unfold(2, size, stride).permute(0, 1, 2, 4, 5, 3).contiguous()


class _Product(torch.autograd.Function):
    """The patches are not kept: the library's backward makes do with x, and is at the device's rate."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.stride, ctx.padding, ctx.outputs = stride, padding, None if bias is None else len(bias)
        return convolve(x, weight, bias, stride, padding)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        wanted = [ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[2]]
        stride, padding, sizes = [ctx.stride] * 2, [ctx.padding] * 2, None if ctx.outputs is None else [ctx.outputs]
        dx, dweight, dbias = torch.ops.aten.convolution_backward(
            dy, *ctx.saved_tensors, sizes, stride, padding, [1, 1], False, [0, 0], 1, wanted
        )
        return dx, dweight, dbias, None, None


def _rounds_to_tf32() -> bool:
    """Whether the caller lets products or convolutions round their factors, for which libraries are fast."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    if hasattr(cudnn, "conv"):  # the older names refuse to answer where the newer were used
        return "tf32" in (cudnn.conv.fp32_precision, matmul.fp32_precision)
    return bool(cudnn.allow_tf32 or matmul.allow_tf32)
