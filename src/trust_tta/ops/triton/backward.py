"""The backward scan: its launchers and kernels.

Programs as in the forward kernel, which walk through the chunks as the adjoints run: up for direction 1, then down for
direction 0, which adds its gradients of u to those of direction 1. States inside a chunk are recomputed from the saved
ones. Sums over channels and over the batch leave as partial sums, each written by one program, so that two runs agree
bit for bit.
"""

# mypy: ignore-errors
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trust_tta.ops.tensors import ScanGradients, ScanInputs
from trust_tta.ops.triton.forward import (
    LOG2_E,
    boundary_offsets,
    carried,
    carry_on,
    column,
    linear_scan,
    load_block,
    load_row,
    load_weights,
    no_carry,
    softplus,
    store_block,
    with_column,
)
from trust_tta.ops.triton.tiling import (
    Tiling,
    ceil_div,
    choose_tiling,
    constants,
    pointers,
    power_of_two,
    prepare,
)


class PartialSums(NamedTuple):
    """Gradients that are yet to be summed, in a fixed order so that runs repeat; in float32 unless said otherwise."""

    A: Tensor  # (b, g, m, c, n), over the batch
    B: Tensor  # (b, g, m, blocks of channels, n, l), over the blocks; in bfloat16 if B is, as there are many
    C: Tensor  # likewise
    D: Tensor  # (b, g, c), over the batch; the same for each direction
    delta_bias: Tensor  # (b, g, m, c), over the batch


def scan_backward(dy: Tensor, inputs: ScanInputs, states: Tensor, *, tiling: Tiling | None = None) -> ScanGradients:
    """See `operators.Backend`."""
    du, ddelta, partial = differentiate(dy, inputs, states, tiling=tiling)
    dD = partial.D.sum(0).unsqueeze(1).repeat(1, partial.delta_bias.shape[2], 1)
    sums = (partial.A.sum(0), partial.B.float().sum(3), partial.C.float().sum(3), dD, partial.delta_bias.sum(0))
    pairs = zip(sums, inputs[2:7], strict=True)
    return ScanGradients(du, ddelta, *(partial.A.new_empty(0) if t is None else s.to(t.dtype) for s, t in pairs))


def differentiate(
    dy: Tensor, inputs: ScanInputs, states: Tensor, *, tiling: Tiling | None = None
) -> tuple[Tensor, Tensor, PartialSums]:
    """Gradients of u and delta, and partial sums of the others."""
    batch, groups, directions, channels, length = inputs.delta.shape
    tiling = tiling or choose_tiling(inputs.delta.shape, inputs.u.dtype)
    tile = tiling.backward
    inputs = prepare(inputs)
    A, state = inputs.A, inputs.A.shape[-1]
    blocks = ceil_div(channels, tile.channels)
    du, ddelta = torch.empty_like(inputs.u), torch.empty_like(inputs.delta)
    # Each program writes its own part of these.
    dA = A.new_empty((batch, *A.shape))
    rows = torch.bfloat16 if inputs.B.dtype == torch.bfloat16 else torch.float32
    dB, dC = A.new_empty((2, batch, groups, directions, blocks, state, length), dtype=rows)
    dD = A.new_empty((batch, groups, channels))
    dbias = A.new_empty((batch, groups, directions, channels))
    with torch.cuda.device_of(du):
        scan_backward_kernel[(batch * groups * blocks,)](
            dy.contiguous(), *pointers(inputs), states, du, ddelta, dA, dB, dC, dD, dbias, groups,
            **constants(inputs, tile, tiling.spacing),
        )  # fmt: skip
    return du, ddelta, PartialSums(dA, dB, dC, dD, dbias)


def sum_rows(partial: PartialSums, dprojected: Tensor) -> None:
    """Write the sums of B's and C's gradients to the last 2n rows of dprojected (.., r+2n, l)."""
    *_, blocks, state, length = partial.B.shape
    itemsize = partial.B.element_size()
    # Partial sums and positions of a tile; the fastest on an H200.
    rows, block = (32, power_of_two(length)) if length <= 256 else (4 * itemsize, 2048 // itemsize)
    directions = dprojected.numel() // (dprojected.shape[-2] * length)
    with torch.cuda.device_of(dprojected):
        sum_rows_kernel[(directions * 2 * state * ceil_div(length, block),)](
            partial.B, partial.C, dprojected,
            BLOCKS=blocks, STATE=state, ROWS=dprojected.shape[-2], LENGTH=length, BLOCK_P=rows, BLOCK_L=block,
            enable_fp_fusion=True,
        )  # fmt: skip


@triton.jit
def quad_sums(b_x):
    """Sums of four neighbours (channels, positions / 4), which a thread holds: sums across threads wait for the end."""
    return tl.sum(tl.reshape(b_x, (b_x.shape[0], b_x.shape[1] // 4, 4)), 2)


@triton.jit
def differentiate_chunk(
    b_du, b_carry, b_dA, b_dbias, b_u, b_dy, b_d, p_A, p_B, p_C, p_states, p_ddelta, p_dB, p_dC, i_k, o_c, m_c,
    CHANNELS: tl.constexpr, LENGTH: tl.constexpr, STATE: tl.constexpr, STRIDE_N: tl.constexpr, SPACING: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_N: tl.constexpr, SOFTPLUS: tl.constexpr, APPROX: tl.constexpr,
    REVERSE: tl.constexpr,
):  # fmt: skip
    """Differentiate one direction on chunk i_k: write ddelta, dB and dC, add to du, dA and dbias.

    The gradient of the state, g_t = C_t dy_t + a_{t+1} g_{t+1}, would need the decays shifted by a position;
    q_t = a_t g_t = a_t (q_{t+1} + C_t dy_t) does not, and g_t is what entered at t and the q after it.
    """
    CHUNKS: tl.constexpr = (LENGTH + BLOCK_L - 1) // BLOCK_L
    BOUNDARIES: tl.constexpr = (LENGTH + SPACING - 1) // SPACING - 1
    PER_CHUNK: tl.constexpr = BLOCK_L // SPACING
    o_n = tl.arange(0, BLOCK_N)
    if SOFTPLUS:
        b_d, b_slope = softplus(b_d, APPROX)
    b_v = b_d * b_u
    b_dd = tl.zeros((BLOCK_C, BLOCK_L), dtype=tl.float32)
    for n in range(STATE):
        b_A = tl.load(p_A + o_c * STATE + n, mask=m_c, other=0.0)
        b_B = load_row(p_B + n * STRIDE_N, i_k, LENGTH, BLOCK_L)
        b_C = load_row(p_C + n * STRIDE_N, i_k, LENGTH, BLOCK_L)
        b_h0 = tl.zeros((BLOCK_C, 1), dtype=tl.float32)
        if CHUNKS > 1:
            i_saved = (i_k + 1) * PER_CHUNK - 1 if REVERSE else i_k * PER_CHUNK - 1
            o_h, m_h = boundary_offsets(i_saved, n, o_c, m_c, BOUNDARIES, CHANNELS, STATE)
            b_h0 = tl.load(p_states + o_h, mask=m_h, other=0.0)[:, None]
        b_a = tl.exp2(b_d * (b_A * LOG2_E)[:, None])
        b_in = b_v * b_B[None, :]
        b_c = b_dy * b_C[None, :]
        b_before, _ = linear_scan(b_a, b_in, b_h0, CHUNKS > 1, REVERSE)
        b_after, b_end = linear_scan(b_a, b_a * b_c, carried(b_carry, o_n, n, STATE), CHUNKS > 1, not REVERSE)
        if CHUNKS > 1:
            b_carry = carry_on(b_carry, b_end, o_n, n, STATE)
        b_kept = b_a * b_before
        b_h = b_kept + b_in
        b_g = b_after + b_c
        b_r = b_g * b_kept
        b_w = b_g * b_B[None, :]
        b_dd += b_A[:, None] * b_r + b_w * b_u
        b_du += b_w * b_d
        b_dA = add_weight(b_dA, b_d * b_r, o_n, n, STATE)
        store_row(p_dB + n * LENGTH, tl.sum(b_g * b_v, 0), i_k, LENGTH, BLOCK_L)
        store_row(p_dC + n * LENGTH, tl.sum(b_h * b_dy, 0), i_k, LENGTH, BLOCK_L)
    if SOFTPLUS:
        b_dd *= b_slope
    store_block(p_ddelta, b_dd, o_c, m_c, i_k, LENGTH, BLOCK_L)
    return b_du, b_carry, b_dA, b_dbias + quad_sums(b_dd)


@triton.jit
def differentiate_direction(
    p_dy, p_u, p_delta, p_A, p_B, p_C, p_states, p_du, p_ddelta, p_dA, p_dB, p_dC, p_dD, p_dbias, b_bias, b_D, o_c, m_c,
    CHANNELS: tl.constexpr, LENGTH: tl.constexpr, STATE: tl.constexpr, STRIDE_N: tl.constexpr, SPACING: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, SOFTPLUS: tl.constexpr,
    APPROX: tl.constexpr, REVERSE: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Gradients of one direction; direction 0 also differentiates D u, and adds to p_du with ADD."""
    CHUNKS: tl.constexpr = (LENGTH + BLOCK_L - 1) // BLOCK_L
    DA_COLUMNS: tl.constexpr = BLOCK_L // 4 if STATE == 1 else BLOCK_N
    b_dA = tl.zeros((BLOCK_C, DA_COLUMNS), dtype=tl.float32)
    b_dbias = tl.zeros((BLOCK_C, BLOCK_L // 4), dtype=tl.float32)
    b_dD = tl.zeros((BLOCK_C, BLOCK_L // 4), dtype=tl.float32)
    b_carry = no_carry(BLOCK_C, BLOCK_L, BLOCK_N, STATE)
    for i_step in tl.range(0, CHUNKS, num_stages=STAGES):
        i_k = i_step if REVERSE else CHUNKS - 1 - i_step
        b_u = load_block(p_u, o_c, m_c, i_k, LENGTH, BLOCK_L)
        b_dy = load_block(p_dy, o_c, m_c, i_k, LENGTH, BLOCK_L)
        b_d = load_block(p_delta, o_c, m_c, i_k, LENGTH, BLOCK_L) + b_bias[:, None]
        b_du = tl.zeros((BLOCK_C, BLOCK_L), dtype=tl.float32)
        if not REVERSE:
            b_du = b_D[:, None] * b_dy
            b_dD += quad_sums(b_u * b_dy)
        if ADD:
            b_du += load_block(p_du, o_c, m_c, i_k, LENGTH, BLOCK_L)
        b_du, b_carry, b_dA, b_dbias = differentiate_chunk(
            b_du, b_carry, b_dA, b_dbias, b_u, b_dy, b_d, p_A, p_B, p_C, p_states, p_ddelta, p_dB, p_dC, i_k, o_c, m_c,
            CHANNELS, LENGTH, STATE, STRIDE_N, SPACING, BLOCK_C, BLOCK_L, BLOCK_N, SOFTPLUS, APPROX, REVERSE,
        )  # fmt: skip
        store_block(p_du, b_du, o_c, m_c, i_k, LENGTH, BLOCK_L)
    store_sums(p_dA, p_dD, p_dbias, b_dA, b_dD, b_dbias, o_c, m_c, STATE, BLOCK_N, not REVERSE)


@triton.jit
def store_row(p_row, b_row, i_k, LENGTH: tl.constexpr, BLOCK_L: tl.constexpr):
    """Write chunk i_k of one row (positions,)."""
    o_l = i_k * BLOCK_L + tl.arange(0, BLOCK_L)
    tl.store(p_row + o_l, b_row, mask=o_l < LENGTH)


@triton.jit
def store_sums(
    p_dA, p_dD, p_dbias, b_dA, b_dD, b_dbias, o_c, m_c, STATE: tl.constexpr, BLOCK_N: tl.constexpr, HAS_D: tl.constexpr
):
    """Write dA, dD and dbias, summed over the positions."""
    store_weight(p_dA, b_dA, o_c, m_c, STATE, BLOCK_N)
    tl.store(p_dbias + o_c, tl.sum(b_dbias, 1), mask=m_c)
    if HAS_D:
        tl.store(p_dD + o_c, tl.sum(b_dD, 1), mask=m_c)


@triton.jit
def differentiate_short(
    p_dy, p_u, p_delta, p_A, p_B, p_C, p_states, p_du, p_ddelta, p_dA, p_dB, p_dC, p_dD, p_dbias, b_bias0, b_bias1, b_D,
    o_c, m_c,
    CHANNELS: tl.constexpr, LENGTH: tl.constexpr, STATE: tl.constexpr, STRIDE_M: tl.constexpr, STRIDE_N: tl.constexpr,
    SPACING: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_N: tl.constexpr, SOFTPLUS: tl.constexpr,
    APPROX: tl.constexpr,
):  # fmt: skip
    """Gradients of both directions where all positions are one chunk."""
    PARTIAL: tl.constexpr = (CHANNELS + BLOCK_C - 1) // BLOCK_C * STATE * LENGTH
    ROWS: tl.constexpr = CHANNELS * LENGTH
    WEIGHTS: tl.constexpr = CHANNELS * STATE
    b_none = no_carry(BLOCK_C, BLOCK_L, BLOCK_N, STATE)
    b_zero = tl.zeros((BLOCK_C, BLOCK_L // 4), dtype=tl.float32)
    b_start = b_zero if STATE == 1 else b_none
    b_u = load_block(p_u, o_c, m_c, 0, LENGTH, BLOCK_L)
    b_dy = load_block(p_dy, o_c, m_c, 0, LENGTH, BLOCK_L)
    b_du = b_D[:, None] * b_dy
    tl.store(p_dD + o_c, tl.sum(b_u * b_dy, 1), mask=m_c)
    for m in tl.static_range(2):
        b_d = load_block(p_delta + m * ROWS, o_c, m_c, 0, LENGTH, BLOCK_L) + (b_bias1 if m else b_bias0)[:, None]
        b_du, _, b_dA, b_dbias = differentiate_chunk(
            b_du, b_none, b_start, b_zero, b_u, b_dy, b_d, p_A + m * WEIGHTS, p_B + m * STRIDE_M, p_C + m * STRIDE_M,
            p_states, p_ddelta + m * ROWS, p_dB + m * PARTIAL, p_dC + m * PARTIAL, 0, o_c, m_c,
            CHANNELS, LENGTH, STATE, STRIDE_N, SPACING, BLOCK_C, BLOCK_L, BLOCK_N, SOFTPLUS, APPROX, m == 1,
        )  # fmt: skip
        store_weight(p_dA + m * WEIGHTS, b_dA, o_c, m_c, STATE, BLOCK_N)
        tl.store(p_dbias + m * CHANNELS + o_c, tl.sum(b_dbias, 1), mask=m_c)
    store_block(p_du, b_du, o_c, m_c, 0, LENGTH, BLOCK_L)


@triton.jit
def scan_backward_kernel(
    p_dy, p_u, p_delta, p_A, p_B, p_C, p_D, p_bias, p_states, p_du, p_ddelta, p_dA, p_dB, p_dC, p_dD, p_dbias, groups,
    DIRECTIONS: tl.constexpr, CHANNELS: tl.constexpr, LENGTH: tl.constexpr, STATE: tl.constexpr,
    STRIDE_B: tl.constexpr, STRIDE_G: tl.constexpr, STRIDE_M: tl.constexpr, STRIDE_N: tl.constexpr,
    SPACING: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    HAS_D: tl.constexpr, HAS_BIAS: tl.constexpr, SOFTPLUS: tl.constexpr, APPROX: tl.constexpr,
):  # fmt: skip
    """Gradients of one batch entry, group and block of channels; sums over channels and batch stay partial."""
    BOUNDARIES: tl.constexpr = (LENGTH + SPACING - 1) // SPACING - 1
    C_BLOCKS: tl.constexpr = (CHANNELS + BLOCK_C - 1) // BLOCK_C
    ROWS: tl.constexpr = CHANNELS * LENGTH
    SAVED: tl.constexpr = BOUNDARIES * STATE * CHANNELS
    PARTIAL: tl.constexpr = C_BLOCKS * STATE * LENGTH
    WEIGHTS: tl.constexpr = CHANNELS * STATE
    # 64-bit before the strides: a batch of large maps has more than 2^31 elements.
    i_bg = (tl.program_id(0) // C_BLOCKS).to(tl.int64)
    i_cb = tl.program_id(0) % C_BLOCKS
    i_b = i_bg // groups
    i_g = i_bg % groups
    p_dy += i_bg * ROWS
    p_u += i_bg * ROWS
    p_du += i_bg * ROWS
    p_delta += i_bg * DIRECTIONS * ROWS
    p_ddelta += i_bg * DIRECTIONS * ROWS
    p_states += i_bg * DIRECTIONS * SAVED
    p_A += i_g * DIRECTIONS * WEIGHTS
    p_D += i_g * DIRECTIONS * CHANNELS
    p_bias += i_g * DIRECTIONS * CHANNELS
    p_B += i_b * STRIDE_B + i_g * STRIDE_G
    p_C += i_b * STRIDE_B + i_g * STRIDE_G
    p_dB += i_bg * DIRECTIONS * PARTIAL + i_cb * STATE * LENGTH
    p_dC += i_bg * DIRECTIONS * PARTIAL + i_cb * STATE * LENGTH
    p_dA += i_bg * DIRECTIONS * WEIGHTS
    p_dbias += i_bg * DIRECTIONS * CHANNELS
    p_dD += i_bg * CHANNELS
    o_c = i_cb * BLOCK_C + tl.arange(0, BLOCK_C)
    m_c = o_c < CHANNELS
    b_D, b_bias0, b_bias1 = load_weights(p_D, p_bias, o_c, m_c, BLOCK_C, CHANNELS, DIRECTIONS, HAS_D, HAS_BIAS)
    if (DIRECTIONS == 2) and (LENGTH <= BLOCK_L):
        differentiate_short(
            p_dy, p_u, p_delta, p_A, p_B, p_C, p_states, p_du, p_ddelta, p_dA, p_dB, p_dC, p_dD, p_dbias, b_bias0,
            b_bias1, b_D, o_c, m_c,
            CHANNELS, LENGTH, STATE, STRIDE_M, STRIDE_N, SPACING, BLOCK_C, BLOCK_L, BLOCK_N, SOFTPLUS, APPROX,
        )  # fmt: skip
        return
    if DIRECTIONS == 2:
        differentiate_direction(
            p_dy, p_u, p_delta + ROWS, p_A + WEIGHTS, p_B + STRIDE_M, p_C + STRIDE_M, p_states + SAVED, p_du,
            p_ddelta + ROWS, p_dA + WEIGHTS, p_dB + PARTIAL, p_dC + PARTIAL, p_dD, p_dbias + CHANNELS, b_bias1, b_D,
            o_c, m_c,
            CHANNELS, LENGTH, STATE, STRIDE_N, SPACING, BLOCK_C, BLOCK_L, BLOCK_N, STAGES, SOFTPLUS, APPROX,
            True, False,
        )  # fmt: skip
        # What one thread stored above, another may load below.
        tl.debug_barrier()
    differentiate_direction(
        p_dy, p_u, p_delta, p_A, p_B, p_C, p_states, p_du, p_ddelta, p_dA, p_dB, p_dC, p_dD, p_dbias, b_bias0, b_D,
        o_c, m_c,
        CHANNELS, LENGTH, STATE, STRIDE_N, SPACING, BLOCK_C, BLOCK_L, BLOCK_N, STAGES, SOFTPLUS, APPROX,
        False, DIRECTIONS == 2,
    )  # fmt: skip


@triton.jit
def add_weight(b_dA, b_x, o_n, n, STATE: tl.constexpr):
    """Add x (channels, positions) to dA, for one state thread by thread until the end, for several chunk by chunk."""
    if STATE == 1:
        return b_dA + quad_sums(b_x)
    return with_column(b_dA, o_n, n, column(b_dA, o_n, n) + tl.sum(b_x, 1))


@triton.jit
def store_weight(p_dA, b_dA, o_c, m_c, STATE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Write dA (channels, states)."""
    if STATE == 1:
        tl.store(p_dA + o_c, tl.sum(b_dA, 1), mask=m_c)
    else:
        o_n = tl.arange(0, BLOCK_N)
        tl.store(p_dA + o_c[:, None] * STATE + o_n[None, :], b_dA, mask=m_c[:, None] & (o_n < STATE)[None, :])


@triton.jit
def sum_rows_kernel(
    p_dB, p_dC, p_out,
    BLOCKS: tl.constexpr, STATE: tl.constexpr, ROWS: tl.constexpr, LENGTH: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_L: tl.constexpr,
):  # fmt: skip
    """One of the last 2 STATE of ROWS rows (positions,): the sum of its partial sums (blocks, STATE, positions)."""
    CHUNKS: tl.constexpr = (LENGTH + BLOCK_L - 1) // BLOCK_L
    i = tl.program_id(0)
    i_row = i // CHUNKS % (2 * STATE)
    # 64-bit before the strides: a batch of large maps has more than 2^31 elements.
    i_direction = (i // (CHUNKS * 2 * STATE)).to(tl.int64)
    o_l = i % CHUNKS * BLOCK_L + tl.arange(0, BLOCK_L)
    m_l = o_l < LENGTH
    p_out += i_direction * (ROWS * LENGTH) + (ROWS - 2 * STATE + i_row) * LENGTH
    p_partial = p_dB
    if i_row >= STATE:
        p_partial = p_dC
    p_partial += i_direction * (BLOCKS * STATE * LENGTH) + i_row % STATE * LENGTH
    b_sum = sum_parts(p_partial, BLOCKS, STATE * LENGTH, o_l, m_l, BLOCK_P)
    tl.store(p_out + o_l, b_sum.to(p_out.dtype.element_ty), mask=m_l)


@triton.jit
def sum_parts(p_partial, parts, STRIDE: tl.constexpr, o_x, m_x, BLOCK_P: tl.constexpr):
    """The sum of so many parts of x, which lie STRIDE apart."""
    b_sum = tl.zeros((BLOCK_P, o_x.shape[0]), dtype=tl.float32)
    # Several stages would read through shared memory, four bytes at a time where rows are not aligned.
    for i_first in tl.range(0, parts, BLOCK_P, num_stages=1):
        o_p = i_first + tl.arange(0, BLOCK_P)
        mask = (o_p < parts)[:, None] & m_x[None, :]
        b_sum += tl.load(p_partial + o_p[:, None] * STRIDE + o_x[None, :], mask=mask, other=0.0)
    return tl.sum(b_sum, 0)
