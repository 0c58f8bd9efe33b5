"""Convolutions of images and of narrow maps, images cast and padded for them, `convolution.extract_patches` and its
adjoint on a CUDA device, each in one pass over the map."""

# mypy: ignore-errors
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from trust_tta.ops.triton.launch import ceil_div, power_of_two
from trust_tta.ops.triton.matmul import dot


def pad_channels(x: Tensor, channels: int, dtype: torch.dtype) -> Tensor:
    """x (b, c, h, w) in `dtype` with channels of zeros behind its own, channel-last in memory."""
    b, c, h, w = x.shape
    padded = x.new_empty((b, h, w, channels), dtype=dtype)
    with torch.cuda.device_of(x):
        pad_channels_kernel[(ceil_div(b * h * w, 256),)](
            x, padded, *x.stride(), b * h * w, OWN=c, CHANNELS=channels, HEIGHT=h, WIDTH=w, BLOCK=256, num_warps=4,
            enable_fp_fusion=True,
        )  # fmt: skip
    return padded.permute(0, 3, 1, 2)


def convolve(x: Tensor, weight: Tensor, dtype: torch.dtype, stride: int, padding: int) -> Tensor:
    """Convolve x (b, c, h, w), of few channels, with weight (out, c, k, k) in `dtype`; channel-last in memory."""
    b, c, h, w = x.shape
    out, size = weight.shape[0], weight.shape[2]
    height, width = ((n + 2 * padding - size) // stride + 1 for n in (h, w))
    y = x.new_empty((b, height, width, out), dtype=dtype)
    pixels = b * height * width
    with torch.cuda.device_of(x):
        convolve_kernel[(ceil_div(pixels, 128),)](
            x, weight.contiguous(), y, *x.stride(), pixels, CHANNELS=c, HEIGHT=h, WIDTH=w, OUT_HEIGHT=height,
            OUT_WIDTH=width, SIZE=size, STRIDE=stride, PADDING=padding, OUT=out, BLOCK_P=128,
            BLOCK_K=max(16, power_of_two(c * size * size)), BLOCK_N=max(16, power_of_two(out)),
            WIDE=x.device.type == "cpu", num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip
    return y.permute(0, 3, 1, 2)


def takes_narrow(channels: int, out: int) -> bool:
    """Whether `convolve_narrow` takes maps of so many channels: libraries have tiles for wider ones only."""
    rest = out - power_of_two(out) // 2
    return channels % 16 == 0 and channels <= 64 and 32 <= out <= 128 and rest >= 16 and rest & (rest - 1) == 0


def convolve_narrow(x: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
    """Convolve x (b, c, h, w) with weight (out, c, k, k), both channel-last in memory and of one half precision."""
    b, c, h, w = x.shape
    out, size = weight.shape[0], weight.shape[2]
    height, width = ((n + 2 * padding - size) // stride + 1 for n in (h, w))
    y = x.new_empty((b, height, width, out))
    pixels, first = b * height * width, power_of_two(out) // 2
    with torch.cuda.device_of(x):
        convolve_narrow_kernel[(ceil_div(pixels, 128),)](
            x, weight, y, pixels, CHANNELS=c, HEIGHT=h, WIDTH=w, OUT_HEIGHT=height, OUT_WIDTH=width, SIZE=size,
            STRIDE=stride, PADDING=padding, FIRST=first, SECOND=out - first, BLOCK_P=128, BLOCK_C=power_of_two(c),
            WIDE=x.device.type == "cpu", num_warps=4, num_stages=3, enable_fp_fusion=True,
        )  # fmt: skip
    return y.permute(0, 3, 1, 2)


def extract_patches(x: Tensor, size: int, stride: int, padding: int) -> Tensor:
    """`convolution.extract_patches` by one kernel."""
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
    """The map (b, c, h, w), channel-last in memory, in which patches (b, height, width, size, size, c) are summed."""
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
def pad_channels_kernel(
    p_x, p_padded, s_b, s_c, s_h, s_w, pixels,
    OWN: tl.constexpr, CHANNELS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """All channels, a power of two, of a run of pixels."""
    # 64-bit before the strides: a batch of large maps has more than 2^31 elements.
    o_p = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    o_c = tl.arange(0, CHANNELS)
    o_x = o_p // (HEIGHT * WIDTH) * s_b + o_p // WIDTH % HEIGHT * s_h + o_p % WIDTH * s_w
    m_p = (o_p < pixels)[:, None]
    b_x = tl.load(p_x + o_x[:, None] + o_c[None, :] * s_c, mask=m_p & (o_c < OWN)[None, :], other=0.0)
    o_out = o_p[:, None] * CHANNELS + o_c[None, :]
    tl.store(p_padded + o_out, b_x.to(p_padded.dtype.element_ty), mask=m_p)


@triton.jit
def convolve_kernel(
    p_x, p_w, p_y, s_b, s_c, s_h, s_w, pixels,
    CHANNELS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, OUT_HEIGHT: tl.constexpr,
    OUT_WIDTH: tl.constexpr, SIZE: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr, OUT: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """All output channels of a run of output pixels; a patch is a column of the tile that is read."""
    PATCH: tl.constexpr = CHANNELS * SIZE * SIZE
    # 64-bit before the strides: a batch of large maps has more than 2^31 elements.
    o_p = tl.program_id(0).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
    o_k = tl.arange(0, BLOCK_K)
    o_n = tl.arange(0, BLOCK_N)
    o_h = (o_p // OUT_WIDTH % OUT_HEIGHT * STRIDE - PADDING)[None, :] + (o_k // SIZE % SIZE)[:, None]
    o_w = (o_p % OUT_WIDTH * STRIDE - PADDING)[None, :] + (o_k % SIZE)[:, None]
    o_x = (o_p // (OUT_HEIGHT * OUT_WIDTH) * s_b)[None, :] + (o_k // (SIZE * SIZE) * s_c)[:, None]
    inside = (o_h >= 0) & (o_h < HEIGHT) & (o_w >= 0) & (o_w < WIDTH)
    mask = inside & (o_k < PATCH)[:, None] & (o_p < pixels)[None, :]
    b_x = tl.load(p_x + o_x + o_h * s_h + o_w * s_w, mask=mask, other=0.0).to(p_y.dtype.element_ty)
    m_w = (o_k < PATCH)[:, None] & (o_n < OUT)[None, :]
    b_w = tl.load(p_w + o_n[None, :] * PATCH + o_k[:, None], mask=m_w, other=0.0).to(p_y.dtype.element_ty)
    b_y = dot(tl.trans(b_x), b_w, tl.zeros((BLOCK_P, BLOCK_N), dtype=tl.float32), False, WIDE)
    m_y = (o_p < pixels)[:, None] & (o_n < OUT)[None, :]
    tl.store(p_y + o_p[:, None] * OUT + o_n[None, :], b_y.to(p_y.dtype.element_ty), mask=m_y)


@triton.jit
def load_outputs(p_w, o_n, o_c, m_c, PATCH: tl.constexpr):
    """The weight (channels, outputs) of one place in the patch."""
    return tl.load(p_w + o_n[None, :] * PATCH + o_c[:, None], mask=m_c[:, None], other=0.0)


@triton.jit
def convolve_narrow_kernel(
    p_x, p_w, p_y, pixels,
    CHANNELS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, OUT_HEIGHT: tl.constexpr,
    OUT_WIDTH: tl.constexpr, SIZE: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr, FIRST: tl.constexpr,
    SECOND: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """All output channels, as two powers of two, of a run of output pixels; one place in the patch at a time."""
    PATCH: tl.constexpr = SIZE * SIZE * CHANNELS
    # 64-bit before the strides: a batch of large maps has more than 2^31 elements.
    o_p = tl.program_id(0).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
    o_h = (o_p // OUT_WIDTH % OUT_HEIGHT).to(tl.int32) * STRIDE - PADDING
    o_w = (o_p % OUT_WIDTH).to(tl.int32) * STRIDE - PADDING
    o_x = ((o_p // (OUT_HEIGHT * OUT_WIDTH) * HEIGHT + o_h) * WIDTH + o_w) * CHANNELS
    o_c = tl.arange(0, BLOCK_C)
    o_first = tl.arange(0, FIRST)
    o_second = FIRST + tl.arange(0, SECOND)
    m_c = o_c < CHANNELS
    m_p = o_p < pixels
    b_first = tl.zeros((BLOCK_P, FIRST), dtype=tl.float32)
    b_second = tl.zeros((BLOCK_P, SECOND), dtype=tl.float32)
    for i_place in range(SIZE * SIZE):
        i_h = i_place // SIZE
        i_w = i_place % SIZE
        inside = (o_h + i_h >= 0) & (o_h + i_h < HEIGHT) & (o_w + i_w >= 0) & (o_w + i_w < WIDTH)
        o_at = (o_x + (i_h * WIDTH + i_w) * CHANNELS)[:, None] + o_c[None, :]
        b_x = tl.load(p_x + o_at, mask=(inside & m_p)[:, None] & m_c[None, :], other=0.0)
        o_weight = i_place * CHANNELS + o_c
        b_first = dot(b_x, load_outputs(p_w, o_first, o_weight, m_c, PATCH), b_first, False, WIDE)
        b_second = dot(b_x, load_outputs(p_w, o_second, o_weight, m_c, PATCH), b_second, False, WIDE)
    p_y += o_p[:, None] * (FIRST + SECOND)
    tl.store(p_y + o_first[None, :], b_first.to(p_y.dtype.element_ty), mask=m_p[:, None])
    tl.store(p_y + o_second[None, :], b_second.to(p_y.dtype.element_ty), mask=m_p[:, None])


@triton.jit
def sum_patches_kernel(
    p_patches, p_x,
    CHANNELS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, OUT_HEIGHT: tl.constexpr,
    OUT_WIDTH: tl.constexpr, SIZE: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A run of numbers of one row of the map, each the sum of its places in all patches."""
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
