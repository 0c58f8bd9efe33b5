"""im2col and col2im of channel-last maps on a CUDA device, each in one pass over the map."""

# mypy: ignore-errors
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from trust_tta.ops.triton.tiling import ceil_div


def extract_patches(x: Tensor, size: int, stride: int, padding: int) -> Tensor:
    """im2col: patches (b, height, width, size, size, c) of x (b, c, h, w)."""
    x = x.contiguous(memory_format=torch.channels_last)
    b, c, h, w = x.shape
    height, width = ((n + 2 * padding - size) // stride + 1 for n in (h, w))
    patches = x.new_empty((b, height, width, size, size, c))
    with torch.cuda.device_of(x):
        extract_patches_kernel[(b * height, ceil_div(width * size * size * c, 2048))](
            x, patches, CHANNELS=c, HEIGHT=h, WIDTH=w, OUT_HEIGHT=height, OUT_WIDTH=width, SIZE=size, STRIDE=stride,
            PADDING=padding, BLOCK=2048, enable_fp_fusion=True,
        )  # fmt: skip
    return patches


def sum_patches(patches: Tensor, shape: Sequence[int], stride: int, padding: int) -> Tensor:
    """col2im: patches (b, height, width, size, size, c) summed into a map (b, c, h, w), channel-last in memory."""
    b, c, h, w = shape
    _, height, width, size, _, _ = patches.shape
    x = patches.new_empty((b, h, w, c))
    with torch.cuda.device_of(x):
        sum_patches_kernel[(b * h, ceil_div(w * c, 1024))](
            patches, x, CHANNELS=c, HEIGHT=h, WIDTH=w, OUT_HEIGHT=height, OUT_WIDTH=width, SIZE=size, STRIDE=stride,
            PADDING=padding, BLOCK=1024, enable_fp_fusion=True,
        )  # fmt: skip
    return x.permute(0, 3, 1, 2)


@triton.jit
def sum_patches_kernel(
    p_patches, p_x,
    CHANNELS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, OUT_HEIGHT: tl.constexpr,
    OUT_WIDTH: tl.constexpr, SIZE: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of one row of the map, each element summed over all patches that contain it."""
    # 64-bit before the strides: a batch of large maps has more than 2^31 elements.
    i_row = tl.program_id(0).to(tl.int64)
    i_b, i_h = i_row // HEIGHT, i_row % HEIGHT
    o = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    o_c, o_w = o % CHANNELS, o // CHANNELS
    b_x = tl.zeros((BLOCK,), dtype=tl.float32)
    for i in tl.static_range(SIZE):
        o_above = tl.zeros_like(o) + (i_h + PADDING - i)
        o_row = o_above // STRIDE
        m_row = (o < WIDTH * CHANNELS) & (o_above >= 0) & (o_above % STRIDE == 0) & (o_row < OUT_HEIGHT)
        for j in tl.static_range(SIZE):
            o_left = o_w + PADDING - j
            o_column = o_left // STRIDE
            mask = m_row & (o_left >= 0) & (o_left % STRIDE == 0) & (o_column < OUT_WIDTH)
            o_at = ((i_b * OUT_HEIGHT + o_row) * OUT_WIDTH + o_column) * (SIZE * SIZE) + (i * SIZE + j)
            b_x += tl.load(p_patches + o_at * CHANNELS + o_c, mask=mask, other=0.0).to(tl.float32)
    tl.store(p_x + i_row * (WIDTH * CHANNELS) + o, b_x.to(p_x.dtype.element_ty), mask=o < WIDTH * CHANNELS)


@triton.jit
def extract_patches_kernel(
    p_x, p_patches,
    CHANNELS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, OUT_HEIGHT: tl.constexpr,
    OUT_WIDTH: tl.constexpr, SIZE: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of one row of patches, zero outside the map."""
    ROW: tl.constexpr = OUT_WIDTH * SIZE * SIZE * CHANNELS
    # 64-bit before the strides: a batch of large maps has more than 2^31 elements.
    i_row = tl.program_id(0).to(tl.int64)
    i_b, i_h = i_row // OUT_HEIGHT, i_row % OUT_HEIGHT
    o = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    o_c = o % CHANNELS
    o_w = o // (SIZE * SIZE * CHANNELS) * STRIDE + o // CHANNELS % SIZE - PADDING
    o_h = i_h * STRIDE + o // (SIZE * CHANNELS) % SIZE - PADDING
    m_inside = (o_h >= 0) & (o_h < HEIGHT) & (o_w >= 0) & (o_w < WIDTH)
    b_x = tl.load(p_x + ((i_b * HEIGHT + o_h) * WIDTH + o_w) * CHANNELS + o_c, mask=m_inside & (o < ROW), other=0.0)
    tl.store(p_patches + i_row * ROW + o, b_x, mask=o < ROW)
