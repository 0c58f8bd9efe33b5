"""Batch normalization of channel-last maps on a CUDA device, by the statistics of the batch, forward and backward.

Sums over the pixels leave as partial sums, each written by one program, so that two runs agree bit for bit.
"""

# mypy: ignore-errors
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trust_tta.ops.triton.tiling import ceil_div, power_of_two

PROGRAMS = 132 * 8  # fill a large GPU
ELEMENTS = 2048  # elements of a program's block


class StreamStatistics(NamedTuple):
    """Stream statistics of one norm: means and variances (c,) in float32, and scalars.

    `memory_*`: before the batch, whose images count for `count`, each for `samples`; then where it is written to;
    `source_*`: of training.
    """

    memory_mean: Tensor
    memory_variance: Tensor
    memory_images: Tensor
    memory_image_variance: Tensor
    count: Tensor
    samples: Tensor
    mean: Tensor
    variance: Tensor
    images: Tensor
    image_variance: Tensor
    share: Tensor
    source_mean: Tensor
    source_variance: Tensor


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance (c,) of x (rows, c), in float32."""
    rows, channels = x.shape
    grid, share, sizes = _blocks(rows, channels, times=_times(x))
    parts = grid[0] // ceil_div(channels, int(sizes["BLOCK_C"]))
    partial = x.new_empty((2, parts, channels), dtype=torch.float32)
    mean, variance = x.new_empty((2, channels), dtype=torch.float32)
    with torch.cuda.device_of(x):
        sum_kernel[grid](x, x, mean, variance, partial, rows, parts, share, 0.0, BACKWARD=False, **sizes)
        _finish(partial, x, mean, variance, rows, BACKWARD=False)
    return mean, variance


def sums(dy: Tensor, x: Tensor, mean: Tensor, variance: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Sums (c,) over the rows of dy (rows, c) and of dy times the normalized x: the gradients of bias and weight."""
    rows, channels = x.shape
    grid, share, sizes = _blocks(rows, channels, larger=2, times=_times(x))  # faster for two maps
    parts = grid[0] // ceil_div(channels, int(sizes["BLOCK_C"]))
    partial = x.new_empty((2, parts, channels), dtype=torch.float32)
    dbias, dweight = x.new_empty((2, channels), dtype=torch.float32)
    with torch.cuda.device_of(x):
        sum_kernel[grid](dy, x, mean, variance, partial, rows, parts, share, eps, BACKWARD=True, **sizes)
        _finish(partial, x, dbias, dweight, rows, BACKWARD=True)
    return dbias, dweight


def normalize(x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """x (rows, c) less its mean over its deviation, times weight, plus bias; in the dtype of x."""
    y = torch.empty_like(x)
    grid, _, sizes = _blocks(*x.shape, whole=True)
    with torch.cuda.device_of(x):
        normalize_kernel[grid](x, mean, variance, weight, bias, y, len(x), eps, **sizes)
    return y


def input_gradient(
    dy: Tensor, x: Tensor, saved: tuple[Tensor, Tensor, Tensor], totals: tuple[Tensor, Tensor], eps: float,
    *, add: Tensor | None,
) -> Tensor:  # fmt: skip
    """The gradient (rows, c) of x, plus `add`; `saved` are mean, variance and weight, `totals` what `sums` gave."""
    dx = torch.empty_like(x)
    grid, _, sizes = _blocks(*x.shape, whole=True)
    with torch.cuda.device_of(x):
        input_gradient_kernel[grid](
            dy, x, *saved, *totals, x if add is None else add, dx, len(x), 1 / len(x), eps, ADD=add is not None, **sizes
        )
    return dx


def normalize_small(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """x (rows, c), of few rows, normalized by its own moments, and these, in one kernel."""
    y, (mean, variance) = torch.empty_like(x), x.new_empty((2, x.shape[1]), dtype=torch.float32)
    grid, sizes = _columns(x)
    with torch.cuda.device_of(x):
        normalize_small_kernel[grid](x, weight, bias, y, mean, variance, len(x), eps, **sizes)
    return y, mean, variance


def small_gradients(
    dy: Tensor, x: Tensor, saved: tuple[Tensor, Tensor, Tensor], eps: float, *, add: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, plus `add`, of the bias and of the weight; `saved` as of `input_gradient`."""
    dx, (dbias, dweight) = torch.empty_like(x), x.new_empty((2, x.shape[1]), dtype=torch.float32)
    grid, sizes = _columns(x)
    with torch.cuda.device_of(x):
        small_gradients_kernel[grid](
            dy, x, *saved, x if add is None else add, dx, dbias, dweight, len(x), eps, ADD=add is not None, **sizes
        )
    return dx, dbias, dweight


def _columns(x: Tensor) -> tuple[tuple[int], dict[str, int | bool]]:
    """Grid of programs that hold all rows of a block of channels, and the block sizes."""
    rows, channels = x.shape
    block_c = 16 if rows <= 256 else 8
    sizes = {"CHANNELS": channels, "BLOCK_R": power_of_two(rows), "BLOCK_C": block_c, "enable_fp_fusion": True}
    return (ceil_div(channels, block_c),), {**sizes, "num_warps": 4 if rows <= 256 else 8}


def follow_stream(
    batch: tuple[Tensor, Tensor, Tensor], stream: StreamStatistics, affine: tuple[Tensor, Tensor],
    mixing: tuple[float, float] | None, eps: float, fading: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Update the stream's statistics; see `batch_norm.follow_stream`. The third result (2, c) is for the backward."""
    mean = batch[0]
    made = mean.new_empty((4, len(mean)))
    with torch.cuda.device_of(mean):
        follow_stream_kernel[(1,)](
            *batch, *stream, *affine, made, *(mixing or (0.0, 0.0)), eps, fading,
            MIXED=mixing is not None, CHANNELS=len(mean), BLOCK_C=power_of_two(len(mean)), num_warps=4,
            enable_fp_fusion=True,
        )  # fmt: skip
    return made[0], made[1], made[2:]


def _times(x: Tensor) -> int:
    """Factor of the block size: in half precision, fewer programs with larger blocks sum faster."""
    return 1 if x.dtype == torch.float32 else 2


def _blocks(
    rows: int, channels: int, *, whole: bool = False, larger: int = 1, times: int = 1
) -> tuple[tuple[int], int, dict[str, int | bool]]:
    """The programs (parts of the rows x blocks of channels), the blocks of rows in a part, and the sizes of a block.

    Of a `whole` map each program takes one block; of sums it takes several, of `times` the usual size.
    """
    block_c = channels & -channels  # the largest power of two that leaves no rest
    block_c = min(128, block_c if block_c >= 16 else power_of_two(channels))
    block_r = times * larger * ELEMENTS // block_c
    columns, blocks = ceil_div(channels, block_c), ceil_div(rows, block_r)
    share = 1 if whole else ceil_div(blocks, ceil_div(PROGRAMS, times**2 * larger * columns))
    sizes = {"CHANNELS": channels, "BLOCK_R": block_r, "BLOCK_C": block_c, "num_warps": 4, "enable_fp_fusion": True}
    return (ceil_div(blocks, share) * columns,), share, sizes


def _finish(partial: Tensor, x: Tensor, first: Tensor, second: Tensor, rows: int, **flag: bool) -> None:
    channels = x.shape[1]
    finish_kernel[(ceil_div(channels, 16),)](
        partial, x, first, second, partial.shape[1], channels, 1 / rows, BLOCK_P=64, BLOCK_C=16, num_warps=4,
        enable_fp_fusion=True, **flag,
    )  # fmt: skip


@triton.jit
def _place(CHANNELS: tl.constexpr, BLOCK_C: tl.constexpr):
    """Part of the rows and channels of a program; programs with the same rows are adjacent."""
    COLUMNS: tl.constexpr = (CHANNELS + BLOCK_C - 1) // BLOCK_C
    i = tl.program_id(0)
    return i // COLUMNS, i % COLUMNS * BLOCK_C + tl.arange(0, BLOCK_C)


@triton.jit
def _tile(i_r, o_c, rows, CHANNELS: tl.constexpr, BLOCK_R: tl.constexpr):
    """Offsets and mask of a block (rows, channels)."""
    # 64-bit before the strides: a batch of large maps has more than 2^31 elements.
    o_r = i_r.to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    return o_r[:, None] * CHANNELS + o_c[None, :], (o_r < rows)[:, None] & (o_c < CHANNELS)[None, :]


@triton.jit
def _load_channel(p_x, o_c, CHANNELS: tl.constexpr):
    return tl.load(p_x + o_c, mask=o_c < CHANNELS, other=0.0).to(tl.float32)[None, :]


@triton.jit(do_not_specialize=["rows", "parts", "share"])
def sum_kernel(
    p_x, p_other, p_mean, p_variance, p_partial, rows, parts, share, eps,
    CHANNELS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """Partial sums of x and of x^2, x measured from its first row; or of dy and of dy times the normalized other."""
    i_part, o_c = _place(CHANNELS, BLOCK_C)
    if BACKWARD:
        b_mean = _load_channel(p_mean, o_c, CHANNELS)
        b_scale = tl.rsqrt(_load_channel(p_variance, o_c, CHANNELS) + eps)
    else:
        b_mean = _load_channel(p_x, o_c, CHANNELS)
    b_first = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.float32)
    b_second = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.float32)
    for i_step in tl.range(0, share, num_stages=4):
        o_x, mask = _tile(i_part * share + i_step, o_c, rows, CHANNELS, BLOCK_R)
        b_x = tl.load(p_x + o_x, mask=mask, other=0.0).to(tl.float32)
        if BACKWARD:
            b_other = (tl.load(p_other + o_x, mask=mask, other=0.0).to(tl.float32) - b_mean) * b_scale
        else:
            b_x = tl.where(mask, b_x - b_mean, 0.0)
            b_other = b_x
        b_first += b_x
        b_second += b_x * b_other
    m_c = o_c < CHANNELS
    tl.store(p_partial + i_part * CHANNELS + o_c, tl.sum(b_first, 0), mask=m_c)
    tl.store(p_partial + (parts + i_part) * CHANNELS + o_c, tl.sum(b_second, 0), mask=m_c)


@triton.jit(do_not_specialize=["parts", "channels"])
def finish_kernel(
    p_partial, p_x, p_first, p_second, parts, channels, share,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """Both sums of a block of channels; forward the mean and the variance."""
    o_c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    m_c = o_c < channels
    b_first = tl.zeros((BLOCK_P, BLOCK_C), dtype=tl.float32)
    b_second = tl.zeros((BLOCK_P, BLOCK_C), dtype=tl.float32)
    for i_p in range(0, parts, BLOCK_P):
        o_p = i_p + tl.arange(0, BLOCK_P)
        mask = (o_p < parts)[:, None] & m_c[None, :]
        o_x = o_p[:, None] * channels + o_c[None, :]
        b_first += tl.load(p_partial + o_x, mask=mask, other=0.0)
        b_second += tl.load(p_partial + parts * channels + o_x, mask=mask, other=0.0)
    b_one = tl.sum(b_first, 0)
    b_two = tl.sum(b_second, 0)
    if not BACKWARD:
        b_one *= share
        b_two = tl.maximum(b_two * share - b_one * b_one, 0.0)
        b_one += tl.load(p_x + o_c, mask=m_c, other=0.0).to(tl.float32)
    tl.store(p_first + o_c, b_one, mask=m_c)
    tl.store(p_second + o_c, b_two, mask=m_c)


@triton.jit(do_not_specialize=["rows"])
def normalize_kernel(
    p_x, p_mean, p_variance, p_weight, p_bias, p_y, rows, eps,
    CHANNELS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    i_part, o_c = _place(CHANNELS, BLOCK_C)
    o_x, mask = _tile(i_part, o_c, rows, CHANNELS, BLOCK_R)
    b_factor = tl.rsqrt(_load_channel(p_variance, o_c, CHANNELS) + eps) * _load_channel(p_weight, o_c, CHANNELS)
    b_x = tl.load(p_x + o_x, mask=mask, other=0.0).to(tl.float32)
    b_y = (b_x - _load_channel(p_mean, o_c, CHANNELS)) * b_factor + _load_channel(p_bias, o_c, CHANNELS)
    tl.store(p_y + o_x, b_y.to(p_y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def input_gradient_kernel(
    p_dy, p_x, p_mean, p_variance, p_weight, p_dbias, p_dweight, p_add, p_dx, rows, share, eps,
    ADD: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    i_part, o_c = _place(CHANNELS, BLOCK_C)
    o_x, mask = _tile(i_part, o_c, rows, CHANNELS, BLOCK_R)
    b_scale = tl.rsqrt(_load_channel(p_variance, o_c, CHANNELS) + eps)
    b_x = tl.load(p_x + o_x, mask=mask, other=0.0).to(tl.float32)
    b_dy = tl.load(p_dy + o_x, mask=mask, other=0.0).to(tl.float32)
    b_normal = (b_x - _load_channel(p_mean, o_c, CHANNELS)) * b_scale
    b_dy -= _load_channel(p_dbias, o_c, CHANNELS) * share + b_normal * (_load_channel(p_dweight, o_c, CHANNELS) * share)
    b_dx = b_dy * (b_scale * _load_channel(p_weight, o_c, CHANNELS))
    if ADD:
        b_dx += tl.load(p_add + o_x, mask=mask, other=0.0).to(tl.float32)
    tl.store(p_dx + o_x, b_dx.to(p_dx.dtype.element_ty), mask=mask)


@triton.jit
def follow_stream_kernel(
    p_batch_mean, p_batch_variance, p_batch_between, p_memory_mean, p_memory_variance, p_memory_images,
    p_memory_between, p_count, p_samples, p_mean, p_variance, p_images, p_between, p_share, p_source_mean,
    p_source_variance, p_weight, p_bias, p_out, chance_factor, clean_distance, eps, fading,
    MIXED: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Weight and bias; and for the backward their factors. `between`: the variance between images."""
    o_c = tl.arange(0, BLOCK_C)
    m_c = o_c < CHANNELS
    b_count = tl.load(p_count)
    b_new = tl.maximum(b_count / (tl.load(p_memory_images) + b_count), 1.0 - tl.exp2(b_count * fading))
    b_batch = tl.load(p_batch_mean + o_c, mask=m_c, other=0.0)
    b_spread = tl.load(p_batch_variance + o_c, mask=m_c, other=0.0)
    b_mean = tl.load(p_memory_mean + o_c, mask=m_c, other=0.0)
    b_variance = tl.load(p_memory_variance + o_c, mask=m_c, other=0.0)
    b_source_mean = tl.load(p_source_mean + o_c, mask=m_c, other=0.0)
    b_source = tl.load(p_source_variance + o_c, mask=m_c, other=1.0)
    if MIXED:
        # The squared distance of batch and memory in standard moments, before the memory moves.
        b_unit = 1.0 / (b_source + eps)
        b_first = b_batch - b_source_mean
        b_second = b_mean - b_source_mean
        b_square = (b_spread - b_variance + b_first * b_first - b_second * b_second) * b_unit
        b_first -= b_second
        b_apart = tl.where(m_c, b_first * b_first * b_unit + 0.5 * b_square * b_square, 0.0)
        b_between = tl.load(p_memory_between)
        b_between += b_new * (tl.load(p_batch_between) - b_between)
        b_between += b_new * (1.0 - b_new) * tl.sum(b_apart, 0) / (2 * CHANNELS)
        tl.store(p_between, b_between)
    b_away = b_batch - b_mean
    b_mean += b_new * b_away
    # Plus the variance between the means.
    b_variance += b_new * (b_spread - b_variance) + b_new * (1.0 - b_new) * b_away * b_away
    b_images = b_count / b_new
    tl.store(p_mean + o_c, b_mean, mask=m_c)
    tl.store(p_variance + o_c, b_variance, mask=m_c)
    tl.store(p_images, b_images)
    if MIXED:
        b_away = b_mean - b_source_mean
        b_square = (b_variance + b_away * b_away) * b_unit - 1.0
        b_distance = tl.where(m_c, b_away * b_away * b_unit + 0.5 * b_square * b_square, 0.0)
        b_distance = tl.sum(b_distance, 0) / (2 * CHANNELS)
        b_images /= tl.load(p_samples)
        b_expected = chance_factor * b_between / tl.maximum(b_images - 1.0, 1e-6) + clean_distance
        b_share = b_distance / (b_distance + b_expected)
        b_share = tl.where(b_images > 1.0, b_share, 0.0)
        tl.store(p_share, b_share)
        b_variance = b_source + b_share * (b_variance - b_source + (1.0 - b_share) * b_away * b_away)
        b_mean -= (1.0 - b_share) * b_away
    b_scale = tl.rsqrt(b_variance + eps)
    b_ratio = tl.sqrt(b_spread + eps) * b_scale
    b_offset = (b_batch - b_mean) * b_scale
    b_weight = tl.load(p_weight + o_c, mask=m_c, other=0.0).to(tl.float32)
    tl.store(p_out + o_c, b_weight * b_ratio, mask=m_c)
    b_bias = tl.load(p_bias + o_c, mask=m_c, other=0.0).to(tl.float32)
    tl.store(p_out + CHANNELS + o_c, b_bias + b_weight * b_offset, mask=m_c)
    tl.store(p_out + 2 * CHANNELS + o_c, b_ratio, mask=m_c)
    tl.store(p_out + 3 * CHANNELS + o_c, b_offset, mask=m_c)


@triton.jit(do_not_specialize=["rows"])
def normalize_small_kernel(
    p_x, p_weight, p_bias, p_y, p_mean, p_variance, rows, eps,
    CHANNELS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    o_c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    m_c = o_c < CHANNELS
    o_x, mask = _tile(tl.program_id(0) * 0, o_c, rows, CHANNELS, BLOCK_R)
    b_x = tl.load(p_x + o_x, mask=mask, other=0.0).to(tl.float32)
    b_mean = tl.sum(b_x, 0) / rows
    b_x = tl.where(mask, b_x - b_mean[None, :], 0.0)
    b_variance = tl.sum(b_x * b_x, 0) / rows
    tl.store(p_mean + o_c, b_mean, mask=m_c)
    tl.store(p_variance + o_c, b_variance, mask=m_c)
    b_factor = tl.rsqrt(b_variance + eps)[None, :] * _load_channel(p_weight, o_c, CHANNELS)
    b_y = b_x * b_factor + _load_channel(p_bias, o_c, CHANNELS)
    tl.store(p_y + o_x, b_y.to(p_y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def small_gradients_kernel(
    p_dy, p_x, p_mean, p_variance, p_weight, p_add, p_dx, p_dbias, p_dweight, rows, eps,
    ADD: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    o_c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    m_c = o_c < CHANNELS
    o_x, mask = _tile(tl.program_id(0) * 0, o_c, rows, CHANNELS, BLOCK_R)
    b_scale = tl.rsqrt(_load_channel(p_variance, o_c, CHANNELS) + eps)
    b_dy = tl.load(p_dy + o_x, mask=mask, other=0.0).to(tl.float32)
    b_x = tl.load(p_x + o_x, mask=mask, other=0.0).to(tl.float32)
    b_x = (b_x - _load_channel(p_mean, o_c, CHANNELS)) * b_scale
    b_dbias = tl.sum(b_dy, 0)
    b_dweight = tl.sum(b_dy * b_x, 0)
    tl.store(p_dbias + o_c, b_dbias, mask=m_c)
    tl.store(p_dweight + o_c, b_dweight, mask=m_c)
    b_dy -= (b_dbias / rows)[None, :] + b_x * (b_dweight / rows)[None, :]
    b_dx = b_dy * (b_scale * _load_channel(p_weight, o_c, CHANNELS))
    if ADD:
        b_dx += tl.load(p_add + o_x, mask=mask, other=0.0).to(tl.float32)
    tl.store(p_dx + o_x, b_dx.to(p_dx.dtype.element_ty), mask=mask)
