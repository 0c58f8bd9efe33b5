"""LayerNorm over the channels of channel-last maps on a CUDA device, in one pass each way."""

# mypy: ignore-errors
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from trust_tta.ops.triton.tiling import ceil_div, power_of_two

ELEMENTS = 2048  # elements of a program's block
PROGRAMS = 132 * 4  # whose partial sums are the gradients of weight and bias


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, *, add: Tensor | None = None, out: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """x (.., c) normalized over c, plus `add` (.., c); its mean and 1 / deviation (.., 1). `out` may be x."""
    norm = torch.empty_like(x) if out is None else out
    mean, scale = (x.new_empty((*x.shape[:-1], 1), dtype=torch.float32) for _ in range(2))
    rows, channels, block_r, block_c = _sizes(x)
    with torch.cuda.device_of(x):
        layer_norm_kernel[(ceil_div(rows, block_r),)](
            x, weight.contiguous(), bias.contiguous(), x if add is None else add, norm, mean, scale, rows, channels,
            eps, ADD=add is not None, BLOCK_R=block_r, BLOCK_C=block_c, num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip
    return norm, mean, scale


def layer_norm_backward(
    dnorm: Tensor, x: Tensor, mean: Tensor, scale: Tensor, weight: Tensor, *, train: bool, add: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x (.., c), plus `add` (.., c), and in float32 of weight and bias (c,), empty unless `train`."""
    dx = torch.empty_like(x)
    rows, channels, block_r, block_c = _sizes(x)
    blocks = ceil_div(rows, block_r)
    programs = min(blocks, PROGRAMS) if train else blocks
    partial = x.new_empty((2, programs, channels) if train else (2, 0, 0), dtype=torch.float32)
    with torch.cuda.device_of(x):
        norm_backward_kernel[(programs,)](
            dnorm.contiguous(), x, mean, scale, weight.contiguous(), x if add is None else add.contiguous(), dx,
            partial, rows, channels, ADD=add is not None, TRAIN=train, BLOCK_R=block_r, BLOCK_C=block_c, num_warps=4,
            enable_fp_fusion=True,
        )  # fmt: skip
    dweight, dbias = (part.sum(0) for part in partial)
    return dx, dweight, dbias


def _sizes(x: Tensor) -> tuple[int, int, int, int]:
    """Rows, channels, and the rows and channels of a block."""
    channels = x.shape[-1]
    block_c = power_of_two(channels)
    return x.numel() // channels, channels, max(1, ELEMENTS // block_c), block_c


@triton.jit(do_not_specialize=["rows"])
def layer_norm_kernel(
    p_x, p_weight, p_bias, p_add, p_norm, p_mean, p_scale, rows, channels, eps,
    ADD: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """LayerNorm of a block of pixels over the channels, and plus a residual."""
    # 64-bit before the strides: a batch of large maps has more than 2^31 elements.
    o_r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    o_c = tl.arange(0, BLOCK_C)
    m_r, m_c = o_r < rows, o_c < channels
    o_x, mask = o_r[:, None] * channels + o_c[None, :], m_r[:, None] & m_c[None, :]
    b_w = tl.load(p_weight + o_c, mask=m_c, other=0.0).to(tl.float32)[None, :]
    b_b = tl.load(p_bias + o_c, mask=m_c, other=0.0).to(tl.float32)[None, :]
    b_x = tl.load(p_x + o_x, mask=mask, other=0.0).to(tl.float32)
    b_mean = tl.sum(b_x, 1) / channels
    b_d = tl.where(m_c[None, :], b_x - b_mean[:, None], 0.0)
    b_scale = tl.rsqrt(tl.sum(b_d * b_d, 1) / channels + eps)
    tl.store(p_mean + o_r, b_mean, mask=m_r)
    tl.store(p_scale + o_r, b_scale, mask=m_r)
    b_norm = b_d * b_scale[:, None] * b_w + b_b
    if ADD:
        b_norm += tl.load(p_add + o_x, mask=mask, other=0.0).to(tl.float32)
    tl.store(p_norm + o_x, b_norm.to(p_norm.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def norm_backward_kernel(
    p_dnorm, p_x, p_mean, p_scale, p_weight, p_add, p_dx, p_partial, rows, channels,
    ADD: tl.constexpr, TRAIN: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Gradients of LayerNorm: of blocks of pixels, and a program's share of those of weight and bias."""
    o_c = tl.arange(0, BLOCK_C)
    m_c = o_c < channels
    b_w = tl.load(p_weight + o_c, mask=m_c, other=0.0).to(tl.float32)[None, :]
    b_dw = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.float32)
    b_db = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.float32)
    for i_block in range(tl.program_id(0), (rows + BLOCK_R - 1) // BLOCK_R, tl.num_programs(0)):
        # 64-bit before the strides: a batch of large maps has more than 2^31 elements.
        o_r = tl.cast(i_block, tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
        m_r = o_r < rows
        mask = m_r[:, None] & m_c[None, :]
        o_x = o_r[:, None] * channels + o_c[None, :]
        b_scale = tl.load(p_scale + o_r, mask=m_r, other=0.0)[:, None]
        b_mean = tl.load(p_mean + o_r, mask=m_r, other=0.0)[:, None]
        b_dn = tl.load(p_dnorm + o_x, mask=mask, other=0.0).to(tl.float32)
        b_n = (tl.load(p_x + o_x, mask=mask, other=0.0).to(tl.float32) - b_mean) * b_scale
        if TRAIN:
            b_dw += b_dn * b_n
            b_db += b_dn
        b_g = b_dn * b_w
        b_sum = tl.sum(b_g, 1) / channels
        b_along = tl.sum(b_g * b_n, 1) / channels
        b_dx = b_scale * (b_g - b_sum[:, None] - b_n * b_along[:, None])
        if ADD:
            b_dx += tl.load(p_add + o_x, mask=mask, other=0.0).to(tl.float32)
        tl.store(p_dx + o_x, b_dx.to(p_dx.dtype.element_ty), mask=mask)
    if TRAIN:
        o_part = tl.program_id(0) * channels + o_c
        tl.store(p_partial + o_part, tl.sum(b_dw, 0), mask=m_c)
        tl.store(p_partial + tl.num_programs(0) * channels + o_part, tl.sum(b_db, 0), mask=m_c)
