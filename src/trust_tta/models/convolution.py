"""Strided convolutions as one matrix product (im2col), faster in full float32 on a GPU than any library kernel."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trust_tta.scan.functional import HAS_TRITON

MIN_CHANNELS = 16  # with fewer, the product is too thin


class StridedConv2d(nn.Conv2d):
    """A square convolution; in full float32 on a GPU its forward pass is a matrix product of patches."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.uses_matmul(x):
            return super().forward(x)
        y: Tensor = _PatchMatmul.apply(x, self.weight, self.bias, self.stride[0], int(self.padding[0]))  # type: ignore[no-untyped-call]
        return y

    def uses_matmul(self, x: Tensor) -> bool:
        plain = HAS_TRITON and x.is_cuda and x.dtype == torch.float32 and not torch.is_autocast_enabled("cuda")
        return plain and x.shape[1] >= MIN_CHANNELS and not torch.compiler.is_compiling() and not _rounds_to_tf32()


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int) -> Tensor:
    """`F.conv2d` of x (b, c, h, w) by weight (out, c, k, k); the result is channel-last in memory."""
    if x.is_cuda:
        from trust_tta.models import triton_patches

        patches = triton_patches.extract_patches(x, weight.shape[2], stride, padding)
    else:
        patches = extract_patches(x, weight.shape[2], stride, padding)
    matrix = weight.permute(0, 2, 3, 1).flatten(1).T
    rows = patches.view(-1, len(matrix))
    y = rows @ matrix if bias is None else torch.addmm(bias, rows, matrix)
    return y.view(*patches.shape[:3], -1).permute(0, 3, 1, 2)


def extract_patches(x: Tensor, size: int, stride: int, padding: int) -> Tensor:
    """The patch of x (b, c, h, w) under a kernel at each output pixel, (b, height, width, size, size, c)."""
    padded = F.pad(x.permute(0, 2, 3, 1), (0, 0, padding, padding, padding, padding))
    return padded.unfold(1, size, stride).unfold(2, size, stride).permute(0, 1, 2, 4, 5, 3).contiguous()


class _PatchMatmul(torch.autograd.Function):
    """The patches are not kept: the library's backward needs only x, and runs at the device's full rate."""

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
    """Whether the caller allows TF32 in products or convolutions, for which libraries are fast."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    if hasattr(cudnn, "conv"):  # reading the old flags fails once the new ones were set
        return "tf32" in (cudnn.conv.fp32_precision, matmul.fp32_precision)
    return bool(cudnn.allow_tf32 or matmul.allow_tf32)
