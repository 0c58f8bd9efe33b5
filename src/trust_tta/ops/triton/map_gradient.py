"""The gradient of SS2D's map in half precision, from those of its sequences and of what was projected from them.

A tile of the map gathers both sequences' gradients, multiplies what flows back through the projection, and passes SiLU:
the gradient of the sequences as a whole is never written.
"""

# mypy: ignore-errors
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from trust_tta.ops.triton.launch import ceil_div, is_rough, power_of_two
from trust_tta.ops.triton.layout import merged, sigmoid, tile
from trust_tta.ops.triton.matmul import dot


def map_gradient(du: Tensor, dprojected: Tensor, weight: Tensor, x: Tensor) -> Tensor:
    """The gradient of x (b, c, h, w), of which SiLU's sequences have the gradients du + weight.mT @ dprojected.

    du (b, 2, c, h*w), dprojected (b, 2, k, h*w), weight (.., 2, k, c).
    """
    batch, channels, height, width = x.shape
    rows = dprojected.shape[2]
    dx = x.new_empty((batch, height, width, channels)).permute(0, 3, 1, 2)
    side, block_c, warps = choose_tile(max(height, width))
    grid = (ceil_div(height, side) * ceil_div(width, side), ceil_div(channels, block_c), batch)
    with torch.cuda.device_of(x):
        map_gradient_kernel[grid](
            du, dprojected, weight, x, dx, *x.stride(), *dx.stride(), CHANNELS=channels, HEIGHT=height, WIDTH=width,
            ROWS=rows, STRIDE_WB=weight.stride(0) if weight.dim() == 4 else 0,
            STRIDE_WG=weight.stride(-3), BLOCK_C=block_c, BLOCK_S=side, BLOCK_K=max(16, power_of_two(rows)),
            ROUGH=is_rough(x), WIDE=x.device.type == "cpu", num_warps=warps, enable_fp_fusion=True,
        )  # fmt: skip
    return dx


def choose_tile(pixels: int) -> tuple[int, int, int]:
    """The side of a tile, its channels, and its warps, for a map with so many pixels to its longer side."""
    return (8, 64, 4) if pixels <= 32 else (8, 32, 4)


@triton.jit
def project_back(
    p_rows, p_w, o_place, o_c, m_pixels,
    CHANNELS: tl.constexpr, LENGTH: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """rows (k, positions) transposed @ weight (k, channels) for pixels (h, w, 1) at their places: (h, w, channels)."""
    SIDE: tl.constexpr = m_pixels.shape[0]
    o_k = tl.arange(0, BLOCK_K)
    o_rows = o_k[None, None, :] * LENGTH + o_place
    b_rows = tl.load(p_rows + o_rows, mask=m_pixels & (o_k < ROWS)[None, None, :], other=0.0)
    m_w = (o_k < ROWS)[:, None] & (o_c < CHANNELS)[None, :]
    b_w = tl.load(p_w + o_k[:, None] * CHANNELS + o_c[None, :], mask=m_w, other=0.0)
    b_rows = tl.reshape(b_rows, (SIDE * SIDE, BLOCK_K))
    b_x = dot(b_rows, b_w, tl.zeros((SIDE * SIDE, o_c.shape[0]), dtype=tl.float32), False, WIDE)
    return tl.reshape(b_x, (SIDE, SIDE, o_c.shape[0]))


@triton.jit
def map_gradient_kernel(
    p_du, p_rows, p_w, p_x, p_dx, s_b, s_c, s_h, s_w, t_b, t_c, t_h, t_w,
    CHANNELS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, STRIDE_WB: tl.constexpr,
    STRIDE_WG: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr, ROUGH: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """A tile of dx: pixels x channels."""
    LENGTH: tl.constexpr = HEIGHT * WIDTH
    o_h, o_w, o_c, o_rows, o_columns, mask = tile(
        tl.program_id(0), tl.program_id(1), CHANNELS, HEIGHT, WIDTH, BLOCK_C, BLOCK_S
    )
    i_b = tl.program_id(2).to(tl.int64)
    p_rows += i_b * (2 * ROWS * LENGTH)
    p_w += i_b * STRIDE_WB
    o_channels = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    m_pixels = (o_h < HEIGHT) & (o_w < WIDTH)
    b_dx = merged(p_du + i_b * (2 * CHANNELS * LENGTH), o_rows, o_columns, mask)
    b_dx += project_back(p_rows, p_w, o_h * WIDTH + o_w, o_channels, m_pixels, CHANNELS, LENGTH, ROWS, BLOCK_K, WIDE)
    b_dx += project_back(
        p_rows + ROWS * LENGTH, p_w + STRIDE_WG, o_w * HEIGHT + o_h, o_channels, m_pixels,
        CHANNELS, LENGTH, ROWS, BLOCK_K, WIDE,
    )  # fmt: skip
    b_x = tl.load(p_x + i_b * s_b + o_h * s_h + o_w * s_w + o_c * s_c, mask=mask, other=0.0).to(tl.float32)
    b_s = sigmoid(b_x, ROUGH)
    b_dx *= b_s * (1 + b_x * (1 - b_s))
    tl.store(p_dx + i_b * t_b + o_h * t_h + o_w * t_w + o_c * t_c, b_dx.to(p_dx.dtype.element_ty), mask=mask)
