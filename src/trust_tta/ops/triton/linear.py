"""Matrix products on a CUDA device with a fused epilogue: bias, GELU, residual, or the derivative of GELU.

In float32 every factor is split into two parts that a tensor core takes exactly, and three of the four products of
parts are summed (3 x TF32): the error stays that of float32.
"""

# mypy: ignore-errors
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trust_tta.ops.triton.matmul import dot, split_dot, tf32_high
from trust_tta.ops.triton.tiling import ceil_div, power_of_two

PROGRAMS = 132 * 3  # fill a large GPU
NUM_PROCESSORS = 132  # of a large GPU; fewer tiles leave some idle
SMALL_TILE = (32, 64, 32, 4, 4)
MIN_SPLIT_STEPS = 12  # of the inner dimension, from which on few tiles are divided (split-K),
MAX_SPLIT_PROGRAMS = 300  # into about so many programs
CHUNK_ROWS = 32  # rows that a program takes at a time


class Weight(NamedTuple):
    """A weight (n, k) for the kernels: its high and low TF32 parts in float32, or twice the weight itself."""

    high: Tensor
    low: Tensor


def prepare(weight: Tensor, *, rows: int, transposed: bool = False) -> Weight:
    """The weight (n, k), or its transpose, as the kernels read it for a map of so many rows."""
    weight = weight.detach().T if transposed else weight.detach()
    if weight.dtype != torch.float32 or is_small(rows, len(weight)):
        return Weight(weight, weight)
    rows, columns = weight.shape
    high, low = weight.new_empty((2, rows, columns))
    with torch.cuda.device_of(weight):
        split_kernel[(ceil_div(rows, 32), ceil_div(columns, 32))](
            weight, high, low, rows, columns, *weight.stride(), BLOCK=32, enable_fp_fusion=True
        )
    return Weight(high, low)


def is_small(rows: int, columns: int) -> bool:
    """Whether a result has too few tiles of the usual size to fill a large GPU."""
    return ceil_div(rows, 64) * ceil_div(columns, 128) < NUM_PROCESSORS


def product(
    x: Tensor, weight: Weight, bias: Tensor | None = None, *, gelu: bool = False, add: Tensor | None = None,
    slope_at: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """x (m, k) @ weight (n, k).T + bias (n,), then GELU, or plus `add` (m, n), or times GELU's slope at `slope_at`."""
    rows, columns = len(x), len(weight.high)
    y = x.new_empty((rows, columns))
    split, parts = x.dtype == torch.float32, 1
    curved = gelu or slope_at is not None
    block_m, block_n, block_k, warps, stages = choose_tile(columns, x.shape[1], x.dtype, gelu=curved)
    if split and is_small(rows, columns):
        block_m, block_n, block_k, warps, stages = SMALL_TILE
        parts = choose_parts(ceil_div(rows, block_m) * ceil_div(columns, block_n), ceil_div(x.shape[1], block_k))
    target = y if parts == 1 else x.new_empty((parts, rows, columns))
    given = (x if bias is None else bias, next((t for t in (add, slope_at) if t is not None), x))
    flags = {
        "COLUMNS": columns, "BIAS": bias is not None, "GELU": gelu, "ADD": add is not None,
        "SLOPE": slope_at is not None, "SPLIT": split, "PARTS": parts, "INTERPRETED": x.device.type == "cpu",
    }  # fmt: skip
    with torch.cuda.device_of(x):
        product_kernel[(ceil_div(rows, block_m) * ceil_div(columns, block_n), parts)](
            x, *weight, *given, target, rows,
            INNER=x.shape[1], STRIDE_N=weight.high.stride(0), STRIDE_K=weight.high.stride(1),
            UNSPLIT=split and weight.low is weight.high, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k,
            num_warps=warps, num_stages=stages, enable_fp_fusion=True, **flags,
        )  # fmt: skip
        if parts > 1:
            add_parts_kernel[(ceil_div(rows, 8) * ceil_div(columns, 64),)](
                target, *given, y, rows, BLOCK_M=8, BLOCK_N=64, num_warps=2, enable_fp_fusion=True, **flags
            )
    return y


def choose_parts(tiles: int, steps: int) -> int:
    """Number of parts of the inner dimension (split-K), for few tiles with many steps.

    Adding them up takes one more launch, which a dozen steps pay for. The fastest on an H200 for VMamba-T, of powers of
    two: each is compiled for.
    """
    most = 1 if steps < MIN_SPLIT_STEPS else max(1, min(steps // 3, MAX_SPLIT_PROGRAMS // tiles))
    return 1 << (most.bit_length() - 1)


def hidden_gradient(dy: Tensor, x: Tensor, weight1: Weight, bias1: Tensor, weight2: Weight) -> Tensor:
    """Gradient (m, n) of h = x @ weight1.T + bias1, recomputed here, where y = GELU(h) @ weight2.

    x and dy (m, k); weight1 and weight2 (n, k).
    """
    rows, columns = len(x), len(weight1.high)
    dh = x.new_empty((rows, columns))
    block_m, block_n, block_k, warps, stages = choose_tile(columns, x.shape[1], x.dtype, two=True)
    with torch.cuda.device_of(x):
        hidden_gradient_kernel[(ceil_div(rows, block_m) * ceil_div(columns, block_n),)](
            dy, x, *weight1, bias1, *weight2, dh, rows,
            INNER=x.shape[1], COLUMNS=columns, STRIDE_N=weight1.high.stride(0), STRIDE_K=weight1.high.stride(1),
            STRIDE_N2=weight2.high.stride(0), STRIDE_K2=weight2.high.stride(1), SPLIT=x.dtype == torch.float32,
            BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, INTERPRETED=x.device.type == "cpu",
            num_warps=warps, num_stages=stages, enable_fp_fusion=True,
        )  # fmt: skip
    return dh


def weight_gradient(dy: Tensor, x: Tensor) -> Tensor:
    """dy (m, n).T @ x (m, k) in float32, from partial sums that are added in a fixed order."""
    (rows, n), k = dy.shape, x.shape[1]
    block = min(64, power_of_two(max(16, n, k)))
    tiles, chunks = ceil_div(n, block) * ceil_div(k, block), ceil_div(rows, CHUNK_ROWS)
    share = ceil_div(chunks, ceil_div(PROGRAMS, tiles))
    partial = x.new_empty((ceil_div(chunks, share), n, k))
    with torch.cuda.device_of(x):
        weight_gradient_kernel[(len(partial) * tiles,)](
            dy, x, partial, rows, share, COLUMNS=n, INNER=k, BLOCK_M=CHUNK_ROWS, BLOCK=block, num_warps=4, num_stages=3,
            enable_fp_fusion=True,
        )  # fmt: skip
    return partial.sum(0)


def choose_tile(
    columns: int, inner: int, dtype: torch.dtype, *, two: bool = False, gelu: bool = False
) -> tuple[int, int, int, int, int]:
    """Rows, columns and inner of a tile, warps and stages; `two` products are summed side by side, or GELU follows.

    The fastest on an H200 at the sizes of VMamba-T.
    """
    block_k = 32 if two or dtype == torch.float32 else 64
    if two:
        rows, most, warps, stages = 128, 64, 8, 4
    elif gelu and dtype != torch.float32:
        rows, most, warps, stages = 128, 128, 8, 3
    elif dtype != torch.float32 and inner < 256:
        block_k, (rows, most), warps, stages = 32, (64, 128) if columns <= 128 else (128, 64), 4, 4
    else:
        rows, most, warps, stages = 64, 128, 4, 3
    return rows, min(most, max(16, power_of_two(columns))), block_k, warps, stages


@triton.jit(do_not_specialize=["rows", "columns"])
def split_kernel(p_w, p_high, p_low, rows, columns, stride_n, stride_k, BLOCK: tl.constexpr):
    """A tile of both parts of a weight."""
    o_n = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))[:, None]
    o_k = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    mask = (o_n < rows) & (o_k < columns)
    b_w = tl.load(p_w + o_n * stride_n + o_k * stride_k, mask=mask)
    b_high = tf32_high(b_w)
    tl.store(p_high + o_n * columns + o_k, b_high, mask=mask)
    tl.store(p_low + o_n * columns + o_k, b_w - b_high, mask=mask)


@triton.jit
def multiply(b_x, b_high, b_low, b_sum, SPLIT: tl.constexpr, INTERPRETED: tl.constexpr):
    """x (m, k) @ weight (k, n) + sum in float32."""
    if SPLIT:
        return split_dot(b_x, b_high, b_low, b_sum)
    return dot(b_x, b_high, b_sum, False, INTERPRETED)


@triton.jit
def load_weight(
    p_w, i_k, o_n, o_k, INNER: tl.constexpr, COLUMNS: tl.constexpr, STRIDE_N: tl.constexpr, STRIDE_K: tl.constexpr
):
    """A tile (k, n) of the weight, zero past its ends."""
    mask = (o_n < COLUMNS)[None, :] & (i_k + o_k < INNER)[:, None]
    return tl.load(p_w + o_n[None, :] * STRIDE_N + (i_k + o_k)[:, None] * STRIDE_K, mask=mask, other=0.0)


@triton.jit
def normal(b_h):
    """The normal distribution's integral up to h, within 1e-7, and exp(-h^2 / 2).

    Abramowitz and Stegun, 7.1.26: half the work of an erf that is right to the last bit.
    """
    b_t = 1.0 / (1.0 + 0.23164190 * tl.abs(b_h))
    b_bell = tl.exp2(b_h * b_h * -0.72134752)
    b_p = ((1.061405429 * b_t - 1.453152027) * b_t + 1.421413741) * b_t - 0.284496736
    b_tail = 0.5 * ((b_p * b_t + 0.254829592) * b_t) * b_bell
    return tl.where(b_h < 0, b_tail, 1.0 - b_tail), b_bell


@triton.jit
def tanh(b_x, INTERPRETED: tl.constexpr):
    if INTERPRETED:  # interpreted, without instructions of a GPU
        return 2 * tl.sigmoid(2 * tl.maximum(b_x, -20.0)) - 1
    return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [b_x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def fast_normal(b_h, INTERPRETED: tl.constexpr):
    """The integral of `normal` within 3e-4, by the GPU's own tanh; for results in half precision."""
    b_square = tl.minimum(b_h * b_h, 64.0)
    b_x = b_h * (0.797507884 + b_square * (0.0370056463 - 3.51516846e-4 * b_square))
    return 0.5 + 0.5 * tanh(b_x, INTERPRETED)


@triton.jit
def gelu(b_h, SPLIT: tl.constexpr, INTERPRETED: tl.constexpr):
    """h times the normal distribution's integral up to h, as exact as the products are."""
    if SPLIT:
        return b_h * normal(b_h)[0]
    return b_h * fast_normal(b_h, INTERPRETED)


@triton.jit
def gelu_slope(b_h, SPLIT: tl.constexpr, INTERPRETED: tl.constexpr):
    """The derivative of GELU at h."""
    if SPLIT:
        b_integral, b_bell = normal(b_h)
        return b_integral + b_h * b_bell * 0.39894228
    # That of `fast_normal`, so that there is one tanh and no exponential.
    b_square = tl.minimum(b_h * b_h, 64.0)
    b_x = b_h * (0.797507884 + b_square * (0.0370056463 - 3.51516846e-4 * b_square))
    b_half_slope = 0.398753942 + b_square * (0.0555084694 - 8.78792115e-4 * b_square)
    b_tanh = tanh(b_x, INTERPRETED)
    return 0.5 + 0.5 * b_tanh + b_h * b_half_slope * (1.0 - b_tanh * b_tanh)


@triton.jit
def tile_offsets(
    INNER: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Row, column and inner offsets of a program's tile of y, and the offsets of its first tile of x (rows, inner).

    Tiles that read the same of x follow each other.
    """
    N_BLOCKS: tl.constexpr = (COLUMNS + BLOCK_N - 1) // BLOCK_N
    i = tl.program_id(0)
    o_m = (i // N_BLOCKS) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = (i % N_BLOCKS) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_k = tl.arange(0, BLOCK_K)
    # 64-bit before the strides: a batch of large maps has more than 2^31 elements.
    return o_m, o_n, o_k, o_m.to(tl.int64)[:, None] * INNER + o_k[None, :]


@triton.jit
def output_offsets(o_m, o_n, rows, COLUMNS: tl.constexpr):
    """Offsets and mask of a tile of y (rows, columns)."""
    return o_m.to(tl.int64)[:, None] * COLUMNS + o_n[None, :], (o_m < rows)[:, None] & (o_n < COLUMNS)[None, :]


@triton.jit
def product_kernel(
    p_x, p_high, p_low, p_bias, p_add, p_y, rows,
    INNER: tl.constexpr, COLUMNS: tl.constexpr, STRIDE_N: tl.constexpr, STRIDE_K: tl.constexpr, BIAS: tl.constexpr,
    GELU: tl.constexpr, ADD: tl.constexpr, SLOPE: tl.constexpr, SPLIT: tl.constexpr, PARTS: tl.constexpr,
    UNSPLIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """A tile of y (rows, columns), or of one of its parts (parts, rows, columns), each a sum over a share of the steps.

    UNSPLIT: the weight comes in one part, and is split here.
    """
    STEPS: tl.constexpr = (INNER + BLOCK_K - 1) // BLOCK_K
    SHARE: tl.constexpr = (STEPS + PARTS - 1) // PARTS * BLOCK_K
    o_m, o_n, o_k, o_x = tile_offsets(INNER, COLUMNS, BLOCK_M, BLOCK_N, BLOCK_K)
    m_m = (o_m < rows)[:, None]
    b_y = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    i_first = 0
    if PARTS > 1:
        i_first = tl.program_id(1) * SHARE
    for i_step in range(0, SHARE, BLOCK_K):
        i_k = i_first + i_step
        b_x = tl.load(p_x + o_x + i_k, mask=m_m & (i_k + o_k < INNER)[None, :], other=0.0)
        b_high = load_weight(p_high, i_k, o_n, o_k, INNER, COLUMNS, STRIDE_N, STRIDE_K)
        b_low = b_high
        if SPLIT and not UNSPLIT:
            b_low = load_weight(p_low, i_k, o_n, o_k, INNER, COLUMNS, STRIDE_N, STRIDE_K)
        b_y = multiply(b_x, b_high, b_low, b_y, SPLIT and not UNSPLIT, INTERPRETED)
    if PARTS > 1:
        o_y, m_y = output_offsets(o_m, o_n, rows, COLUMNS)
        tl.store(p_y + tl.program_id(1) * rows * COLUMNS + o_y, b_y, mask=m_y)
    elif SLOPE and not SPLIT:
        # In halves, so that a thread holds less of what is read now.
        b_left, b_right = tl.split(tl.permute(tl.reshape(b_y, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1)))
        o_left = tl.program_id(0) % ((COLUMNS + BLOCK_N - 1) // BLOCK_N) * BLOCK_N + tl.arange(0, BLOCK_N // 2)
        o_right = o_left + BLOCK_N // 2
        store_tile(b_left, p_bias, p_add, p_y, o_m, o_left, rows, COLUMNS, BIAS, GELU, ADD, SLOPE, SPLIT, INTERPRETED)
        store_tile(b_right, p_bias, p_add, p_y, o_m, o_right, rows, COLUMNS, BIAS, GELU, ADD, SLOPE, SPLIT, INTERPRETED)
    else:
        store_tile(b_y, p_bias, p_add, p_y, o_m, o_n, rows, COLUMNS, BIAS, GELU, ADD, SLOPE, SPLIT, INTERPRETED)


@triton.jit
def store_tile(
    b_y, p_bias, p_add, p_y, o_m, o_n, rows,
    COLUMNS: tl.constexpr, BIAS: tl.constexpr, GELU: tl.constexpr, ADD: tl.constexpr, SLOPE: tl.constexpr,
    SPLIT: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Apply the epilogue to a tile of y and write it."""
    o_y, m_y = output_offsets(o_m, o_n, rows, COLUMNS)
    b_y = epilogue(b_y, p_bias, p_add, o_n, o_y, m_y, COLUMNS, BIAS, GELU, ADD, SLOPE, SPLIT, INTERPRETED)
    tl.store(p_y + o_y, b_y.to(p_y.dtype.element_ty), mask=m_y)


@triton.jit
def epilogue(
    b_y, p_bias, p_add, o_n, o_y, m_y,
    COLUMNS: tl.constexpr, BIAS: tl.constexpr, GELU: tl.constexpr, ADD: tl.constexpr, SLOPE: tl.constexpr,
    SPLIT: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Bias, GELU, residual or derivative of GELU, on a tile of y."""
    if BIAS:
        b_y += tl.load(p_bias + o_n, mask=o_n < COLUMNS, other=0.0).to(tl.float32)[None, :]
    if GELU:
        b_y = gelu(b_y, SPLIT, INTERPRETED)
    if ADD:
        b_y += tl.load(p_add + o_y, mask=m_y, other=0.0).to(tl.float32)
    if SLOPE:
        b_y *= gelu_slope(tl.load(p_add + o_y, mask=m_y, other=0.0).to(tl.float32), SPLIT, INTERPRETED)
    return b_y


@triton.jit
def add_parts_kernel(
    p_parts, p_bias, p_add, p_y, rows,
    COLUMNS: tl.constexpr, BIAS: tl.constexpr, GELU: tl.constexpr, ADD: tl.constexpr, SLOPE: tl.constexpr,
    SPLIT: tl.constexpr, PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """A tile of y from its parts (parts, rows, columns)."""
    o_m, o_n, _, _ = tile_offsets(1, COLUMNS, BLOCK_M, BLOCK_N, 1)
    o_y, m_y = output_offsets(o_m, o_n, rows, COLUMNS)
    b_y = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for i_part in tl.static_range(PARTS):
        b_y += tl.load(p_parts + o_y + i_part * rows * COLUMNS, mask=m_y, other=0.0)
    b_y = epilogue(b_y, p_bias, p_add, o_n, o_y, m_y, COLUMNS, BIAS, GELU, ADD, SLOPE, SPLIT, INTERPRETED)
    tl.store(p_y + o_y, b_y.to(p_y.dtype.element_ty), mask=m_y)


@triton.jit
def hidden_gradient_kernel(
    p_dy, p_x, p_high1, p_low1, p_bias1, p_high2, p_low2, p_dh, rows,
    INNER: tl.constexpr, COLUMNS: tl.constexpr, STRIDE_N: tl.constexpr, STRIDE_K: tl.constexpr,
    STRIDE_N2: tl.constexpr, STRIDE_K2: tl.constexpr, SPLIT: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """A tile of dh (rows, columns): dy @ weight2.T times the derivative of GELU at h."""
    o_m, o_n, o_k, o_x = tile_offsets(INNER, COLUMNS, BLOCK_M, BLOCK_N, BLOCK_K)
    m_m = (o_m < rows)[:, None]
    b_h = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    b_dg = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for i_k in range(0, INNER, BLOCK_K):
        mask = m_m & (i_k + o_k < INNER)[None, :]
        b_x = tl.load(p_x + o_x + i_k, mask=mask, other=0.0)
        b_dy = tl.load(p_dy + o_x + i_k, mask=mask, other=0.0)
        b_high1 = load_weight(p_high1, i_k, o_n, o_k, INNER, COLUMNS, STRIDE_N, STRIDE_K)
        b_high2 = load_weight(p_high2, i_k, o_n, o_k, INNER, COLUMNS, STRIDE_N2, STRIDE_K2)
        b_low1 = b_high1
        b_low2 = b_high2
        if SPLIT:
            b_low1 = load_weight(p_low1, i_k, o_n, o_k, INNER, COLUMNS, STRIDE_N, STRIDE_K)
            b_low2 = load_weight(p_low2, i_k, o_n, o_k, INNER, COLUMNS, STRIDE_N2, STRIDE_K2)
        b_h = multiply(b_x, b_high1, b_low1, b_h, SPLIT, INTERPRETED)
        b_dg = multiply(b_dy, b_high2, b_low2, b_dg, SPLIT, INTERPRETED)
    b_h += tl.load(p_bias1 + o_n, mask=o_n < COLUMNS, other=0.0).to(tl.float32)[None, :]
    b_slope = gelu_slope(b_h, SPLIT, INTERPRETED)
    o_y, m_y = output_offsets(o_m, o_n, rows, COLUMNS)
    tl.store(p_dh + o_y, (b_dg * b_slope).to(p_dh.dtype.element_ty), mask=m_y)


@triton.jit(do_not_specialize=["share"])
def weight_gradient_kernel(
    p_dy, p_x, p_partial, rows, share,
    COLUMNS: tl.constexpr, INNER: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A tile of a partial sum (columns, inner) over a share of the rows."""
    N_BLOCKS: tl.constexpr = (COLUMNS + BLOCK - 1) // BLOCK
    K_BLOCKS: tl.constexpr = (INNER + BLOCK - 1) // BLOCK
    i = tl.program_id(0)
    i_part = (i // (N_BLOCKS * K_BLOCKS)).to(tl.int64)
    o_n = i % N_BLOCKS * BLOCK + tl.arange(0, BLOCK)
    o_k = i // N_BLOCKS % K_BLOCKS * BLOCK + tl.arange(0, BLOCK)
    b_sum = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for i_step in range(share):
        o_m = (i_part * share + i_step) * BLOCK_M + tl.arange(0, BLOCK_M)
        m_m = (o_m < rows)[:, None]
        b_dy = tl.load(p_dy + o_m[:, None] * COLUMNS + o_n[None, :], mask=m_m & (o_n < COLUMNS)[None, :], other=0.0)
        b_x = tl.load(p_x + o_m[:, None] * INNER + o_k[None, :], mask=m_m & (o_k < INNER)[None, :], other=0.0)
        b_sum = dot(tl.trans(b_dy), b_x, b_sum, False, False)
    o_out = (i_part * COLUMNS + o_n[:, None]) * INNER + o_k[None, :]
    tl.store(p_partial + o_out, b_sum, mask=(o_n < COLUMNS)[:, None] & (o_k < INNER)[None, :])
