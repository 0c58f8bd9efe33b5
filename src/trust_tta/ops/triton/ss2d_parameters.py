"""SS2D's parameters gathered by direction, and the adjoint: one kernel each, as a launch costs more than the copy."""

# mypy: ignore-errors
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from trust_tta.ops.tensors import Gathered, Parameters
from trust_tta.ops.triton.backward import PartialSums
from trust_tta.ops.triton.tiling import ceil_div

COPY_BLOCK = 1024  # elements of a parameter that a program copies
SUM_BLOCK = 64  # elements of a gradient that a program sums
IMAGE_BLOCK = 32  # images whose gradients a program sums at a time


def gather(parameters: Parameters, directions: Tensor, dtype: torch.dtype) -> Gathered:
    """`reference.gather` by one kernel."""
    parameters = Parameters(*(t.contiguous() for t in parameters))
    x_proj_weight, dt_projs_weight, dt_projs_bias, A_logs, Ds = parameters
    (_, rows, c), rank, n = x_proj_weight.shape, dt_projs_weight.shape[2], A_logs.shape[1]
    places = (*directions.shape[:-1], 2, 2)
    x_proj = x_proj_weight.new_empty((*places[:-1], 2 * rows, c), dtype=dtype)
    dt_proj = x_proj_weight.new_empty((*places, c, rank), dtype=dtype)
    shapes = ((A_logs, (*places, c, n)), (Ds, (*places, c)), (dt_projs_bias, (*places, c)))
    A, D, dt_bias = (t.new_empty(s, dtype=torch.promote_types(t.dtype, torch.float32)) for t, s in shapes)
    gathered = Gathered(x_proj, dt_proj, A, D, dt_bias)
    sizes = _sizes(rows, c, rank, n)
    with torch.cuda.device_of(directions):
        gather_kernel[(directions.numel(), _count_blocks(sizes, COPY_BLOCK))](
            directions.contiguous(), *parameters, *gathered, **sizes, BLOCK=COPY_BLOCK, enable_fp_fusion=True
        )
    return gathered


def scatter_add(
    directions: Tensor, gathered: Gathered, dx_proj: Tensor | None, ddt_proj: Tensor | None, scan: PartialSums | None
) -> Parameters:
    """Gradients of the parameters; those of the projections or of the scan are empty where their partial sums are None.

    dx_proj (p, 2, 2(r+2n), c) and ddt_proj (q, 4, c, r) are p and q partial sums, or one per image where each has its
    own order.
    """
    A, (c, rank) = gathered.A, gathered.dt_proj.shape[-2:]
    shapes = gathered.parameter_shapes()
    wanted = [dx_proj is not None] * 2 + [scan is not None] * 3
    outputs = Parameters(*(A.new_empty(s if w else 0) for s, w in zip(shapes, wanted, strict=True)))
    if not any(wanted):
        return outputs
    sizes = _sizes(shapes[0][1], c, rank, A.shape[-1])
    if dx_proj is None:
        sizes |= {"X_PROJ": 0, "DT_PROJ": 0}
    if scan is None:
        sizes |= {"STATES": 0, "CHANNELS": 0}
    projections = [A if t is None else t.contiguous() for t in (dx_proj, ddt_proj)]
    sums = [A] * 3 if scan is None else [scan.A, scan.D, scan.delta_bias]
    images = sums[1].numel() // (2 * c)
    with torch.cuda.device_of(A):
        scatter_add_kernel[(_count_blocks(sizes, SUM_BLOCK), 4)](
            directions.contiguous(), *projections, *sums, A, *outputs, *(len(t) for t in projections), images,
            **sizes, PER_IMAGE=directions.dim() == 2, BLOCK_P=IMAGE_BLOCK, BLOCK=SUM_BLOCK, enable_fp_fusion=True,
        )  # fmt: skip
    return outputs


def _sizes(rows: int, channels: int, rank: int, state: int) -> dict[str, int]:
    """Elements of one group of each parameter."""
    return {"X_PROJ": rows * channels, "DT_PROJ": channels * rank, "STATES": channels * state, "CHANNELS": channels}


def _count_blocks(sizes: dict[str, int], block: int) -> int:
    return sum(ceil_div(size, block) for size in (*sizes.values(), sizes["CHANNELS"]))


@triton.jit
def copy_block(p_from, p_to, i_from, i_to, i_block, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Copy a block of row i_from of p_from to row i_to of p_to."""
    o = i_block * BLOCK + tl.arange(0, BLOCK)
    b_x = tl.load(p_from + i_from * SIZE + o, mask=o < SIZE)
    tl.store(p_to + i_to * SIZE + o, b_x.to(p_to.dtype.element_ty), mask=o < SIZE)


@triton.jit
def gather_kernel(
    p_directions, p_x_proj_weight, p_dt_weight, p_dt_bias, p_A_logs, p_Ds, p_x_proj, p_dt_proj, p_A, p_D, p_bias,
    X_PROJ: tl.constexpr, DT_PROJ: tl.constexpr, STATES: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of one of the five parameters, for one direction."""
    DT_PROJ_AT: tl.constexpr = (X_PROJ + BLOCK - 1) // BLOCK
    A_AT: tl.constexpr = DT_PROJ_AT + (DT_PROJ + BLOCK - 1) // BLOCK
    D_AT: tl.constexpr = A_AT + (STATES + BLOCK - 1) // BLOCK
    BIAS_AT: tl.constexpr = D_AT + (CHANNELS + BLOCK - 1) // BLOCK
    # 64-bit before the sizes: each image may have its own order.
    i_to = tl.program_id(0).to(tl.int64)
    i_from = tl.load(p_directions + i_to)
    i = tl.program_id(1)
    if i < DT_PROJ_AT:
        copy_block(p_x_proj_weight, p_x_proj, i_from, i_to, i, X_PROJ, BLOCK)
    elif i < A_AT:
        copy_block(p_dt_weight, p_dt_proj, i_from, i_to, i - DT_PROJ_AT, DT_PROJ, BLOCK)
    elif i < D_AT:
        o = (i - A_AT) * BLOCK + tl.arange(0, BLOCK)
        b_log = tl.load(p_A_logs + i_from * STATES + o, mask=o < STATES).to(p_A.dtype.element_ty)
        tl.store(p_A + i_to * STATES + o, -tl.exp(b_log), mask=o < STATES)
    elif i < BIAS_AT:
        copy_block(p_Ds, p_D, i_from, i_to, i - D_AT, CHANNELS, BLOCK)
    else:
        copy_block(p_dt_bias, p_bias, i_from, i_to, i - BIAS_AT, CHANNELS, BLOCK)


@triton.jit
def sum_directions(
    p_x, p_factor, p_out, p_directions, i_group, i_block, images,
    SIZE: tl.constexpr, IMAGE: tl.constexpr, PAIR: tl.constexpr, HALF: tl.constexpr, FACTOR: tl.constexpr,
    PER_IMAGE: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the sum of a block of x, times the factor, over the images and the directions that the group reads.

    Direction s of an image lies at (s // 2) * PAIR + (s % 2) * HALF from it.
    """
    o = i_block * BLOCK + tl.arange(0, BLOCK)
    m = o < SIZE
    b_sum = tl.zeros((BLOCK_P, BLOCK), dtype=tl.float32)
    for s in tl.static_range(4):
        if PER_IMAGE or tl.load(p_directions + s) == i_group:  # most directions are another group's
            for i_first in range(0, images, BLOCK_P):
                o_p = (i_first + tl.arange(0, BLOCK_P)).to(tl.int64)
                m_p = o_p < images
                o_factor = s * SIZE + o[None, :]
                if PER_IMAGE:
                    m_p &= tl.load(p_directions + o_p * 4 + s, mask=m_p, other=-1) == i_group
                    o_factor += o_p[:, None] * (4 * SIZE)
                m_read = m_p[:, None] & m[None, :]
                o_x = o_p * IMAGE + (s // 2 * PAIR + s % 2 * HALF)
                b_x = tl.load(p_x + o_x[:, None] + o[None, :], mask=m_read, other=0.0).to(tl.float32)
                if FACTOR:
                    b_x *= tl.load(p_factor + o_factor, mask=m_read, other=0.0)
                b_sum += b_x
    tl.store(p_out + i_group * SIZE + o, tl.sum(b_sum, 0), mask=m)


@triton.jit(do_not_specialize=["x_projs", "dt_projs", "images"])
def scatter_add_kernel(
    p_directions, p_dx_proj, p_ddt_proj, p_dA, p_dD, p_dbias, p_A, p_x_proj_weight, p_dt_weight, p_dt_bias, p_A_logs,
    p_Ds, x_projs, dt_projs, images,
    X_PROJ: tl.constexpr, DT_PROJ: tl.constexpr, STATES: tl.constexpr, CHANNELS: tl.constexpr, PER_IMAGE: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of the gradient of one group of one of the five parameters."""
    DT_PROJ_AT: tl.constexpr = (X_PROJ + BLOCK - 1) // BLOCK
    A_AT: tl.constexpr = DT_PROJ_AT + (DT_PROJ + BLOCK - 1) // BLOCK
    D_AT: tl.constexpr = A_AT + (STATES + BLOCK - 1) // BLOCK
    BIAS_AT: tl.constexpr = D_AT + (CHANNELS + BLOCK - 1) // BLOCK
    i = tl.program_id(0)
    i_group = tl.program_id(1)
    if i < DT_PROJ_AT:
        sum_directions(
            p_dx_proj, p_A, p_x_proj_weight, p_directions, i_group, i, x_projs,
            X_PROJ, 4 * X_PROJ, 2 * X_PROJ, X_PROJ, False, PER_IMAGE, BLOCK_P, BLOCK,
        )  # fmt: skip
    elif i < A_AT:
        sum_directions(
            p_ddt_proj, p_A, p_dt_weight, p_directions, i_group, i - DT_PROJ_AT, dt_projs,
            DT_PROJ, 4 * DT_PROJ, 2 * DT_PROJ, DT_PROJ, False, PER_IMAGE, BLOCK_P, BLOCK,
        )  # fmt: skip
    elif i < D_AT:
        sum_directions(
            p_dA, p_A, p_A_logs, p_directions, i_group, i - A_AT, images,
            STATES, 4 * STATES, 2 * STATES, STATES, True, PER_IMAGE, BLOCK_P, BLOCK,
        )  # fmt: skip
    elif i < BIAS_AT:
        sum_directions(
            p_dD, p_A, p_Ds, p_directions, i_group, i - D_AT, images,
            CHANNELS, 2 * CHANNELS, CHANNELS, 0, False, PER_IMAGE, BLOCK_P, BLOCK,
        )  # fmt: skip
    else:
        sum_directions(
            p_dbias, p_A, p_dt_bias, p_directions, i_group, i - BIAS_AT, images,
            CHANNELS, 4 * CHANNELS, 2 * CHANNELS, CHANNELS, False, PER_IMAGE, BLOCK_P, BLOCK,
        )  # fmt: skip
