"""Depthwise convolutions of 3 x 3 on a CUDA device, of channel-last maps in half precision.

A program walks down some rows of a few columns, so that each number is read three times and not nine.
"""

# mypy: ignore-errors
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from trust_tta.scan.triton.launch import ceil_div


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, *, turned: bool = False) -> Tensor:
    """x (b, c, h, w), channel-last in memory, by weight (c, 1, 3, 3), or by it turned around; plus bias (c,)."""
    b, c, h, w = x.shape
    y, taps, rows = torch.empty_like(x), _taps(weight), choose_rows(h)
    block_p, block_c, warps = choose_tile(c)
    columns = b * ceil_div(h, rows) * w
    with torch.cuda.device_of(x):
        depthwise_kernel[(ceil_div(columns, block_p) * ceil_div(c, block_c),)](
            x, taps, taps if bias is None else bias, y, columns, CHANNELS=c, HEIGHT=h, WIDTH=w, TURNED=turned,
            BIAS=bias is not None, ROWS=rows, BLOCK_P=block_p, BLOCK_C=block_c, num_warps=warps, enable_fp_fusion=True,
        )  # fmt: skip
    return y


def choose_tile(channels: int) -> tuple[int, int, int]:
    """Columns, channels and warps of a tile."""
    block_c = 64 if channels % 64 == 0 else 32
    return 1024 // block_c, block_c, 4


def choose_rows(height: int) -> int:
    """The rows that a program walks down."""
    return 7 if height % 7 == 0 else min(height, 8)


def _taps(weight: Tensor) -> Tensor:
    """(c, 1, 3, 3) as (9, c) in float32."""
    return weight.new_empty((9, len(weight)), dtype=torch.float32).copy_(weight.flatten(1).T)


@triton.jit
def _place(
    i_block, columns,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """The first row, the column and the number of the first pixel of a block of columns, and its mask."""
    STRIPS: tl.constexpr = (HEIGHT + ROWS - 1) // ROWS
    o = i_block * BLOCK_P + tl.arange(0, BLOCK_P)
    o_w = o % WIDTH
    o_h = o // WIDTH % STRIPS * ROWS
    # 64-bit before the strides: a batch of large maps has more than 2^31 elements.
    o_p = (o // (WIDTH * STRIPS)).to(tl.int64) * (HEIGHT * WIDTH) + o_h * WIDTH + o_w
    return o_h, o_w, o_p, o < columns


@triton.jit
def _load(
    p_x, o_h, o_w, o_x, m_p, m_c, DOWN: tl.constexpr, RIGHT: tl.constexpr, CHANNELS: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The pixels so far below and to the right, in float32, zero outside the map."""
    inside = m_p & (o_h + DOWN >= 0) & (o_h + DOWN < HEIGHT) & (o_w + RIGHT >= 0) & (o_w + RIGHT < WIDTH)
    mask = inside[:, None] & m_c[None, :]
    return tl.load(p_x + o_x + (DOWN * WIDTH + RIGHT) * CHANNELS, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _tap(p_w, o_c, m_c, TAP: tl.constexpr, CHANNELS: tl.constexpr, TURNED: tl.constexpr):
    return tl.load(p_w + (8 - TAP if TURNED else TAP) * CHANNELS + o_c, mask=m_c, other=0.0)[None, :]


@triton.jit
def _load_taps(p_w, o_c, m_c, CHANNELS: tl.constexpr, TURNED: tl.constexpr):
    """The nine taps of a block of channels."""
    return (
        _tap(p_w, o_c, m_c, 0, CHANNELS, TURNED), _tap(p_w, o_c, m_c, 1, CHANNELS, TURNED),
        _tap(p_w, o_c, m_c, 2, CHANNELS, TURNED), _tap(p_w, o_c, m_c, 3, CHANNELS, TURNED),
        _tap(p_w, o_c, m_c, 4, CHANNELS, TURNED), _tap(p_w, o_c, m_c, 5, CHANNELS, TURNED),
        _tap(p_w, o_c, m_c, 6, CHANNELS, TURNED), _tap(p_w, o_c, m_c, 7, CHANNELS, TURNED),
        _tap(p_w, o_c, m_c, 8, CHANNELS, TURNED),
    )  # fmt: skip


@triton.jit
def depthwise_kernel(
    p_x, p_w, p_bias, p_y, columns,
    CHANNELS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, TURNED: tl.constexpr, BIAS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """ROWS rows of a block of columns and of channels."""
    C_BLOCKS: tl.constexpr = (CHANNELS + BLOCK_C - 1) // BLOCK_C
    o_h, o_w, o_p, m_p = _place(tl.program_id(0) // C_BLOCKS, columns, HEIGHT, WIDTH, ROWS, BLOCK_P)
    o_c = tl.program_id(0) % C_BLOCKS * BLOCK_C + tl.arange(0, BLOCK_C)
    m_c = o_c < CHANNELS
    o_x = o_p[:, None] * CHANNELS + o_c[None, :]
    w_0, w_1, w_2, w_3, w_4, w_5, w_6, w_7, w_8 = _load_taps(p_w, o_c, m_c, CHANNELS, TURNED)
    b_first = tl.zeros((BLOCK_P, BLOCK_C), dtype=tl.float32)
    if BIAS:
        b_first += tl.load(p_bias + o_c, mask=m_c, other=0.0).to(tl.float32)[None, :]
    b_above, b_here = b_first, b_first  # the sums of the row above that which is read, and of its own
    for row in tl.static_range(-1, ROWS + 1):
        b_left = _load(p_x, o_h, o_w, o_x, m_p, m_c, row, -1, CHANNELS, HEIGHT, WIDTH)
        b_x = _load(p_x, o_h, o_w, o_x, m_p, m_c, row, 0, CHANNELS, HEIGHT, WIDTH)
        b_right = _load(p_x, o_h, o_w, o_x, m_p, m_c, row, 1, CHANNELS, HEIGHT, WIDTH)
        if row > 0:
            b_above = b_above + b_left * w_6 + b_x * w_7 + b_right * w_8
            m_y = (m_p & (o_h + (row - 1) < HEIGHT))[:, None] & m_c[None, :]
            tl.store(p_y + o_x + (row - 1) * (WIDTH * CHANNELS), b_above.to(p_y.dtype.element_ty), mask=m_y)
        b_above = b_here + b_left * w_3 + b_x * w_4 + b_right * w_5
        b_here = b_first + b_left * w_0 + b_x * w_1 + b_right * w_2
