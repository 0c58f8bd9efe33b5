"""`spread` and `join` on a CUDA device: tiles of the map that are read once and written coalesced both ways."""

# mypy: ignore-errors
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


def spread(x: Tensor) -> Tensor:
    """x (b, c, h, w) -> (b, 2, c, h*w)."""
    b, c, h, w = x.shape
    u = x.new_empty((b, 2, c, h * w))
    with torch.cuda.device_of(x):
        _launch(spread_kernel, x, u, x.stride(), h, w)
    return u


def join(y: Tensor, height: int, width: int) -> Tensor:
    """y (b, 2, c, h*w) -> (b, c, height, width), channel-last in memory."""
    y = y.contiguous()
    x = y.new_empty((y.shape[0], height, width, y.shape[2])).permute(0, 3, 1, 2)
    with torch.cuda.device_of(y):
        _launch(join_kernel, x, y, x.stride(), height, width)
    return x


def _launch(kernel: Any, x: Tensor, u: Tensor, strides: tuple[int, ...], height: int, width: int) -> None:
    side = 8 if u.dtype == torch.float32 or max(height, width) <= 8 else 16  # a whole sector of memory each way
    channels = 2048 // side**2
    batch, count = u.shape[0], u.shape[2]
    grid = (triton.cdiv(height, side) * triton.cdiv(width, side), triton.cdiv(count, channels), batch)
    kernel[grid](
        x, u, *strides, CHANNELS=count, HEIGHT=height, WIDTH=width, BLOCK_C=channels, BLOCK_S=side, num_warps=4
    )  # fmt: skip


@triton.jit
def _tile(
    u, s_c, s_h, s_w,
    CHANNELS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Offsets of a tile in the map and in both sequences, and its mask; all (h, w, c)."""
    i_tile, i_c, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    tiles = tl.cdiv(WIDTH, BLOCK_S)
    o_h = ((i_tile // tiles) * BLOCK_S + tl.arange(0, BLOCK_S))[:, None, None]
    o_w = ((i_tile % tiles) * BLOCK_S + tl.arange(0, BLOCK_S))[None, :, None]
    o_c = (i_c * BLOCK_C + tl.arange(0, BLOCK_C))[None, None, :]
    mask = (o_h < HEIGHT) & (o_w < WIDTH) & (o_c < CHANNELS)
    o_map = o_h * s_h + o_w * s_w + o_c * s_c
    p_u = u + i_b.to(tl.int64) * (2 * CHANNELS * HEIGHT * WIDTH)
    p_rows = p_u + o_c * (HEIGHT * WIDTH) + o_h * WIDTH + o_w
    p_columns = p_u + (CHANNELS + o_c) * (HEIGHT * WIDTH) + o_w * HEIGHT + o_h
    return o_map, p_rows, p_columns, mask


@triton.jit
def spread_kernel(
    x, u, s_b, s_c, s_h, s_w,
    CHANNELS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    o_map, p_rows, p_columns, mask = _tile(u, s_c, s_h, s_w, CHANNELS, HEIGHT, WIDTH, BLOCK_C, BLOCK_S)
    b_x = tl.load(x + tl.program_id(2).to(tl.int64) * s_b + o_map, mask=mask)
    tl.store(p_rows, b_x, mask=mask)
    tl.store(p_columns, b_x, mask=mask)


@triton.jit
def join_kernel(
    x, y, s_b, s_c, s_h, s_w,
    CHANNELS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    o_map, p_rows, p_columns, mask = _tile(y, s_c, s_h, s_w, CHANNELS, HEIGHT, WIDTH, BLOCK_C, BLOCK_S)
    b_rows = tl.load(p_rows, mask=mask).to(tl.float32)
    b_columns = tl.load(p_columns, mask=mask).to(tl.float32)
    b_x = (b_rows + b_columns).to(x.dtype.element_ty)
    tl.store(x + tl.program_id(2).to(tl.int64) * s_b + o_map, b_x, mask=mask)
