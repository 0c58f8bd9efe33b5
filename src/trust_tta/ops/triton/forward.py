"""The forward scan: launcher, kernel, and functions shared with the backward kernel.

A program owns a batch entry, a group and BLOCK_C channels, and walks through the positions in chunks of BLOCK_L: for
direction 1 from the last to the first, then for direction 0, which adds its outputs to those of direction 1. Where all
positions are one chunk, it is read once for both.
Names: b_ values of a block, p_ pointers, o_ offsets, m_ masks, i_ indices of programs and chunks.
"""

# mypy: ignore-errors
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from trust_tta.ops.tensors import ScanInputs
from trust_tta.ops.triton.tiling import Tiling, ceil_div, choose_tiling, constants, pointers, prepare

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


def scan_forward(inputs: ScanInputs, *, tiling: Tiling | None = None) -> tuple[Tensor, Tensor]:
    """See `operators.Backend`; the saved states are (b, g, m, boundaries, n, c)."""
    batch, groups, directions, channels, length = inputs.delta.shape
    tiling = tiling or choose_tiling(inputs.delta.shape, inputs.u.dtype)
    inputs = prepare(inputs)
    y = torch.empty_like(inputs.u)
    boundaries = ceil_div(length, tiling.spacing) - 1
    states = y.new_empty((batch, groups, directions, boundaries, inputs.A.shape[-1], channels), dtype=torch.float32)
    programs = batch * groups * ceil_div(channels, tiling.forward.channels)
    with torch.cuda.device_of(y):
        scan_forward_kernel[(programs,)](
            *pointers(inputs), y, states, groups, **constants(inputs, tiling.forward, tiling.spacing)
        )
    return y, states


@triton.jit
def compose(b_a1, b_b1, b_a2, b_b2):
    """Compose h -> a1 h + b1, then h -> a2 h + b2."""
    return b_a1 * b_a2, b_a2 * b_b1 + b_b2


@triton.jit
def column(b_block, o_columns, i_column):
    """Column i_column (rows,) of a block (rows, columns)."""
    return tl.sum(tl.where(o_columns[None, :] == i_column, b_block, 0.0), 1)


@triton.jit
def with_column(b_block, o_columns, i_column, b_column):
    """The block (rows, columns) with column i_column set to b_column (rows,)."""
    return tl.where(o_columns[None, :] == i_column, b_column[:, None], b_block)


@triton.jit
def no_carry(BLOCK_C: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_N: tl.constexpr, STATE: tl.constexpr):
    """Initial carry of a scan: states (channels, states).

    Of a single state every lane has a copy (channels, lanes), which saves summing it up from one of them.
    """
    LANES: tl.constexpr = BLOCK_L // 8 if BLOCK_L >= 256 else BLOCK_L // 4
    return tl.zeros((BLOCK_C, LANES if STATE == 1 else BLOCK_N), dtype=tl.float32)


@triton.jit
def carried(b_carry, o_n, n, STATE: tl.constexpr):
    """State n that is carried, (channels, 1 or lanes)."""
    b_state = b_carry
    if STATE > 1:
        b_state = column(b_carry, o_n, n)[:, None]
    return b_state


@triton.jit
def carry_on(b_carry, b_end, o_n, n, STATE: tl.constexpr):
    """Carry of state n at the end of a chunk, (channels, lanes)."""
    b_next = b_end
    if STATE > 1:
        b_next = with_column(b_carry, o_n, n, column(b_end, tl.arange(0, b_end.shape[1]), 0))
    return b_next


@triton.jit
def quarters(b_x):
    """The elements 4t, 4t + 1, 4t + 2, 4t + 3 of each row, as four blocks (channels, positions / 4)."""
    b_even, b_odd = tl.split(tl.reshape(b_x, (b_x.shape[0], b_x.shape[1] // 4, 2, 2)))
    b_0, b_2 = tl.split(b_even)
    b_1, b_3 = tl.split(b_odd)
    return b_0, b_1, b_2, b_3


@triton.jit
def join_quarters(b_0, b_1, b_2, b_3):
    """Inverse of `quarters`."""
    b_x = tl.join(tl.join(b_0, b_2), tl.join(b_1, b_3))
    return tl.reshape(b_x, (b_0.shape[0], b_0.shape[1] * 4))


@triton.jit
def scan_quads(b_a, b_b, b_start, CARRIES: tl.constexpr, REVERSE: tl.constexpr):
    """`linear_scan` of rows of which a thread holds four neighbors."""
    QUADS: tl.constexpr = b_a.shape[1] // 4
    b_a0, b_a1, b_a2, b_a3 = quarters(b_a)
    b_b0, b_b1, b_b2, b_b3 = quarters(b_b)
    o_rank = tl.arange(0, QUADS)
    if REVERSE:
        b_a0, b_a1, b_a2, b_a3 = b_a3, b_a2, b_a1, b_a0
        b_b0, b_b1, b_b2, b_b3 = b_b3, b_b2, b_b1, b_b0
        o_rank = QUADS - 1 - o_rank
    o_rank = tl.broadcast_to(o_rank[None, :], (b_a.shape[0], QUADS))
    b_decay = (b_a0 * b_a1) * (b_a2 * b_a3)
    b_sum = ((b_b0 * b_a1 + b_b1) * b_a2 + b_b2) * b_a3 + b_b3
    if REVERSE:
        b_decay, b_sum = tl.gather(b_decay, o_rank, 1), tl.gather(b_sum, o_rank, 1)
    b_decay, b_sum = tl.associative_scan((b_decay, b_sum), 1, compose)
    o_before = tl.maximum(o_rank - 1, 0)
    b_h0 = tl.gather(b_sum, o_before, 1)
    if CARRIES:
        b_h0 += tl.gather(b_decay, o_before, 1) * b_start
        b_h0 = tl.where(o_rank == 0, b_start, b_h0)
    else:
        b_h0 = tl.where(o_rank == 0, 0.0, b_h0)
    b_h1 = b_a0 * b_h0 + b_b0
    b_h2 = b_a1 * b_h1 + b_b1
    b_h3 = b_a2 * b_h2 + b_b2
    b_end = tl.gather(b_a3 * b_h3 + b_b3, o_rank * 0 + (0 if REVERSE else QUADS - 1), 1)
    if REVERSE:
        b_h0, b_h1, b_h2, b_h3 = b_h3, b_h2, b_h1, b_h0
    return join_quarters(b_h0, b_h1, b_h2, b_h3), b_end


@triton.jit
def linear_scan(b_a, b_b, b_start, CARRIES: tl.constexpr, REVERSE: tl.constexpr):
    """h_t = a_t h_{t-1} + b_t up the positions, or down; each h_{t-1} (channels, positions), and the end.

    The start (channels, 1 or lanes) is what is `carried`; the end (channels, lanes) is the same in all lanes.

    Neighbors are composed in a thread and only their composition is scanned across threads: a reversed
    tl.associative_scan would move every element between lanes several times. A thread holds four of 128 positions and
    eight of 256; of these, pairs are composed first.
    """
    if b_a.shape[1] < 256:
        b_before, b_end = scan_quads(b_a, b_b, b_start, CARRIES, REVERSE)
    else:
        b_a0, b_a1 = tl.split(tl.reshape(b_a, (b_a.shape[0], b_a.shape[1] // 2, 2)))
        b_b0, b_b1 = tl.split(tl.reshape(b_b, (b_a.shape[0], b_a.shape[1] // 2, 2)))
        if REVERSE:
            b_a0, b_a1, b_b0, b_b1 = b_a1, b_a0, b_b1, b_b0
        b_h0, b_end = scan_quads(b_a0 * b_a1, b_a1 * b_b0 + b_b1, b_start, CARRIES, REVERSE)
        b_h1 = b_a0 * b_h0 + b_b0
        if REVERSE:
            b_h0, b_h1 = b_h1, b_h0
        b_before = tl.reshape(tl.join(b_h0, b_h1), b_a.shape)
    return b_before, b_end


@triton.jit
def log2(b_x):
    """By the hardware unit, within 2^-22 on [1, 2]."""
    return tl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=f,f", [b_x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def softplus(b_x, APPROX: tl.constexpr):
    """log(1 + exp(x)) as max(x, 0) + log1p(exp(-|x|)), and its derivative; APPROX: as exact as half precision needs."""
    b_z = tl.exp2(tl.abs(b_x) * -LOG2_E)
    if APPROX:
        b_log1p = log2(1.0 + b_z) * LN_2
    else:
        # Small steps are the rule, and log(1 + z) loses them; this minimax log1p(z) / z is within 2e-7 on [0, 1].
        b_p = ((0.0052326913 * b_z - 0.0295052268) * b_z + 0.078225933) * b_z - 0.136632442
        b_p = ((b_p * b_z + 0.191060066) * b_z - 0.24842982) * b_z + 0.333190978
        b_p = (b_p * b_z - 0.499994934) * b_z + 0.99999994
        b_log1p = b_p * b_z
    return tl.maximum(b_x, 0.0) + b_log1p, tl.exp2((tl.minimum(b_x, 0.0) - b_log1p) * LOG2_E)


@triton.jit
def load_weights(
    p_D, p_bias, o_c, m_c, BLOCK_C: tl.constexpr, CHANNELS: tl.constexpr, DIRECTIONS: tl.constexpr,
    HAS_D: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """The sum of D over the directions, and the bias of each, (channels,)."""
    b_D = tl.zeros((BLOCK_C,), dtype=tl.float32)
    b_bias0 = tl.zeros((BLOCK_C,), dtype=tl.float32)
    b_bias1 = tl.zeros((BLOCK_C,), dtype=tl.float32)
    if HAS_D:
        for m in tl.static_range(DIRECTIONS):
            b_D += tl.load(p_D + m * CHANNELS + o_c, mask=m_c, other=0.0)
    if HAS_BIAS:
        b_bias0 = tl.load(p_bias + o_c, mask=m_c, other=0.0)
        if DIRECTIONS == 2:
            b_bias1 = tl.load(p_bias + CHANNELS + o_c, mask=m_c, other=0.0)
    return b_D, b_bias0, b_bias1


@triton.jit
def load_block(p_x, o_c, m_c, i_k, LENGTH: tl.constexpr, BLOCK_L: tl.constexpr):
    """Chunk i_k of the rows o_c of x (channels, positions) in float32, zero past the end."""
    o_l = i_k * BLOCK_L + tl.arange(0, BLOCK_L)
    m_cl = m_c[:, None] & (o_l < LENGTH)[None, :]
    return tl.load(p_x + o_c[:, None] * LENGTH + o_l[None, :], mask=m_cl, other=0.0).to(tl.float32)


@triton.jit
def store_block(p_x, b_x, o_c, m_c, i_k, LENGTH: tl.constexpr, BLOCK_L: tl.constexpr):
    """Write chunk i_k of the rows o_c of x (channels, positions)."""
    o_l = i_k * BLOCK_L + tl.arange(0, BLOCK_L)
    m_cl = m_c[:, None] & (o_l < LENGTH)[None, :]
    tl.store(p_x + o_c[:, None] * LENGTH + o_l[None, :], b_x, mask=m_cl)


@triton.jit
def load_row(p_row, i_k, LENGTH: tl.constexpr, BLOCK_L: tl.constexpr):
    """Chunk i_k of one row (positions,) in float32, zero past the end."""
    o_l = i_k * BLOCK_L + tl.arange(0, BLOCK_L)
    return tl.load(p_row + o_l, mask=o_l < LENGTH, other=0.0).to(tl.float32)


@triton.jit
def boundary_offsets(i_saved, n, o_c, m_c, BOUNDARIES: tl.constexpr, CHANNELS: tl.constexpr, STATE: tl.constexpr):
    """Offsets and mask of state n (channels,) at a saved boundary; masked before the first and after the last."""
    o_saved = tl.zeros_like(o_c) + i_saved
    return (o_saved * STATE + n) * CHANNELS + o_c, m_c & (o_saved >= 0) & (o_saved < BOUNDARIES)


@triton.jit
def store_end(
    p_states, b_end, i_saved, n, o_c, m_c, BOUNDARIES: tl.constexpr, CHANNELS: tl.constexpr, STATE: tl.constexpr
):
    """Write state n at a saved boundary, (channels, lanes) and the same in all lanes."""
    o_end, m_end = boundary_offsets(i_saved, n, o_c, m_c, BOUNDARIES, CHANNELS, STATE)
    o_lane = tl.arange(0, b_end.shape[1])[None, :]
    tl.store(p_states + o_end[:, None] + 0 * o_lane, b_end, mask=m_end[:, None] & (o_lane == 0))


@triton.jit
def scan_chunk(
    b_y, b_carry, b_u, b_d, p_A, p_B, p_C, p_states, i_k, o_c, m_c,
    CHANNELS: tl.constexpr, LENGTH: tl.constexpr, STATE: tl.constexpr, STRIDE_N: tl.constexpr, SPACING: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_N: tl.constexpr, SOFTPLUS: tl.constexpr, APPROX: tl.constexpr,
    REVERSE: tl.constexpr,
):  # fmt: skip
    """Add one direction's output on chunk i_k to b_y (channels, positions); return it and the carried state."""
    CHUNKS: tl.constexpr = (LENGTH + BLOCK_L - 1) // BLOCK_L
    BOUNDARIES: tl.constexpr = (LENGTH + SPACING - 1) // SPACING - 1
    PER_CHUNK: tl.constexpr = BLOCK_L // SPACING
    o_n = tl.arange(0, BLOCK_N)
    o_j = tl.arange(0, BLOCK_L)
    # Boundary s lies between positions (s + 1) * SPACING - 1 and (s + 1) * SPACING.
    if REVERSE:
        o_save = (i_k * BLOCK_L + o_j) // SPACING - 1
        m_save = (o_j % SPACING == 0) & (o_j != 0) & (o_save < BOUNDARIES)
    else:
        o_save = (i_k * BLOCK_L + o_j) // SPACING
        m_save = (o_j % SPACING == SPACING - 1) & (o_j != BLOCK_L - 1) & (o_save < BOUNDARIES)
    if SOFTPLUS:
        b_d, _ = softplus(b_d, APPROX)
    b_v = b_d * b_u
    for n in range(STATE):
        b_A = tl.load(p_A + o_c * STATE + n, mask=m_c, other=0.0) * LOG2_E
        b_B = load_row(p_B + n * STRIDE_N, i_k, LENGTH, BLOCK_L)
        b_C = load_row(p_C + n * STRIDE_N, i_k, LENGTH, BLOCK_L)
        # Past the end u and B are zero: there direction 1 carries a zero state, whatever the decay.
        b_a = tl.exp2(b_d * b_A[:, None])
        b_in = b_v * b_B[None, :]
        b_before, b_end = linear_scan(b_a, b_in, carried(b_carry, o_n, n, STATE), CHUNKS > 1, REVERSE)
        b_h = b_a * b_before + b_in
        if CHUNKS > 1:
            b_carry = carry_on(b_carry, b_end, o_n, n, STATE)
            i_end = (i_k if REVERSE else i_k + 1) * PER_CHUNK - 1
            store_end(p_states, b_end, i_end, n, o_c, m_c, BOUNDARIES, CHANNELS, STATE)
        if PER_CHUNK > 1:
            o_saves = (o_save * STATE + n)[None, :] * CHANNELS + o_c[:, None]
            tl.store(p_states + o_saves, b_h, mask=m_c[:, None] & m_save[None, :])
        b_y += b_C[None, :] * b_h
    return b_y, b_carry


@triton.jit
def scan_direction(
    p_u, p_delta, p_A, p_B, p_C, p_y, p_states, b_bias, b_D, o_c, m_c,
    CHANNELS: tl.constexpr, LENGTH: tl.constexpr, STATE: tl.constexpr, STRIDE_N: tl.constexpr, SPACING: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, SOFTPLUS: tl.constexpr,
    APPROX: tl.constexpr, REVERSE: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Write (or with ADD add) the outputs of a direction to p_y, its states to p_states; direction 0 includes D u."""
    CHUNKS: tl.constexpr = (LENGTH + BLOCK_L - 1) // BLOCK_L
    b_carry = no_carry(BLOCK_C, BLOCK_L, BLOCK_N, STATE)
    for i_step in tl.range(0, CHUNKS, num_stages=STAGES):
        i_k = CHUNKS - 1 - i_step if REVERSE else i_step
        b_u = load_block(p_u, o_c, m_c, i_k, LENGTH, BLOCK_L)
        b_d = load_block(p_delta, o_c, m_c, i_k, LENGTH, BLOCK_L) + b_bias[:, None]
        b_y = tl.zeros((BLOCK_C, BLOCK_L), dtype=tl.float32)
        if not REVERSE:
            b_y = b_D[:, None] * b_u
        if ADD:
            b_y += load_block(p_y, o_c, m_c, i_k, LENGTH, BLOCK_L)
        b_y, b_carry = scan_chunk(
            b_y, b_carry, b_u, b_d, p_A, p_B, p_C, p_states, i_k, o_c, m_c,
            CHANNELS, LENGTH, STATE, STRIDE_N, SPACING, BLOCK_C, BLOCK_L, BLOCK_N, SOFTPLUS, APPROX, REVERSE,
        )  # fmt: skip
        store_block(p_y, b_y, o_c, m_c, i_k, LENGTH, BLOCK_L)


@triton.jit
def scan_forward_kernel(
    p_u, p_delta, p_A, p_B, p_C, p_D, p_bias, p_y, p_states, groups,
    DIRECTIONS: tl.constexpr, CHANNELS: tl.constexpr, LENGTH: tl.constexpr, STATE: tl.constexpr,
    STRIDE_B: tl.constexpr, STRIDE_G: tl.constexpr, STRIDE_M: tl.constexpr, STRIDE_N: tl.constexpr,
    SPACING: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    HAS_D: tl.constexpr, HAS_BIAS: tl.constexpr, SOFTPLUS: tl.constexpr, APPROX: tl.constexpr,
):  # fmt: skip
    """y (b, g, c, l) and the states (b, g, m, boundary, n, c) of one batch entry, group and block of channels."""
    BOUNDARIES: tl.constexpr = (LENGTH + SPACING - 1) // SPACING - 1
    C_BLOCKS: tl.constexpr = (CHANNELS + BLOCK_C - 1) // BLOCK_C
    ROWS: tl.constexpr = CHANNELS * LENGTH
    SAVED: tl.constexpr = BOUNDARIES * STATE * CHANNELS
    WEIGHTS: tl.constexpr = CHANNELS * STATE
    # 64-bit before the strides: a batch of large maps has more than 2^31 elements.
    i_bg = (tl.program_id(0) // C_BLOCKS).to(tl.int64)
    i_b = i_bg // groups
    i_g = i_bg % groups
    o_c = (tl.program_id(0) % C_BLOCKS) * BLOCK_C + tl.arange(0, BLOCK_C)
    m_c = o_c < CHANNELS
    p_u += i_bg * ROWS
    p_y += i_bg * ROWS
    p_delta += i_bg * DIRECTIONS * ROWS
    p_states += i_bg * DIRECTIONS * SAVED
    p_A += i_g * DIRECTIONS * WEIGHTS
    p_bias += i_g * DIRECTIONS * CHANNELS
    p_D += i_g * DIRECTIONS * CHANNELS
    p_B += i_b * STRIDE_B + i_g * STRIDE_G
    p_C += i_b * STRIDE_B + i_g * STRIDE_G

    b_D, b_bias0, b_bias1 = load_weights(p_D, p_bias, o_c, m_c, BLOCK_C, CHANNELS, DIRECTIONS, HAS_D, HAS_BIAS)
    if (DIRECTIONS == 2) and (LENGTH <= BLOCK_L):
        b_u = load_block(p_u, o_c, m_c, 0, LENGTH, BLOCK_L)
        b_y = b_D[:, None] * b_u
        b_carry = no_carry(BLOCK_C, BLOCK_L, BLOCK_N, STATE)
        for m in tl.static_range(2):
            b_d = load_block(p_delta + m * ROWS, o_c, m_c, 0, LENGTH, BLOCK_L) + (b_bias1 if m else b_bias0)[:, None]
            b_y, _ = scan_chunk(
                b_y, b_carry, b_u, b_d, p_A + m * WEIGHTS, p_B + m * STRIDE_M, p_C + m * STRIDE_M,
                p_states + m * SAVED, 0, o_c, m_c,
                CHANNELS, LENGTH, STATE, STRIDE_N, SPACING, BLOCK_C, BLOCK_L, BLOCK_N, SOFTPLUS, APPROX, m == 1,
            )  # fmt: skip
        store_block(p_y, b_y, o_c, m_c, 0, LENGTH, BLOCK_L)
        return
    if DIRECTIONS == 2:
        scan_direction(
            p_u, p_delta + ROWS, p_A + WEIGHTS, p_B + STRIDE_M, p_C + STRIDE_M, p_y, p_states + SAVED, b_bias1,
            b_D, o_c, m_c,
            CHANNELS, LENGTH, STATE, STRIDE_N, SPACING, BLOCK_C, BLOCK_L, BLOCK_N, STAGES, SOFTPLUS, APPROX,
            True, False,
        )  # fmt: skip
        # What one thread stored above, another may load below.
        tl.debug_barrier()
    scan_direction(
        p_u, p_delta, p_A, p_B, p_C, p_y, p_states, b_bias0, b_D, o_c, m_c,
        CHANNELS, LENGTH, STATE, STRIDE_N, SPACING, BLOCK_C, BLOCK_L, BLOCK_N, STAGES, SOFTPLUS, APPROX,
        False, DIRECTIONS == 2,
    )  # fmt: skip
