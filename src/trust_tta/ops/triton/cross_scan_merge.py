"""Cross scan and cross merge of feature maps, with SiLU, in tiles with coalesced access both ways."""

# mypy: ignore-errors
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from trust_tta.ops.triton.layer_norm import layer_norm, layer_norm_backward
from trust_tta.ops.triton.tiling import ceil_div, may_approximate


def cross_scan(x: Tensor, *, silu: bool) -> Tensor:
    """`reference.cross_scan` of x (b, c, h, w), or with `silu` of SiLU(x): (b, 2, c, h*w)."""
    b, c, h, w = x.shape
    u = x.new_empty((b, 2, c, h * w))
    with torch.cuda.device_of(x):
        if not _can_move_pairs(x):
            _launch(cross_scan_kernel, (x, u), x.stride(), u, h, w, _scan_sizes(max(h, w)), SILU=silu)
            return u
        # The side of a tile in cells of 2 x 2 pixels, its pairs of channels, and its warps; the fastest on an H200.
        side, pairs, warps = (32, 4, 4) if max(h, w) > 32 else (16, 4, 4 if silu else 8)
        grid = (ceil_div(h // 2, side) * ceil_div(w // 2, side), ceil_div(c // 2, pairs), b)
        cross_scan_pairs_kernel[grid](
            x.permute(0, 2, 3, 1).view(torch.int32), u.view(torch.int32), CHANNELS=c, HEIGHT=h, WIDTH=w, BLOCK_P=pairs,
            BLOCK_S=side, SILU=silu, APPROX=may_approximate(x), num_warps=warps, enable_fp_fusion=True,
        )  # fmt: skip
    return u


def _can_move_pairs(x: Tensor) -> bool:
    """Whether the map can be moved as pairs of bfloat16, twice as fast as single elements for large maps."""
    b, c, h, w = x.shape
    even = c % 2 == 0 and h % 2 == 0 and w % 2 == 0 and max(h, w) > 16
    return even and x.dtype == torch.bfloat16 and x.is_contiguous(memory_format=torch.channels_last)


def cross_merge(y: Tensor, height: int, width: int, *, silu_of: Tensor | None = None) -> Tensor:
    """`reference.cross_merge` of y (b, 2, c, h*w), times the derivative of SiLU at `silu_of`: (b, c, h, w)."""
    y = y.contiguous()
    x = y.new_empty((y.shape[0], height, width, y.shape[2])).permute(0, 3, 1, 2)
    point = x if silu_of is None else silu_of
    with torch.cuda.device_of(y):
        strides = (*x.stride(), *point.stride())
        sizes = merge_sizes(max(height, width), y.dtype)
        _launch(cross_merge_kernel, (x, point, y), strides, y, height, width, sizes, SILU=silu_of is not None)
    return x


def merge_norm(
    y: Tensor, height: int, width: int, weight: Tensor, bias: Tensor, eps: float, *, keep: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`reference.merge_norm`: normalized map, merged map, its mean and 1 / deviation; `keep=False` reuses memory."""
    x = cross_merge(y, height, width).permute(0, 2, 3, 1)
    norm, mean, scale = layer_norm(x, weight, bias, eps, out=None if keep else x)
    return norm, x, mean, scale


def merge_norm_backward(
    dnorm: Tensor, x: Tensor, mean: Tensor, scale: Tensor, weight: Tensor, *, train: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the sequences (b, 2, c, h*w) that `merge_norm` merged, and as of `layer_norm_backward`."""
    dx, dweight, dbias = layer_norm_backward(dnorm, x, mean, scale, weight, train=train)
    return cross_scan(dx.permute(0, 3, 1, 2), silu=False), dweight, dbias


def _scan_sizes(pixels: int) -> tuple[int, int, int]:
    """Side, channels and warps of a tile, by the longer side of the map."""
    return (8, 32, 4) if pixels <= 8 else (16, 16, 8)


def merge_sizes(pixels: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """`_scan_sizes` for a merge; the fastest on an H200."""
    if pixels <= 8 or dtype == torch.float32:
        return _scan_sizes(pixels)
    return (8, 64, 8) if pixels <= 32 else (16, 32, 8)


def _launch(
    kernel: Any, tensors: tuple[Tensor, ...], strides: tuple[int, ...], u: Tensor, height: int, width: int,
    sizes: tuple[int, int, int], **flag: bool,
) -> None:  # fmt: skip
    side, channels, warps = sizes
    batch, _, count, _ = u.shape
    grid = (ceil_div(height, side) * ceil_div(width, side), ceil_div(count, channels), batch)
    kernel[grid](
        *tensors, *strides, CHANNELS=count, HEIGHT=height, WIDTH=width, BLOCK_C=channels, BLOCK_S=side,
        APPROX=may_approximate(u), num_warps=warps, enable_fp_fusion=True, **flag,
    )  # fmt: skip


@triton.jit
def tile(
    i_tile, i_c,
    CHANNELS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Row, column and channel offsets of a tile, its offsets in both sequences, and its mask, (h, w, c) each."""
    tiles = tl.cdiv(WIDTH, BLOCK_S)
    o_h = ((i_tile // tiles) * BLOCK_S + tl.arange(0, BLOCK_S))[:, None, None]
    o_w = ((i_tile % tiles) * BLOCK_S + tl.arange(0, BLOCK_S))[None, :, None]
    o_c = (i_c * BLOCK_C + tl.arange(0, BLOCK_C))[None, None, :]
    mask = (o_h < HEIGHT) & (o_w < WIDTH) & (o_c < CHANNELS)
    o_rows = o_c * (HEIGHT * WIDTH) + o_h * WIDTH + o_w
    o_columns = (CHANNELS + o_c) * (HEIGHT * WIDTH) + o_w * HEIGHT + o_h
    return o_h, o_w, o_c, o_rows, o_columns, mask


@triton.jit
def sigmoid(b_x, APPROX: tl.constexpr):
    """APPROX: by the hardware reciprocal, within 2^-22, enough for half precision."""
    if not APPROX:
        return tl.sigmoid(b_x)
    b_sum = 1.0 + tl.exp2(b_x * -1.4426950408889634)
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [b_sum], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def cross_scan_kernel(
    p_x, p_u, s_b, s_c, s_h, s_w,
    CHANNELS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
    SILU: tl.constexpr, APPROX: tl.constexpr,
):  # fmt: skip
    o_h, o_w, o_c, o_rows, o_columns, mask = tile(
        tl.program_id(0), tl.program_id(1), CHANNELS, HEIGHT, WIDTH, BLOCK_C, BLOCK_S
    )
    i_b = tl.program_id(2).to(tl.int64)
    b_x = tl.load(p_x + i_b * s_b + o_h * s_h + o_w * s_w + o_c * s_c, mask=mask)
    if SILU:
        b_wide = b_x.to(tl.float32)
        b_x = (b_wide * sigmoid(b_wide, APPROX)).to(p_u.dtype.element_ty)
    p_u += i_b * (2 * CHANNELS * HEIGHT * WIDTH)
    tl.store(p_u + o_rows, b_x, mask=mask)
    tl.store(p_u + o_columns, b_x, mask=mask)


@triton.jit
def _low(b_pair):
    """The first of two bfloat16 in each 32 bits, as float32."""
    return (b_pair << 16).to(tl.float32, bitcast=True)


@triton.jit
def _high(b_pair):
    return (b_pair & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _pack(b_first, b_second, APPROX: tl.constexpr):
    """Two float32 as bfloat16 in 32 bits."""
    if APPROX:  # both at once
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [b_first, b_second], dtype=tl.int32, is_pure=True, pack=1
        )
    b_low = b_first.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 65535
    return b_low | (b_second.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def _silu_pair(b_pair, APPROX: tl.constexpr):
    b_first = _low(b_pair)
    b_second = _high(b_pair)
    return _pack(b_first * sigmoid(b_first, APPROX), b_second * sigmoid(b_second, APPROX), APPROX)


@triton.jit
def _store_pair(p_u, o_u, b_one, b_other, mask, LENGTH: tl.constexpr):
    """Transposes two pixels with two channels each: both pixels of the first channel, then of the second."""
    tl.store(p_u + o_u, (b_one & 65535) | (b_other << 16), mask=mask)
    tl.store(p_u + o_u + LENGTH // 2, ((b_one >> 16) & 65535) | (b_other & -65536), mask=mask)


@triton.jit
def cross_scan_pairs_kernel(
    p_x, p_u,
    CHANNELS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_S: tl.constexpr,
    SILU: tl.constexpr, APPROX: tl.constexpr,
):  # fmt: skip
    """`cross_scan_kernel` for bfloat16: cells of 2 x 2 pixels and pairs of channels, moved as 32-bit words."""
    LENGTH: tl.constexpr = HEIGHT * WIDTH
    tiles = tl.cdiv(WIDTH // 2, BLOCK_S)
    i_tile = tl.program_id(0)
    i_b = tl.program_id(2).to(tl.int64)
    o_h = ((i_tile // tiles) * BLOCK_S + tl.arange(0, BLOCK_S))[:, None, None]
    o_w = ((i_tile % tiles) * BLOCK_S + tl.arange(0, BLOCK_S))[None, :, None]
    o_p = (tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P))[None, None, :]
    mask = (o_h < HEIGHT // 2) & (o_w < WIDTH // 2) & (o_p < CHANNELS // 2)
    p_x += i_b * (LENGTH * (CHANNELS // 2))
    o_x = (o_h * (2 * WIDTH) + o_w * 2) * (CHANNELS // 2) + o_p
    b_00 = tl.load(p_x + o_x, mask=mask, other=0)
    b_01 = tl.load(p_x + o_x + CHANNELS // 2, mask=mask, other=0)
    b_10 = tl.load(p_x + o_x + WIDTH * (CHANNELS // 2), mask=mask, other=0)
    b_11 = tl.load(p_x + o_x + (WIDTH + 1) * (CHANNELS // 2), mask=mask, other=0)
    if SILU:
        b_00, b_01 = _silu_pair(b_00, APPROX), _silu_pair(b_01, APPROX)
        b_10, b_11 = _silu_pair(b_10, APPROX), _silu_pair(b_11, APPROX)
    p_u += i_b * (CHANNELS * LENGTH)
    o_rows = o_p * LENGTH + o_h * WIDTH + o_w
    _store_pair(p_u, o_rows, b_00, b_01, mask, LENGTH)
    _store_pair(p_u, o_rows + WIDTH // 2, b_10, b_11, mask, LENGTH)
    o_columns = (CHANNELS // 2 + o_p) * LENGTH + o_w * HEIGHT + o_h
    _store_pair(p_u, o_columns, b_00, b_10, mask, LENGTH)
    _store_pair(p_u, o_columns + HEIGHT // 2, b_01, b_11, mask, LENGTH)


@triton.jit
def cross_merge_kernel(
    p_x, p_point, p_y, s_b, s_c, s_h, s_w, t_b, t_c, t_h, t_w,
    CHANNELS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
    SILU: tl.constexpr, APPROX: tl.constexpr,
):  # fmt: skip
    o_h, o_w, o_c, o_rows, o_columns, mask = tile(
        tl.program_id(0), tl.program_id(1), CHANNELS, HEIGHT, WIDTH, BLOCK_C, BLOCK_S
    )
    i_b = tl.program_id(2).to(tl.int64)
    p_y += i_b * (2 * CHANNELS * HEIGHT * WIDTH)
    b_x = tl.load(p_y + o_rows, mask=mask).to(tl.float32) + tl.load(p_y + o_columns, mask=mask).to(tl.float32)
    if SILU:
        b_p = tl.load(p_point + i_b * t_b + o_h * t_h + o_w * t_w + o_c * t_c, mask=mask).to(tl.float32)
        b_s = sigmoid(b_p, APPROX)
        b_x *= b_s * (1 + b_p * (1 - b_s))
    tl.store(p_x + i_b * s_b + o_h * s_h + o_w * s_w + o_c * s_c, b_x.to(p_x.dtype.element_ty), mask=mask)
