"""`groups.take` and its adjoint on a CUDA device, one kernel each: a launch costs more than moving so few numbers."""

# mypy: ignore-errors
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from trust_tta.scan.groups import Five, parameter_shapes
from trust_tta.scan.sizes import ceil_div
from trust_tta.scan.triton_scan import Parts

COPIED = 1024  # numbers of a parameter that a program moves
SUMMED = 64  # numbers of a gradient that a program sums,
PARTS = 16  # over so many images at a time


def take(dtype: torch.dtype, slots: Tensor, parameters: Five) -> Five:
    """As `groups.take`."""
    x_proj_weight, dt_projs_weight, dt_projs_bias, A_logs, Ds = (t.contiguous() for t in parameters)
    (_, rows, c), rank, n = x_proj_weight.shape, dt_projs_weight.shape[2], A_logs.shape[1]
    places = (*slots.shape[:-1], 2, 2)
    project = x_proj_weight.new_empty((*places[:-1], 2 * rows, c), dtype=dtype)
    widen = x_proj_weight.new_empty((*places, c, rank), dtype=dtype)
    shapes = ((A_logs, (*places, c, n)), (Ds, (*places, c)), (dt_projs_bias, (*places, c)))
    A, D, bias = (t.new_empty(s, dtype=torch.promote_types(t.dtype, torch.float32)) for t, s in shapes)
    sizes = _sizes(rows, c, rank, n)
    with torch.cuda.device_of(slots):
        take_kernel[(slots.numel(), _count_blocks(sizes, COPIED))](
            slots.contiguous(), x_proj_weight, dt_projs_weight, dt_projs_bias, A_logs, Ds, project, widen, A, D, bias,
            **sizes, BLOCK=COPIED, enable_fp_fusion=True,
        )  # fmt: skip
    return project, widen, A, D, bias


def give(slots: Tensor, taken: Five, dproject: Tensor | None, dwiden: Tensor | None, scan: Parts | None) -> Five:
    """Gradients of the five parameters, those of the products or of the scan empty where there are no parts of them.

    dproject (p, 2, 2(r+2n), c), dwiden (q, 4, c, r), and those of the scan as `triton_scan.differentiate` leaves them;
    p and q are any numbers of parts, or b where each image has its own order.
    """
    project, widen, A, _, _ = taken
    shapes = parameter_shapes(project, widen, A)
    wanted = [dproject is not None] * 2 + [scan is not None] * 3
    outputs = tuple(A.new_empty(s if w else 0) for s, w in zip(shapes, wanted, strict=True))
    if not any(wanted):
        return outputs
    sizes = _sizes(shapes[0][1], *widen.shape[-2:], A.shape[-1])
    if dproject is None:
        sizes |= {"PROJECT": 0, "WIDEN": 0}
    if scan is None:
        sizes |= {"STATES": 0, "CHANNELS": 0}
    products = [A if t is None else t.contiguous() for t in (dproject, dwiden)]
    sums = [A] * 3 if scan is None else [scan.A, scan.D, scan.bias]
    images = sums[1].numel() // (2 * widen.shape[-2])
    with torch.cuda.device_of(A):
        give_kernel[(_count_blocks(sizes, SUMMED), 4)](
            slots.contiguous(), *products, *sums, A, *outputs, *(len(t) for t in products), images,
            **sizes, OWN=slots.dim() == 2, BLOCK_P=PARTS, BLOCK=SUMMED, enable_fp_fusion=True,
        )  # fmt: skip
    return outputs


def _sizes(rows: int, channels: int, rank: int, state: int) -> dict[str, int]:
    """Numbers in one group of each parameter."""
    return {"PROJECT": rows * channels, "WIDEN": channels * rank, "STATES": channels * state, "CHANNELS": channels}


def _count_blocks(sizes: dict[str, int], block: int) -> int:
    counts = [ceil_div(size, block) for size in (*sizes.values(), sizes["CHANNELS"])]
    return sum(counts)


@triton.jit
def move(p_from, p_to, i_from, i_to, i_block, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Copy a block of row i_from of p_from to row i_to of p_to."""
    o = i_block * BLOCK + tl.arange(0, BLOCK)
    b_x = tl.load(p_from + i_from * SIZE + o, mask=o < SIZE)
    tl.store(p_to + i_to * SIZE + o, b_x.to(p_to.dtype.element_ty), mask=o < SIZE)


@triton.jit
def take_kernel(
    p_slots, p_x_proj, p_dt, p_dt_bias, p_A_logs, p_Ds, p_project, p_widen, p_A, p_D, p_bias,
    PROJECT: tl.constexpr, WIDEN: tl.constexpr, STATES: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of one of the five parameters, for one place."""
    WIDEN_AT: tl.constexpr = (PROJECT + BLOCK - 1) // BLOCK
    A_AT: tl.constexpr = WIDEN_AT + (WIDEN + BLOCK - 1) // BLOCK
    D_AT: tl.constexpr = A_AT + (STATES + BLOCK - 1) // BLOCK
    BIAS_AT: tl.constexpr = D_AT + (CHANNELS + BLOCK - 1) // BLOCK
    # 64-bit before the sizes: each image may have its own order.
    i_to = tl.program_id(0).to(tl.int64)
    i_from = tl.load(p_slots + i_to)
    i = tl.program_id(1)
    if i < WIDEN_AT:
        move(p_x_proj, p_project, i_from, i_to, i, PROJECT, BLOCK)
    elif i < A_AT:
        move(p_dt, p_widen, i_from, i_to, i - WIDEN_AT, WIDEN, BLOCK)
    elif i < D_AT:
        o = (i - A_AT) * BLOCK + tl.arange(0, BLOCK)
        b_log = tl.load(p_A_logs + i_from * STATES + o, mask=o < STATES).to(p_A.dtype.element_ty)
        tl.store(p_A + i_to * STATES + o, -tl.exp(b_log), mask=o < STATES)
    elif i < BIAS_AT:
        move(p_Ds, p_D, i_from, i_to, i - D_AT, CHANNELS, BLOCK)
    else:
        move(p_dt_bias, p_bias, i_from, i_to, i - BIAS_AT, CHANNELS, BLOCK)


@triton.jit
def sum_named(
    p_x, p_factor, p_slots, i_group, i_block, images,
    SIZE: tl.constexpr, IMAGE: tl.constexpr, PAIR: tl.constexpr, HALF: tl.constexpr, FACTOR: tl.constexpr,
    OWN: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sum of a block of x, times the factor, over the images and the places where the group is named.

    Place s of an image lies at (s // 2) * PAIR + (s % 2) * HALF from it.
    """
    o = i_block * BLOCK + tl.arange(0, BLOCK)
    m = o < SIZE
    b_sum = tl.zeros((BLOCK_P, BLOCK), dtype=tl.float32)
    for i_first in range(0, images, BLOCK_P):
        o_p = (i_first + tl.arange(0, BLOCK_P)).to(tl.int64)
        o_own = o_p * 4 if OWN else o_p * 0
        for s in tl.static_range(4):
            b_slot = tl.load(p_slots + o_own + s, mask=o_p < images, other=-1)
            m_named = (b_slot == i_group)[:, None] & m[None, :]
            o_x = o_p * IMAGE + (s // 2 * PAIR + s % 2 * HALF)
            b_x = tl.load(p_x + o_x[:, None] + o[None, :], mask=m_named, other=0.0).to(tl.float32)
            if FACTOR:
                b_x *= tl.load(p_factor + ((o_own + s) * SIZE)[:, None] + o[None, :], mask=m_named, other=0.0)
            b_sum += b_x
    return o, m, tl.sum(b_sum, 0)


@triton.jit(do_not_specialize=["projects", "widens", "images"])
def give_kernel(
    p_slots, p_dproject, p_dwiden, p_dA, p_dD, p_dbias, p_A, p_x_proj, p_dt, p_dt_bias, p_A_logs, p_Ds, projects,
    widens, images,
    PROJECT: tl.constexpr, WIDEN: tl.constexpr, STATES: tl.constexpr, CHANNELS: tl.constexpr, OWN: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of the gradient of one group of one of the five parameters."""
    WIDEN_AT: tl.constexpr = (PROJECT + BLOCK - 1) // BLOCK
    A_AT: tl.constexpr = WIDEN_AT + (WIDEN + BLOCK - 1) // BLOCK
    D_AT: tl.constexpr = A_AT + (STATES + BLOCK - 1) // BLOCK
    BIAS_AT: tl.constexpr = D_AT + (CHANNELS + BLOCK - 1) // BLOCK
    i = tl.program_id(0)
    i_group = tl.program_id(1)
    if i < WIDEN_AT:
        o, m, b_sum = sum_named(
            p_dproject, p_A, p_slots, i_group, i, projects,
            PROJECT, 4 * PROJECT, 2 * PROJECT, PROJECT, False, OWN, BLOCK_P, BLOCK,
        )  # fmt: skip
        tl.store(p_x_proj + i_group * PROJECT + o, b_sum, mask=m)
    elif i < A_AT:
        o, m, b_sum = sum_named(
            p_dwiden, p_A, p_slots, i_group, i - WIDEN_AT, widens,
            WIDEN, 4 * WIDEN, 2 * WIDEN, WIDEN, False, OWN, BLOCK_P, BLOCK,
        )  # fmt: skip
        tl.store(p_dt + i_group * WIDEN + o, b_sum, mask=m)
    elif i < D_AT:
        o, m, b_sum = sum_named(
            p_dA, p_A, p_slots, i_group, i - A_AT, images,
            STATES, 4 * STATES, 2 * STATES, STATES, True, OWN, BLOCK_P, BLOCK,
        )  # fmt: skip
        tl.store(p_A_logs + i_group * STATES + o, b_sum, mask=m)
    elif i < BIAS_AT:
        o, m, b_sum = sum_named(
            p_dD, p_A, p_slots, i_group, i - D_AT, images,
            CHANNELS, 2 * CHANNELS, CHANNELS, 0, False, OWN, BLOCK_P, BLOCK,
        )  # fmt: skip
        tl.store(p_Ds + i_group * CHANNELS + o, b_sum, mask=m)
    else:
        o, m, b_sum = sum_named(
            p_dbias, p_A, p_slots, i_group, i - BIAS_AT, images,
            CHANNELS, 4 * CHANNELS, 2 * CHANNELS, CHANNELS, False, OWN, BLOCK_P, BLOCK,
        )  # fmt: skip
        tl.store(p_dt_bias + i_group * CHANNELS + o, b_sum, mask=m)
