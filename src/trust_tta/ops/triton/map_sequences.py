"""Sequences out of a channel-last map and back, along any steps, on a CUDA device; each is the other's adjoint.

Tiles are (channels, steps): both sides are read and written along their contiguous axis.
"""

# mypy: ignore-errors
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from trust_tta.ops.triton.cross_scan_merge import merge_sizes, sigmoid
from trust_tta.ops.triton.tiling import ceil_div, may_approximate, power_of_two


def read_map(x: Tensor, visits: Tensor, *, silu: bool) -> Tensor:
    """`map_sequences.read_map` of the contiguous pixels x (b, h, w, c): (b, k, c, m)."""
    b, h, w, c = x.shape
    visits = visits.contiguous()
    sequences, length = visits.shape[-2:]
    steps = sequences * length
    u = x.new_empty((b, sequences, c, length))
    block_s = min(128, power_of_two(steps))
    with torch.cuda.device_of(x):
        read_map_kernel[(ceil_div(steps, block_s), ceil_div(c, 32), b)](
            x, visits, u, steps if visits.dim() == 3 else 0, c, h * w, length, steps, SILU=silu,
            APPROX=may_approximate(x), BLOCK_S=block_s, BLOCK_C=32, num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip
    return u


def merge_map(
    y: Tensor, places: Tensor, height: int, width: int, *, add: Tensor | None = None, silu_of: Tensor | None = None
) -> Tensor:
    """`map_sequences.merge_map`, times the derivative of SiLU at the pixels `silu_of`: pixels (b, h, w, c)."""
    y, places = y.contiguous(), places.contiguous()
    b, sequences, c, length = y.shape
    count, tokens = places.shape[-2:]
    x = y.new_empty((b, height, width, c))
    side, block_c, warps = merge_sizes(max(height, width), y.dtype)
    with torch.cuda.device_of(y):
        merge_map_kernel[(ceil_div(height, side) * ceil_div(width, side), ceil_div(c, block_c), b)](
            y, places, x if add is None else add, x if silu_of is None else silu_of, x,
            count * tokens if places.dim() == 3 else 0, count, c, length, sequences * length, height, width,
            ADD=add is not None, SLOPE=silu_of is not None, APPROX=may_approximate(y), SIDE=side, BLOCK_C=block_c,
            num_warps=warps, enable_fp_fusion=True,
        )  # fmt: skip
    return x


@triton.jit(do_not_specialize=["stride"])
def read_map_kernel(
    p_x, p_visits, p_u, stride, channels, tokens, length, steps,
    SILU: tl.constexpr, APPROX: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """A block of channels at a block of the steps of all sequences; `stride`: of the visits from image to image."""
    # 64-bit before the strides: a batch of large maps has more than 2^31 elements.
    i_b = tl.program_id(2).to(tl.int64)
    o_s = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)
    o_c = (tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C))[:, None]
    b_t = tl.load(p_visits + i_b * stride + o_s, mask=o_s < steps, other=0).to(tl.int32)[None, :]
    mask = (o_s < steps)[None, :] & (o_c < channels)
    b_x = tl.load(p_x + i_b * tokens * channels + (b_t * channels + o_c), mask=mask & (b_t < tokens), other=0.0)
    if SILU:
        b_wide = b_x.to(tl.float32)
        b_x = (b_wide * sigmoid(b_wide, APPROX)).to(p_u.dtype.element_ty)
    o_u = ((o_s // length * channels)[None, :] + o_c) * length + (o_s % length)[None, :]
    tl.store(p_u + i_b * steps * channels + o_u, b_x, mask=mask)


@triton.jit(do_not_specialize=["stride", "count"])
def merge_map_kernel(
    p_y, p_places, p_add, p_point, p_x, stride, count, channels, length, steps, height, width,
    ADD: tl.constexpr, SLOPE: tl.constexpr, APPROX: tl.constexpr, SIDE: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """A block of channels of a square tile of pixels: whole sectors of memory, whether steps follow rows or columns."""
    tiles = (width + SIDE - 1) // SIDE
    # 64-bit before the strides: a batch of large maps has more than 2^31 elements.
    i_b = tl.program_id(2).to(tl.int64)
    o_p = tl.arange(0, SIDE * SIDE)
    o_h = tl.program_id(0) // tiles * SIDE + o_p // SIDE
    o_w = tl.program_id(0) % tiles * SIDE + o_p % SIDE
    o_c = (tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C))[:, None]
    m_p = (o_h < height) & (o_w < width)
    mask = m_p[None, :] & (o_c < channels)
    o_token = o_h * width + o_w
    p_y += i_b * steps * channels
    b_x = tl.zeros((BLOCK_C, SIDE * SIDE), dtype=tl.float32)
    for i in range(count):
        b_at = tl.load(p_places + i_b * stride + i * height * width + o_token, mask=m_p, other=0).to(tl.int32)
        o_y = ((b_at // length * channels)[None, :] + o_c) * length + (b_at % length)[None, :]
        b_x += tl.load(p_y + o_y, mask=mask, other=0.0).to(tl.float32)
    if ADD:  # the nearest pixel of a map of half the size
        half_w = (width + 1) // 2
        o_half = (o_h // 2 * half_w + o_w // 2)[None, :] * channels + o_c
        p_add += i_b * ((height + 1) // 2 * half_w) * channels
        b_x += tl.load(p_add + o_half, mask=mask, other=0.0).to(tl.float32)
    o_x = i_b * height * width * channels + (o_token[None, :] * channels + o_c)
    if SLOPE:
        b_p = tl.load(p_point + o_x, mask=mask, other=0.0).to(tl.float32)
        b_s = sigmoid(b_p, APPROX)
        b_x *= b_s * (1 + b_p * (1 - b_s))
    tl.store(p_x + o_x, b_x.to(p_x.dtype.element_ty), mask=mask)
