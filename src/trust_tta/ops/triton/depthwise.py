"""Depthwise convolution of channel-last maps with a shortcut and GELU, in one pass over the map."""

# mypy: ignore-errors
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from trust_tta.ops.triton.linear import gelu, gelu_slope
from trust_tta.ops.triton.tiling import ceil_div

ROWS, CHANNELS = 4, 64  # of a tile


def convolve_with_shortcut(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, gelu: bool = False, slope_times: Tensor | None = None
) -> Tensor:
    """h = x + conv(x) of x (b, h, w, c) by weight (c, 1, k, k); then GELU(h), or `slope_times` times GELU's slope at h.

    All are contiguous.
    """
    b, height, width, channels = x.shape
    y, size = torch.empty_like(x), weight.shape[2]
    columns = 16 if width > 8 else 8
    grid = (ceil_div(height, ROWS) * ceil_div(width, columns), ceil_div(channels, CHANNELS), b)
    with torch.cuda.device_of(x):
        depthwise_kernel[grid](
            x, weight.flatten(1).t().contiguous(), x if bias is None else bias,
            x if slope_times is None else slope_times, y, height, width, channels, SIZE=size, BIAS=bias is not None,
            GELU=gelu, SLOPE=slope_times is not None, EXACT=x.dtype == torch.float32,
            INTERPRETED=x.device.type == "cpu", BLOCK_H=ROWS, BLOCK_W=columns, BLOCK_C=CHANNELS, num_warps=columns // 2,
            enable_fp_fusion=True,
        )  # fmt: skip
    return y


@triton.jit
def depthwise_kernel(
    p_x, p_weight, p_bias, p_times, p_y, height, width, channels,
    SIZE: tl.constexpr, BIAS: tl.constexpr, GELU: tl.constexpr, SLOPE: tl.constexpr, EXACT: tl.constexpr,
    INTERPRETED: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """A block of channels of a tile of pixels; the weight is stored (size * size, channels)."""
    tiles = (width + BLOCK_W - 1) // BLOCK_W
    o_p = tl.arange(0, BLOCK_H * BLOCK_W)
    o_h = tl.program_id(0) // tiles * BLOCK_H + o_p // BLOCK_W
    o_w = tl.program_id(0) % tiles * BLOCK_W + o_p % BLOCK_W
    o_c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    m_c = o_c < channels
    # 64-bit before the strides: a batch of large maps has more than 2^31 elements.
    i_image = tl.program_id(2).to(tl.int64) * height * width * channels
    o_x = (o_h * width + o_w)[:, None] * channels + o_c[None, :]
    b_h = tl.zeros((BLOCK_H * BLOCK_W, BLOCK_C), dtype=tl.float32)
    for i in tl.static_range(SIZE):
        for j in tl.static_range(SIZE):
            o_row, o_column = o_h + (i - SIZE // 2), o_w + (j - SIZE // 2)
            m_p = (o_row >= 0) & (o_row < height) & (o_column >= 0) & (o_column < width)
            o_tap = o_x + ((i - SIZE // 2) * width + (j - SIZE // 2)) * channels
            b_x = tl.load(p_x + i_image + o_tap, mask=m_p[:, None] & m_c[None, :], other=0.0).to(tl.float32)
            b_w = tl.load(p_weight + (i * SIZE + j) * channels + o_c, mask=m_c, other=0.0).to(tl.float32)
            if i == SIZE // 2 and j == SIZE // 2:
                b_w += 1.0  # the shortcut
            b_h += b_x * b_w[None, :]
    if BIAS:
        b_h += tl.load(p_bias + o_c, mask=m_c, other=0.0).to(tl.float32)[None, :]
    mask = ((o_h < height) & (o_w < width))[:, None] & m_c[None, :]
    if GELU:
        b_h = gelu(b_h, EXACT, INTERPRETED)
    if SLOPE:
        b_times = tl.load(p_times + i_image + o_x, mask=mask, other=0.0).to(tl.float32)
        b_h = b_times * gelu_slope(b_h, EXACT, INTERPRETED)
    tl.store(p_y + i_image + o_x, b_h.to(p_y.dtype.element_ty), mask=mask)
