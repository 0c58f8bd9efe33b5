"""Convolutions with faster paths than the library's on a GPU.

Strided ones are one matrix product (im2col) in full float32, and gradients of depthwise ones are convolutions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.grad import conv2d_input, conv2d_weight

from trust_tta.ops import linear as linear_ops
from trust_tta.ops.functional import HAS_TRITON, uses_triton
from trust_tta.ops.tensors import to_pixels

MIN_ELEMENTS = 1 << 20  # elements of a map whose gradient is worth flipping the weight
MIN_CHANNELS = 16  # with fewer, the product is too thin


class StridedConv2d(nn.Conv2d):
    """Square convolution; in full float32 on a GPU, a matrix product of patches (im2col)."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.uses_matmul(x):
            return super().forward(x)
        return _PatchMatmul.apply(x, self.weight, self.bias, self.stride[0], int(self.padding[0]))  # type: ignore[no-untyped-call]

    def uses_matmul(self, x: Tensor) -> bool:
        plain = HAS_TRITON and x.is_cuda and x.dtype == torch.float32 and not torch.is_autocast_enabled("cuda")
        return (
            plain
            and x.shape[1] >= MIN_CHANNELS
            and not torch.compiler.is_compiling()
            and not any(linear_ops.allowed_tf32())
        )


class DepthwiseConv2d(nn.Conv2d):
    """Depthwise convolution of odd size that keeps the size of the map.

    In half precision on a GPU the gradient of a large map is computed as a convolution with the flipped weight, which
    libraries do faster.
    """

    def __init__(self, channels: int, size: int, *, bias: bool) -> None:
        super().__init__(channels, channels, size, padding=size // 2, groups=channels, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        learning = torch.is_grad_enabled() and x.requires_grad and type(x) is Tensor
        if not (learning and x.is_cuda) or torch.compiler.is_compiling():
            return super().forward(x)
        low = linear_ops.autocast_dtype(x)
        if low.itemsize != 2 or x.numel() < MIN_ELEMENTS:
            return super().forward(x)
        bias = None if self.bias is None else self.bias.to(low)
        return _Depthwise.apply(x.to(low), self.weight.to(low), bias)  # type: ignore[no-untyped-call]

    def with_shortcut_and_gelu(self, x: Tensor, backend: str = "auto") -> Tensor:
        """GELU(x + the convolution of x), for maps (b, c, h, w)."""
        low = linear_ops.autocast_dtype(x) if x.is_cuda else x.dtype
        watched = self._forward_hooks or self._forward_pre_hooks
        if watched or low != x.dtype or not uses_triton(x, backend):
            return F.gelu(x + self(x))
        return _ShortcutGelu.apply(x, self.weight, self.bias)  # type: ignore[no-untyped-call]


class FirstConv2d(nn.Conv2d):
    """First convolution of the images; in half precision on a GPU, padded to 8 channels for tensor cores."""

    def forward(self, x: Tensor) -> Tensor:
        low, missing = linear_ops.autocast_dtype(x), 8 - self.in_channels
        if not x.is_cuda or low.itemsize != 2 or missing <= 0 or torch.compiler.is_compiling():
            return super().forward(x.contiguous(memory_format=torch.channels_last))
        return self.convolve_padded(x.to(low, memory_format=torch.channels_last), self.weight.to(low), missing)

    def convolve_padded(self, x: Tensor, weight: Tensor, missing: int) -> Tensor:
        """The convolution with `missing` channels more, of ones, and their weights.

        One of them brings the bias, which the library would add in another pass over the map: at the place of the
        kernel that is never outside the image.
        """
        x, weight = F.pad(x, (0, 0, 0, 0, 0, missing), value=1.0), F.pad(weight, (0, 0, 0, 0, 0, missing))
        top, left = (int(padding) for padding in self.padding)
        inside = self.kernel_size[0] > 2 * top and self.kernel_size[1] > 2 * left
        if self.bias is not None and inside:
            weight[:, self.in_channels, top, left] = self.bias
        weight = weight.contiguous(memory_format=torch.channels_last)
        return self._conv_forward(x, weight, None if inside else self.bias)


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int) -> Tensor:
    """`F.conv2d` of x (b, c, h, w) by weight (out, c, k, k); the result is channel-last in memory."""
    if x.is_cuda:
        from trust_tta.ops.triton import convolution as triton_convolution

        patches = triton_convolution.extract_patches(x, weight.shape[2], stride, padding)
    else:
        patches = extract_patches(x, weight.shape[2], stride, padding)
    return _multiply(patches.flatten(3), weight.permute(0, 2, 3, 1).flatten(1), bias).permute(0, 3, 1, 2)


def _multiply(rows: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    """Rows (b, h, w, k) @ matrix (n, k).T + bias."""
    fused = linear_ops.can_use_kernels(rows, len(matrix))
    return (linear_ops.fused_linear if fused else linear_ops.linear)(rows, matrix, bias)


def input_gradient(dy: Tensor, weight: Tensor, shape: Sequence[int], stride: int, padding: int) -> Tensor:
    """Gradient of x (b, c, h, w) on a GPU: of the patches by a matrix product, then summed over overlaps (col2im)."""
    from trust_tta.ops.triton import convolution as triton_convolution

    matrix = weight.permute(2, 3, 1, 0).flatten(0, 2).contiguous()
    dpatches = _multiply(dy.permute(0, 2, 3, 1).contiguous(), matrix, None)
    size, channels = weight.shape[2], weight.shape[1]
    return triton_convolution.sum_patches(dpatches.unflatten(3, (size, size, channels)), shape, stride, padding)


def extract_patches(x: Tensor, size: int, stride: int, padding: int) -> Tensor:
    """The patch of x (b, c, h, w) under a kernel at each output pixel, (b, height, width, size, size, c)."""
    padded = F.pad(x.permute(0, 2, 3, 1), (0, 0, padding, padding, padding, padding))
    return padded.unfold(1, size, stride).unfold(2, size, stride).permute(0, 1, 2, 4, 5, 3).contiguous()


class _PatchMatmul(torch.autograd.Function):
    """`convolve`; saves x instead of the patches, from which the library computes the gradient of the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.shape, ctx.stride, ctx.padding = x.shape, stride, padding
        return convolve(x, weight, bias, stride, padding)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        place = (ctx.stride, ctx.padding)
        dx = dweight = dbias = None
        if ctx.needs_input_grad[0] and dy.is_cuda:
            dx = input_gradient(dy, weight, ctx.shape, *place)
        elif ctx.needs_input_grad[0]:
            dx = conv2d_input(ctx.shape, weight, dy, *place)
        if ctx.needs_input_grad[1]:
            dweight = conv2d_weight(x, weight.shape, dy, *place)
        if ctx.needs_input_grad[2]:
            dbias = dy.sum((0, 2, 3))
        return dx, dweight, dbias, None, None


class _Depthwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        return F.conv2d(x, weight, bias, padding=weight.shape[2] // 2, groups=len(weight))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), wanted = ctx.saved_tensors, ctx.needs_input_grad
        padding, channels = weight.shape[2] // 2, len(weight)
        dx = F.conv2d(dy, weight.flip(2, 3), padding=padding, groups=channels) if wanted[0] else None
        dweight = None
        if wanted[1]:
            dweight = conv2d_weight(x, weight.shape, dy, padding=padding, groups=channels)
        return dx, dweight, dy.sum((0, 2, 3)) if wanted[2] else None


class _ShortcutGelu(torch.autograd.Function):
    """Saves x alone; the backward recomputes the convolution."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        from trust_tta.ops.triton.depthwise import convolve_with_shortcut

        ctx.save_for_backward(x, weight, bias)
        return convolve_with_shortcut(to_pixels(x), weight, bias, gelu=True).permute(0, 3, 1, 2)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        from trust_tta.ops.triton.depthwise import convolve_with_shortcut

        (x, weight, bias), wanted = ctx.saved_tensors, ctx.needs_input_grad
        dh = convolve_with_shortcut(to_pixels(x), weight, bias, slope_times=to_pixels(dy))
        maps = dh.permute(0, 3, 1, 2)
        dx = dweight = None
        if wanted[0]:
            dx = convolve_with_shortcut(dh, weight.flip(2, 3), None).permute(0, 3, 1, 2)
        if wanted[1]:
            groups, padding = len(weight), weight.shape[2] // 2
            dweight = conv2d_weight(x, weight.shape, maps, padding=padding, groups=groups).to(weight.dtype)
        return dx, dweight, dh.sum((0, 1, 2)).to(bias.dtype) if wanted[2] else None
