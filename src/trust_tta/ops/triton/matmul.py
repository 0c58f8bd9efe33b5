"""Matrix products of SS2D: maps with a small weight, and the gradients of such weights.

All are bound by memory, so each number of a large map is moved once. In float32 each factor is the sum of two numbers
that a tensor core takes, and three of their four products are summed: the error stays that of float32.
"""

# mypy: ignore-errors
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from trust_tta.ops.triton.tiling import ceil_div, power_of_two

PROGRAMS = 132  # fill a large GPU once
MAX_LIBRARY_MAPS = 8  # maps of a batch for which the library is slow


def matmul(weight: Tensor, x: Tensor, y: Tensor, *, add: bool = False) -> None:
    """y (b, g, m, l) = weight (.., g, m, k) @ x (b, g, k, l), or y += that; x and y may be slices of rows."""
    b, g, m, length = y.shape
    k = x.shape[2]
    wide, scalar = y.dtype == torch.float32, y.dtype == torch.float32 and m > k
    short = not scalar and (length <= 64 or (m > 32 and length <= 256))
    if wide and (add or short) and b * g > MAX_LIBRARY_MAPS:  # the library is faster
        weights = weight.expand(b, g, m, k).reshape(b * g, m, k)
        y.view(b * g, m, length).baddbmm_(weights, x.reshape(b * g, k, length), beta=int(add))
        return
    block_m, block_k, block_l = choose_tile(m, k, length, b * g)
    warps, stages = 4, 3
    if wide:
        block_k, block_l = min(block_k, 32), min(block_l, 64) if scalar else block_l
    elif not add:
        block_l, warps, stages = choose_launch(m, k, length, block_l)
    with torch.cuda.device_of(y):
        matmul_kernel[(b * g * ceil_div(m, block_m) * ceil_div(length, block_l),)](
            weight, x, y, ADD=add, GROUPS=g, ROWS=m, INNER=k, LENGTH=length,
            STRIDE_WB=weight.stride(0) if weight.dim() == 4 else 0,
            STRIDE_WG=weight.stride(-3), STRIDE_WM=weight.stride(-2), STRIDE_WK=weight.stride(-1),
            STRIDE_XB=x.stride(0), STRIDE_XG=x.stride(1), STRIDE_YB=y.stride(0), STRIDE_YG=y.stride(1),
            BLOCK_M=block_m, BLOCK_K=block_k, BLOCK_L=block_l, SCALAR=scalar, INTERPRETED=is_interpreted(y),
            num_warps=warps, num_stages=stages, enable_fp_fusion=True,
        )  # fmt: skip


def weight_gradient(dy: Tensor, x: Tensor, *, per_image: bool) -> Tensor:
    """Partial sums (p, g, m, k) of dy (b, g, m, l) @ x (b, g, k, l) transposed; x may be a slice of rows.

    Where images have weights of their own, each has one of its own.
    """
    b, g, m, length = dy.shape
    k = x.shape[2]
    block_m, block_k, block_l = block_size(m, 128), block_size(k, 64), 64 if length <= 256 else 128
    if dy.dtype == torch.float32:
        if length <= 64:
            return dy @ x.mT
        block_l = 32
    chunks, tiles = ceil_div(length, block_l), g * ceil_div(m, block_m) * ceil_div(k, block_k)
    # A program's share is a run of chunks, of several images where the maps are small.
    share = chunks if per_image else ceil_div(b * chunks, ceil_div(4 * PROGRAMS, tiles))
    partial = dy.new_empty((ceil_div(b * chunks, share), g, m, k), dtype=torch.float32)
    with torch.cuda.device_of(dy):
        weight_gradient_kernel[(len(partial) * tiles,)](
            dy, x, partial, b * chunks, share, GROUPS=g, ROWS=m, COLUMNS=k, LENGTH=length,
            STRIDE_YB=dy.stride(0), STRIDE_YG=dy.stride(1), STRIDE_XB=x.stride(0), STRIDE_XG=x.stride(1),
            BLOCK_M=block_m, BLOCK_K=block_k, BLOCK_L=block_l, INTERPRETED=is_interpreted(dy), enable_fp_fusion=True,
        )  # fmt: skip
    return partial


def choose_tile(rows: int, inner: int, length: int, maps: int) -> tuple[int, int, int]:
    """Rows, inner and positions of a tile; small tiles where there are few."""
    positions = 64 if length <= 64 else 128
    if maps * ceil_div(rows, 64) * ceil_div(length, positions) < PROGRAMS:
        return block_size(rows, 32), block_size(inner, 128), 32
    return block_size(rows, 64), block_size(inner, 64), positions


def choose_launch(rows: int, inner: int, length: int, positions: int) -> tuple[int, int, int]:
    """Positions of a tile, warps and stages, in half precision; the fastest on an H200 at the stages of VMamba-T."""
    if inner <= 16 < rows:
        return positions, 2, 3
    if not 64 < length <= 256 or positions < 128:
        return positions, 4, 3
    if inner <= 32 < rows:
        return 256, 4, 3
    return (positions, 8, 3) if rows <= 32 else (positions, 4, 2)


def block_size(size: int, most: int) -> int:
    """The smallest power of two of at least `size`, from 16 (tensor cores) to `most`."""
    return min(most, max(16, power_of_two(size)))


def is_interpreted(x: Tensor) -> bool:
    return x.device.type == "cpu"


@triton.jit
def tf32_high(b_x):
    """Float32 values rounded to TF32: the 10 mantissa bits that a tensor core reads."""
    return (b_x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)


@triton.jit
def split_dot(b_x, b_y_top, b_y_rest, b_sum):
    """x @ y + sum with the error of float32 (3 x TF32); the product of both low parts is below that error.

    A tensor core cuts its sums off instead of rounding them: short ones lose little, and are added up outside.
    """
    b_x_top = tf32_high(b_x)
    b_part = tl.dot(b_x - b_x_top, b_y_top, input_precision="tf32")
    b_part = tl.dot(b_x_top, b_y_rest, b_part, input_precision="tf32")
    return b_sum + tl.dot(b_x_top, b_y_top, b_part, input_precision="tf32")


@triton.jit
def dot(b_x, b_y, b_sum, SCALAR: tl.constexpr, INTERPRETED: tl.constexpr):
    """x @ y + sum; in float32 with its full precision."""
    if b_x.dtype == tl.float32:
        if SCALAR:
            return tl.dot(b_x, b_y, b_sum, input_precision="ieee")
        b_top = tf32_high(b_y)
        return split_dot(b_x, b_top, b_y - b_top, b_sum)
    if INTERPRETED:
        # Triton's interpreter would multiply the bits of bfloat16; the products are the same.
        b_x, b_y = b_x.to(tl.float32), b_y.to(tl.float32)
    return tl.dot(b_x, b_y, b_sum)


@triton.jit
def load_rows(p_x, o_m, o_l, ROWS: tl.constexpr, LENGTH: tl.constexpr):
    """A tile of x (rows, positions), zero past its ends."""
    mask = (o_m < ROWS)[:, None] & (o_l < LENGTH)[None, :]
    return tl.load(p_x + o_m[:, None] * LENGTH + o_l[None, :], mask=mask, other=0.0)


@triton.jit
def load_chunk(
    p_dy, p_x, i_chunk, o_m, o_k,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, LENGTH: tl.constexpr, STRIDE_YB: tl.constexpr, STRIDE_XB: tl.constexpr,
    BLOCK_L: tl.constexpr,
):  # fmt: skip
    """Tiles of dy and x at a chunk of positions; chunks are counted over all images."""
    L_BLOCKS: tl.constexpr = (LENGTH + BLOCK_L - 1) // BLOCK_L
    # 64-bit before the strides: a batch of large maps has more than 2^31 elements.
    i_b = (i_chunk // L_BLOCKS).to(tl.int64)
    o_l = i_chunk % L_BLOCKS * BLOCK_L + tl.arange(0, BLOCK_L)
    b_dy = load_rows(p_dy + i_b * STRIDE_YB, o_m, o_l, ROWS, LENGTH)
    return b_dy, load_rows(p_x + i_b * STRIDE_XB, o_k, o_l, COLUMNS, LENGTH)


@triton.jit
def matmul_kernel(
    p_w, p_x, p_y,
    ADD: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr, INNER: tl.constexpr, LENGTH: tl.constexpr,
    STRIDE_WB: tl.constexpr, STRIDE_WG: tl.constexpr, STRIDE_WM: tl.constexpr, STRIDE_WK: tl.constexpr,
    STRIDE_XB: tl.constexpr, STRIDE_XG: tl.constexpr, STRIDE_YB: tl.constexpr, STRIDE_YG: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_L: tl.constexpr, SCALAR: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """A tile of y (rows, positions) of one image and group; tiles that read the same of x follow each other.

    SCALAR: without tensor cores; for so few rows of x that splitting them would take longer.
    """
    M_BLOCKS: tl.constexpr = (ROWS + BLOCK_M - 1) // BLOCK_M
    L_BLOCKS: tl.constexpr = (LENGTH + BLOCK_L - 1) // BLOCK_L
    i = tl.program_id(0)
    # 64-bit before the strides: a batch of large maps has more than 2^31 elements.
    i_bg = (i // (M_BLOCKS * L_BLOCKS)).to(tl.int64)
    i_b = i_bg // GROUPS
    i_g = i_bg % GROUPS
    p_w += i_b * STRIDE_WB + i_g * STRIDE_WG
    p_x += i_b * STRIDE_XB + i_g * STRIDE_XG
    p_y += i_b * STRIDE_YB + i_g * STRIDE_YG
    o_m = i % M_BLOCKS * BLOCK_M + tl.arange(0, BLOCK_M)
    o_l = i // M_BLOCKS % L_BLOCKS * BLOCK_L + tl.arange(0, BLOCK_L)
    b_y = tl.zeros((BLOCK_M, BLOCK_L), dtype=tl.float32)
    for i_k in range(0, INNER, BLOCK_K):
        o_k = i_k + tl.arange(0, BLOCK_K)
        o_w = o_m[:, None] * STRIDE_WM + o_k[None, :] * STRIDE_WK
        b_w = tl.load(p_w + o_w, mask=(o_m < ROWS)[:, None] & (o_k < INNER)[None, :], other=0.0)
        b_y = dot(b_w, load_rows(p_x, o_k, o_l, INNER, LENGTH), b_y, SCALAR, INTERPRETED)
    if ADD:
        b_y += load_rows(p_y, o_m, o_l, ROWS, LENGTH).to(tl.float32)
    o_y = o_m[:, None] * LENGTH + o_l[None, :]
    tl.store(p_y + o_y, b_y.to(p_y.dtype.element_ty), mask=(o_m < ROWS)[:, None] & (o_l < LENGTH)[None, :])


@triton.jit(do_not_specialize=["chunks", "share"])
def weight_gradient_kernel(
    p_dy, p_x, p_out, chunks, share,
    GROUPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, LENGTH: tl.constexpr, STRIDE_YB: tl.constexpr,
    STRIDE_YG: tl.constexpr, STRIDE_XB: tl.constexpr, STRIDE_XG: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_L: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """A tile of a partial sum (rows, columns) of one group, over its share of all images' chunks of positions."""
    M_BLOCKS: tl.constexpr = (ROWS + BLOCK_M - 1) // BLOCK_M
    K_BLOCKS: tl.constexpr = (COLUMNS + BLOCK_K - 1) // BLOCK_K
    i = tl.program_id(0)
    o_m = i % M_BLOCKS * BLOCK_M + tl.arange(0, BLOCK_M)
    o_k = i // M_BLOCKS % K_BLOCKS * BLOCK_K + tl.arange(0, BLOCK_K)
    i_g = i // (M_BLOCKS * K_BLOCKS) % GROUPS
    i_part = i // (M_BLOCKS * K_BLOCKS * GROUPS)
    i_first = i_part * share
    b_sum = tl.zeros((BLOCK_M, BLOCK_K), dtype=tl.float32)
    for i_step in range(tl.minimum(share, chunks - i_first)):
        b_dy, b_x = load_chunk(
            p_dy + i_g * STRIDE_YG, p_x + i_g * STRIDE_XG, i_first + i_step, o_m, o_k, ROWS, COLUMNS, LENGTH, STRIDE_YB,
            STRIDE_XB, BLOCK_L,
        )  # fmt: skip
        b_sum = dot(b_dy, tl.trans(b_x), b_sum, False, INTERPRETED)
    o_out = (i_part.to(tl.int64) * GROUPS + i_g) * (ROWS * COLUMNS)
    m_out = (o_m < ROWS)[:, None] & (o_k < COLUMNS)[None, :]
    tl.store(p_out + o_out + o_m[:, None] * COLUMNS + o_k[None, :], b_sum, mask=m_out)
