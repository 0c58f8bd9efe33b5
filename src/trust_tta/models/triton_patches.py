"""`convolution.extract_patches` on a CUDA device in one pass over the map."""

# mypy: ignore-errors
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from trust_tta.scan.triton.launch import ceil_div


def extract_patches(x: Tensor, size: int, stride: int, padding: int) -> Tensor:
    """As `convolution.extract_patches`."""
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


@triton.jit
def extract_patches_kernel(
    p_x, p_patches,
    CHANNELS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, OUT_HEIGHT: tl.constexpr,
    OUT_WIDTH: tl.constexpr, SIZE: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A run of numbers of one row of patches; outside the map are zeros."""
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
