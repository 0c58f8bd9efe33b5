"""MLP in one kernel, in half precision: the hidden map stays on the chip.

Of narrow maps alone: a program holds all channels of its rows. They are held as two blocks of a power of two each.
"""

# mypy: ignore-errors
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from trust_tta.ops.triton.linear import gelu, gelu_slope
from trust_tta.ops.triton.matmul import dot
from trust_tta.ops.triton.tiling import ceil_div

MAX_CHANNELS = 192  # channels that a program can hold


def supports(channels: int, hidden: int) -> bool:
    """Whether the kernels support layers (hidden, channels) and (channels, hidden)."""
    first, second = halves(channels)
    return (
        channels <= MAX_CHANNELS
        and second >= 16
        and second & (second - 1) == 0
        and hidden % 64 == 0
        and first >= second
    )


def halves(channels: int) -> tuple[int, int]:
    """The largest power of two below the channels, and the rest."""
    first = 1 << ((channels - 1).bit_length() - 1)
    return first, channels - first


def mlp(x: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor, add: Tensor | None) -> Tensor:
    """GELU(x (m, k) @ weight1 (n, k).T + bias1) @ weight2 (k, n).T + bias2, plus `add` (m, k)."""
    y = x.new_empty(x.shape)
    sizes = _sizes(x, weight1, backward=False)
    with torch.cuda.device_of(x):
        mlp_kernel[(ceil_div(len(x), sizes["BLOCK_M"]),)](
            x, weight1.contiguous(), bias1, weight2.contiguous(), bias2,
            x if add is None else add, y, len(x), ADD=add is not None, **sizes,
        )  # fmt: skip
    return y


def mlp_input_gradient(dy: Tensor, x: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor) -> Tensor:
    """The gradient (m, k) of x; the hidden map is computed again."""
    dx = x.new_empty(x.shape)
    sizes = _sizes(x, weight1, backward=True)
    with torch.cuda.device_of(x):
        mlp_input_gradient_kernel[(ceil_div(len(x), sizes["BLOCK_M"]),)](
            dy, x, weight1.contiguous(), bias1, weight2.contiguous(), dx, len(x),
            **sizes,
        )  # fmt: skip
    return dx


def _sizes(x: Tensor, weight1: Tensor, *, backward: bool) -> dict[str, Any]:
    hidden, channels = weight1.shape
    first, second = halves(channels)
    block_m, block_h, warps, stages = choose_tile(channels, backward=backward)
    return {
        "CHANNELS": channels, "HIDDEN": hidden, "FIRST": first, "SECOND": second, "BLOCK_M": block_m,
        "BLOCK_H": block_h, "INTERPRETED": x.device.type == "cpu", "num_warps": warps, "num_stages": stages,
        "enable_fp_fusion": True,
    }  # fmt: skip


def choose_tile(channels: int, *, backward: bool) -> tuple[int, int, int, int]:
    """Rows, columns of the hidden map, warps and stages; the fastest on an H200 for 96 and 192 channels."""
    if channels <= 128:
        return (64, 64, 4, 2) if backward else (128, 32, 4, 3)
    return (128, 64, 8, 2) if backward else (128, 64, 8, 3)


@triton.jit
def _load(p_x, o_m, i_c, rows, CHANNELS: tl.constexpr, BLOCK_C: tl.constexpr):
    """Rows o_m of x (rows, channels), their channels from i_c on."""
    o_x = o_m.to(tl.int64)[:, None] * CHANNELS + (i_c + tl.arange(0, BLOCK_C))[None, :]
    return tl.load(p_x + o_x, mask=(o_m < rows)[:, None], other=0.0)


@triton.jit
def _store(p_y, b_y, o_m, i_c, rows, CHANNELS: tl.constexpr, BLOCK_C: tl.constexpr):
    o_y = o_m.to(tl.int64)[:, None] * CHANNELS + (i_c + tl.arange(0, BLOCK_C))[None, :]
    tl.store(p_y + o_y, b_y.to(p_y.dtype.element_ty), mask=(o_m < rows)[:, None])


@triton.jit
def _weight(p_w, i_row, i_column, STRIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A block of a weight with rows of STRIDE elements."""
    return tl.load(p_w + (i_row + tl.arange(0, ROWS))[:, None] * STRIDE + (i_column + tl.arange(0, COLUMNS))[None, :])


@triton.jit
def _hidden(
    b_x0, b_x1, b_w0, b_w1, p_bias, i_h, BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr, INTERPRETED: tl.constexpr
):
    """A block of the hidden map, before GELU, from that of weight1 (hidden, channels)."""
    b_h = dot(b_x0, tl.trans(b_w0), tl.zeros((BLOCK_M, BLOCK_H), dtype=tl.float32), False, INTERPRETED)
    b_h = dot(b_x1, tl.trans(b_w1), b_h, False, INTERPRETED)
    return b_h + tl.load(p_bias + i_h + tl.arange(0, BLOCK_H)).to(tl.float32)[None, :]


@triton.jit
def mlp_kernel(
    p_x, p_w1, p_bias1, p_w2, p_bias2, p_add, p_y, rows,
    CHANNELS: tl.constexpr, HIDDEN: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_H: tl.constexpr, ADD: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """All channels of a block of rows, in a loop over blocks of the hidden map."""
    o_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    b_x0 = _load(p_x, o_m, 0, rows, CHANNELS, FIRST)
    b_x1 = _load(p_x, o_m, FIRST, rows, CHANNELS, SECOND)
    b_y0 = tl.zeros((BLOCK_M, FIRST), dtype=tl.float32)
    b_y1 = tl.zeros((BLOCK_M, SECOND), dtype=tl.float32)
    for i_h in range(0, HIDDEN, BLOCK_H):
        b_w0 = _weight(p_w1, i_h, 0, CHANNELS, BLOCK_H, FIRST)
        b_w1 = _weight(p_w1, i_h, FIRST, CHANNELS, BLOCK_H, SECOND)
        b_h = _hidden(b_x0, b_x1, b_w0, b_w1, p_bias1, i_h, BLOCK_M, BLOCK_H, INTERPRETED)
        b_h = gelu(b_h, False, INTERPRETED).to(p_y.dtype.element_ty)
        b_v0 = _weight(p_w2, 0, i_h, HIDDEN, FIRST, BLOCK_H)
        b_v1 = _weight(p_w2, FIRST, i_h, HIDDEN, SECOND, BLOCK_H)
        b_y0 = dot(b_h, tl.trans(b_v0), b_y0, False, INTERPRETED)
        b_y1 = dot(b_h, tl.trans(b_v1), b_y1, False, INTERPRETED)
    b_y0 += tl.load(p_bias2 + tl.arange(0, FIRST)).to(tl.float32)[None, :]
    b_y1 += tl.load(p_bias2 + FIRST + tl.arange(0, SECOND)).to(tl.float32)[None, :]
    if ADD:
        b_y0 += _load(p_add, o_m, 0, rows, CHANNELS, FIRST).to(tl.float32)
        b_y1 += _load(p_add, o_m, FIRST, rows, CHANNELS, SECOND).to(tl.float32)
    _store(p_y, b_y0, o_m, 0, rows, CHANNELS, FIRST)
    _store(p_y, b_y1, o_m, FIRST, rows, CHANNELS, SECOND)


@triton.jit
def mlp_input_gradient_kernel(
    p_dy, p_x, p_w1, p_bias1, p_w2, p_dx, rows,
    CHANNELS: tl.constexpr, HIDDEN: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_H: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Input gradient of a block of rows, in a loop over blocks of the hidden map and its gradient."""
    o_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    b_x0 = _load(p_x, o_m, 0, rows, CHANNELS, FIRST)
    b_x1 = _load(p_x, o_m, FIRST, rows, CHANNELS, SECOND)
    b_dy0 = _load(p_dy, o_m, 0, rows, CHANNELS, FIRST)
    b_dy1 = _load(p_dy, o_m, FIRST, rows, CHANNELS, SECOND)
    b_dx0 = tl.zeros((BLOCK_M, FIRST), dtype=tl.float32)
    b_dx1 = tl.zeros((BLOCK_M, SECOND), dtype=tl.float32)
    for i_h in range(0, HIDDEN, BLOCK_H):
        b_w0 = _weight(p_w1, i_h, 0, CHANNELS, BLOCK_H, FIRST)
        b_w1 = _weight(p_w1, i_h, FIRST, CHANNELS, BLOCK_H, SECOND)
        b_v0 = _weight(p_w2, 0, i_h, HIDDEN, FIRST, BLOCK_H)
        b_v1 = _weight(p_w2, FIRST, i_h, HIDDEN, SECOND, BLOCK_H)
        b_h = _hidden(b_x0, b_x1, b_w0, b_w1, p_bias1, i_h, BLOCK_M, BLOCK_H, INTERPRETED)
        b_dh = dot(b_dy0, b_v0, tl.zeros((BLOCK_M, BLOCK_H), dtype=tl.float32), False, INTERPRETED)
        b_dh = dot(b_dy1, b_v1, b_dh, False, INTERPRETED)
        b_dh = (b_dh * gelu_slope(b_h, False, INTERPRETED)).to(p_dx.dtype.element_ty)
        b_dx0 = dot(b_dh, b_w0, b_dx0, False, INTERPRETED)
        b_dx1 = dot(b_dh, b_w1, b_dx1, False, INTERPRETED)
    _store(p_dx, b_dx0, o_m, 0, rows, CHANNELS, FIRST)
    _store(p_dx, b_dx1, o_m, FIRST, rows, CHANNELS, SECOND)
