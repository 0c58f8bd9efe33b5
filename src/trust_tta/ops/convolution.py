"""Convolutions that libraries are slow at on a GPU.

Strided ones are one matrix product (im2col) in full float32, and gradients of depthwise ones are convolutions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.grad import conv2d_input, conv2d_weight

from trust_tta.ops import functional
from trust_tta.ops import linear as linear_ops
from trust_tta.ops.functional import HAS_TRITON

MIN_ELEMENTS = 1 << 20  # elements of a map whose gradient is worth turning a weight
MIN_CHANNELS = 16  # with fewer, the product is too thin


class StridedConv2d(nn.Conv2d):
    """A square convolution; in full float32 on a GPU its forward pass is a matrix product of patches."""

    cast_parameters: ClassVar[tuple[str, ...]] = ("weight",)  # a norm may read the bias as it is

    def forward(self, x: Tensor) -> Tensor:
        if not self.uses_matmul(x):
            return super().forward(x)
        y: Tensor = _PatchMatmul.apply(x, self.weight, self.bias, self.stride[0], int(self.padding[0]))  # type: ignore[no-untyped-call]
        return y

    def before_bias(self, x: Tensor) -> Tensor:
        """The convolution without its bias, in half precision."""
        y: Tensor
        last, low = torch.channels_last, _low(x)
        special = self.padding_mode != "zeros" or self.dilation != (1, 1) or self.groups != 1
        learned = torch.is_grad_enabled() and self.weight.requires_grad
        if special or learned or type(x) is not Tensor or not x.is_contiguous(memory_format=last):
            y = self._conv_forward(x, self.weight, None)
            return y
        given = (x.to(low), self.weight.to(low).contiguous(memory_format=last), self.stride[0], int(self.padding[0]))
        y = _Frozen.apply(*given, _is_narrow(x, self.out_channels))  # type: ignore[no-untyped-call]
        return y

    def uses_matmul(self, x: Tensor) -> bool:
        plain = HAS_TRITON and x.is_cuda and x.dtype == torch.float32 and not torch.is_autocast_enabled("cuda")
        return plain and x.shape[1] >= MIN_CHANNELS and not torch.compiler.is_compiling() and not _rounds_to_tf32()


class DepthwiseConv2d(nn.Conv2d):
    """A convolution of each channel by itself, of odd size, that keeps the size of the map.

    In half precision on a GPU the gradient of a large map is the convolution with the weight turned around, at which
    libraries are faster.
    """

    cast_parameters: ClassVar[tuple[str, ...]] = ("weight", "bias")

    def __init__(self, channels: int, size: int, *, bias: bool) -> None:
        super().__init__(channels, channels, size, padding=size // 2, groups=channels, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        learning = torch.is_grad_enabled() and x.requires_grad and type(x) is Tensor
        if "turned" not in functional.USED or not (learning and x.is_cuda) or torch.compiler.is_compiling():
            return super().forward(x)
        low = _low(x)
        if low.itemsize != 2 or x.numel() < MIN_ELEMENTS:
            return super().forward(x)
        bias = None if self.bias is None else self.bias.to(low)
        y: Tensor = _Depthwise.apply(x.to(low), self.weight.to(low), bias)  # type: ignore[no-untyped-call]
        return y


class FirstConv2d(nn.Conv2d):
    """The convolution of images; in half precision on a GPU with channels of zeros, as tensor cores take eight."""

    cast_parameters: ClassVar[tuple[str, ...]] = ("weight",)

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_cuda or _low(x).itemsize != 2 or self.in_channels >= 8 or torch.compiler.is_compiling():
            return super().forward(x.contiguous(memory_format=torch.channels_last))
        return self._pad_and_convolve(x, self.bias)

    def before_bias(self, x: Tensor) -> Tensor:
        """The convolution without its bias, in half precision."""
        return self._pad_and_convolve(x, None)

    def _pad_and_convolve(self, x: Tensor, bias: Tensor | None) -> Tensor:
        low = _low(x)
        if bias is None and self._takes_images(x):
            from trust_tta.ops.triton import convolution as triton_convolution

            return triton_convolution.convolve(
                x.detach(), self.weight.detach(), low, self.stride[0], int(self.padding[0])
            )
        y: Tensor = self._conv_forward(_pad_channels(x, low), _pad_channels(self.weight, low), bias)
        return y

    def _takes_images(self, x: Tensor) -> bool:
        """Whether a kernel of our own convolves x as it lies: of so few channels the library does it slowly."""
        if "images" not in functional.USED or not HAS_TRITON or type(x) is not Tensor or self.padding_mode != "zeros":
            return False
        square = len({*self.kernel_size}) == len({*self.stride}) == len({*self.padding}) == 1
        if not square or self.dilation != (1, 1) or self.groups != 1 or self.weight[0].numel() > 32:
            return False
        return not (torch.is_grad_enabled() and (x.requires_grad or self.weight.requires_grad))


def _is_narrow(x: Tensor, out: int) -> bool:
    """Whether a kernel of our own convolves x in half precision: for few channels the library is slow."""
    if "narrow" not in functional.USED or not HAS_TRITON or x.numel() < MIN_ELEMENTS:
        return False
    from trust_tta.ops.triton import convolution as triton_convolution

    return triton_convolution.takes_narrow(x.shape[1], out)


def _pad_channels(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x (b, c, h, w) in `dtype` with at least eight channels, channel-last in memory."""
    plain = x.shape[1] > 8 or (torch.is_grad_enabled() and x.requires_grad)
    if "pad" in functional.USED and HAS_TRITON and x.is_cuda and type(x) in (Tensor, nn.Parameter) and not plain:
        from trust_tta.ops.triton import convolution as triton_convolution

        return triton_convolution.pad_channels(x.detach(), 8, dtype)
    padded = F.pad(x.to(dtype), (0, 0, 0, 0, 0, max(0, 8 - x.shape[1])))
    return padded.contiguous(memory_format=torch.channels_last)


def bias_can_wait(conv: StridedConv2d | FirstConv2d, x: Tensor) -> bool:
    """Whether the bias may be left to the layer that follows: here the library adds it in a slow pass of its own."""
    if "bias" not in functional.USED or not x.is_cuda or conv.bias is None or torch.compiler.is_compiling():
        return False
    if _low(x).itemsize != 2 or conv._forward_hooks or conv._forward_pre_hooks:
        return False
    return not (torch.is_grad_enabled() and conv.bias.requires_grad)


def _low(x: Tensor) -> torch.dtype:
    return torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int) -> Tensor:
    """`F.conv2d` of x (b, c, h, w) by weight (out, c, k, k); the result is channel-last in memory."""
    if x.is_cuda:
        from trust_tta.ops.triton import convolution as triton_convolution

        patches = triton_convolution.extract_patches(x, weight.shape[2], stride, padding)
    else:
        patches = extract_patches(x, weight.shape[2], stride, padding)
    rows, matrix = patches.flatten(3), _matrix(weight)
    fused = linear_ops.can_use_kernels(rows, len(matrix))
    return (linear_ops.fused_linear if fused else linear_ops.linear)(rows, matrix, bias).permute(0, 3, 1, 2)


def _matrix(weight: Tensor) -> Tensor:
    """(out, c, k, k) as the matrix (out, k * k * c) of patches."""
    return weight.permute(0, 2, 3, 1).flatten(1)


def input_gradient(dy: Tensor, weight: Tensor, shape: Sequence[int], stride: int, padding: int) -> Tensor:
    """The gradient of x (b, c, h, w) on a GPU: that of the patches as a product, summed where they overlap."""
    from trust_tta.ops.triton import convolution as triton_convolution

    rows, matrix = dy.permute(0, 2, 3, 1).contiguous(), _matrix(weight).T.contiguous()
    fused = linear_ops.can_use_kernels(rows, len(matrix))
    dpatches = (linear_ops.fused_linear if fused else linear_ops.linear)(rows, matrix, None)
    size, channels = weight.shape[2], weight.shape[1]
    return triton_convolution.sum_patches(dpatches.unflatten(3, (size, size, channels)), shape, stride, padding)


def extract_patches(x: Tensor, size: int, stride: int, padding: int) -> Tensor:
    """The patch of x (b, c, h, w) under a kernel at each output pixel, (b, height, width, size, size, c)."""
    padded = F.pad(x.permute(0, 2, 3, 1), (0, 0, padding, padding, padding, padding))
    return padded.unfold(1, size, stride).unfold(2, size, stride).permute(0, 1, 2, 4, 5, 3).contiguous()


class _PatchMatmul(torch.autograd.Function):
    """The patches are not kept: the gradient of x needs none, and for that of the weight the library takes x."""

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
        if ctx.needs_input_grad[0]:
            by = input_gradient if dy.is_cuda else _library_gradient
            dx = by(dy, weight, ctx.shape, *place)
        if ctx.needs_input_grad[1]:
            dweight = conv2d_weight(x, weight.shape, dy, *place)
        if ctx.needs_input_grad[2]:
            dbias = dy.sum((0, 2, 3))
        return dx, dweight, dbias, None, None


class _Frozen(torch.autograd.Function):
    """Convolution of x with a frozen weight, both channel-last, without saving x; `narrow`: by our own kernel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: int, padding: int, narrow: bool) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.shape, ctx.stride, ctx.padding = x.shape, stride, padding
        if not narrow:
            return F.conv2d(x, weight, None, stride, padding)
        from trust_tta.ops.triton import convolution as triton_convolution

        return triton_convolution.convolve_narrow(x, weight, stride, padding)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        # Only its shape and its layout are read.
        x = torch.empty(ctx.shape, dtype=dy.dtype, device=dy.device, memory_format=torch.channels_last)
        place = ([ctx.stride] * 2, [ctx.padding] * 2, [1, 1], False, [0, 0], 1)
        dx = torch.ops.aten.convolution_backward(dy, x, weight, None, *place, [True, False, False])[0]
        return dx, *[None] * 4


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


def _library_gradient(dy: Tensor, weight: Tensor, shape: Sequence[int], stride: int, padding: int) -> Tensor:
    dx: Tensor = conv2d_input(shape, weight, dy, stride, padding)
    return dx


def _rounds_to_tf32() -> bool:
    """Whether the caller allows TF32 in products or convolutions, for which libraries are fast."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    if hasattr(cudnn, "conv"):  # reading the old flags fails once the new ones were set
        return "tf32" in (cudnn.conv.fp32_precision, matmul.fp32_precision)
    return bool(cudnn.allow_tf32 or matmul.allow_tf32)
