"""The Triton scan as plain functions: launch sizes, buffers, launches. Importable without triton.

Layouts, for groups g, directions m, channels c, positions l and states n: u, y, dy, du (b, g, c, l);
delta, ddelta (b, g, m, c, l); A, dA (g, m, c, n); B, C, dB, dC (b, g, m, n, l); D, delta_bias and their gradients
(g, m, c). Direction 1 runs from the last position to the first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from trust_tta.optional import require
from trust_tta.scan.sizes import ceil_div, power_of_two

SPACING = 128  # positions between saved states in long rows


@dataclass(frozen=True)
class Tile:
    """What one program works on at a time: channels x positions, by so many warps of threads of so many registers.

    A warp holds 128 positions of a channel; more positions than that in a tile of several warps make the scans slow.
    """

    channels: int
    positions: int
    warps: int
    registers: int | None = None


@dataclass(frozen=True)
class Tiling:
    """The tiles of both kernels; the state is saved every `spacing` positions, which divides both tiles' positions."""

    forward: Tile
    backward: Tile
    spacing: int


def choose_tiling(channels: int, length: int, dtype: torch.dtype) -> Tiling:
    """The launch sizes for rows of this shape, a function of nothing else so that runs repeat.

    The fastest on an H200 at the stages of VMamba-T; a warp holds twice the positions in half precision. What is
    saved for the backward does not depend on the dtype.
    """
    if length <= 64:
        return tiling(channels, length, forward=Tile(4, 64, 1), backward=Tile(8, 64, 1))
    wide = 128 if dtype == torch.float32 else 256
    if length <= 256:
        return tiling(channels, length, forward=Tile(2, wide, 1), backward=Tile(2, 128, 1))
    return tiling(channels, length, forward=Tile(1, wide, 1), backward=Tile(2, wide, 1))


def tiling(channels: int, length: int, *, forward: Tile, backward: Tile) -> Tiling:
    """The two tiles, none larger than the powers of two that hold the channels and the positions."""
    spacing = min(forward.positions, backward.positions, SPACING)
    return Tiling(_fit(forward, channels, length), _fit(backward, channels, length), spacing)


def _fit(tile: Tile, channels: int, length: int) -> Tile:
    return replace(
        tile,
        channels=min(tile.channels, power_of_two(channels)),
        positions=min(tile.positions, max(16, power_of_two(length))),
    )


def states_shape(
    batch: int, groups: int, directions: int, channels: int, length: int, state: int
) -> tuple[int, int, int, int, int, int]:
    """The shape (b, g, m, slots, n, c) of the states that `forward` saves."""
    spacing = choose_tiling(channels, length, torch.float32).spacing
    return (batch, groups, directions, ceil_div(length, spacing) - 1, state, channels)


def forward(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    delta_bias: Tensor | None,
    delta_softplus: bool,
    *,
    sizes: Tiling | None = None,
) -> tuple[Tensor, Tensor]:
    """Return y (b, g, c, l) and the saved states (b, g, m, slots, n, c)."""
    require("triton", extra="triton")
    from trust_tta.scan.triton_forward import forward_kernel

    batch, groups, directions, channels, length = delta.shape
    state = A.shape[-1]
    sizes = sizes or choose_tiling(channels, length, u.dtype)
    u, delta, A = u.contiguous(), delta.contiguous(), _weight(A)
    B, C = _alike(B, C)
    y = torch.empty_like(u)
    slots = ceil_div(length, sizes.spacing) - 1
    states = u.new_empty((batch, groups, directions, slots, state, channels), dtype=torch.float32)
    programs = batch * groups * ceil_div(channels, sizes.forward.channels)
    with torch.cuda.device_of(u):
        forward_kernel[(programs,)](
            u, delta, A, B, C, _weight_or(D, A), _weight_or(delta_bias, A), y, states, groups,
            **_constants(delta, A, B, D, delta_bias, delta_softplus, sizes.forward, sizes.spacing),
        )  # fmt: skip
    return y, states


def backward(
    dy: Tensor,
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    delta_bias: Tensor | None,
    delta_softplus: bool,
    states: Tensor,
    *,
    sizes: Tiling | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of u, delta, A, B, C, D and delta_bias, the last two None where the input is None."""
    inputs = (dy, u, delta, A, B, C, D, delta_bias)
    du, ddelta, parts = differentiate(*inputs, delta_softplus, states, sizes=sizes)
    return (
        du,
        ddelta,
        parts.A.sum(0).to(A.dtype),
        parts.B.sum(3).to(B.dtype),
        parts.C.sum(3).to(C.dtype),
        None if D is None else parts.D.sum(0)[:, None].repeat(1, A.shape[1], 1).to(D.dtype),
        None if delta_bias is None else parts.bias.sum(0).to(delta_bias.dtype),
    )


class Parts(NamedTuple):
    """Gradients in float32 that wait to be summed, in a fixed order so that runs repeat.

    A (b, g, m, c, n), D (b, g, c), which is that of each direction, and bias (b, g, m, c) over the batch; B and C
    (b, g, m, blocks of channels, n, l) over the blocks.
    """

    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor
    bias: Tensor


def differentiate(
    dy: Tensor,
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    delta_bias: Tensor | None,
    delta_softplus: bool,
    states: Tensor,
    *,
    sizes: Tiling | None = None,
) -> tuple[Tensor, Tensor, Parts]:
    """Return du, ddelta, and the other gradients in parts."""
    require("triton", extra="triton")
    from trust_tta.scan.triton_backward import backward_kernel

    batch, groups, directions, channels, length = delta.shape
    state = A.shape[-1]
    sizes = sizes or choose_tiling(channels, length, u.dtype)
    tile = sizes.backward
    blocks, chunks = ceil_div(channels, tile.channels), ceil_div(length, tile.positions)
    dy, u, delta, A = dy.contiguous(), u.contiguous(), delta.contiguous(), _weight(A)
    B, C = _alike(B, C)
    du, ddelta = torch.empty_like(u), torch.empty_like(delta)
    # Each program writes its own part of these.
    dA = A.new_empty((batch, *A.shape))
    dB, dC = A.new_empty((2, batch, groups, directions, blocks, state, length))
    dD = A.new_empty((batch, groups, channels))
    dbias = A.new_empty((batch, groups, directions, channels))
    adjoints = A.new_empty((batch, groups, chunks - 1, state, channels) if directions == 2 else 0)
    with torch.cuda.device_of(u):
        backward_kernel[(batch * groups * blocks,)](
            dy, u, delta, A, B, C, _weight_or(D, A), _weight_or(delta_bias, A), states, adjoints, du, ddelta, dA, dB,
            dC, dD, dbias, groups,
            **_constants(delta, A, B, D, delta_bias, delta_softplus, tile, sizes.spacing),
        )  # fmt: skip
    return du, ddelta, Parts(dA, dB, dC, dD, dbias)


def sum_rows(parts: Parts, dparts: Tensor) -> None:
    """Write the sums of the parts of B and C to the last 2n rows of dparts (.., r+2n, l)."""
    from trust_tta.scan.triton_backward import rows_kernel

    *_, blocks, state, length = parts.B.shape
    block = min(128, power_of_two(length))
    places = dparts.numel() // (dparts.shape[-2] * length)
    with torch.cuda.device_of(dparts):
        rows_kernel[(places * 2 * state * ceil_div(length, block),)](
            parts.B, parts.C, dparts,
            BLOCKS=blocks, STATE=state, ROWS=dparts.shape[-2], LENGTH=length, BLOCK_P=16, BLOCK_L=block,
            enable_fp_fusion=True,
        )  # fmt: skip


def _weight(tensor: Tensor) -> Tensor:
    return tensor.float().contiguous()


def _weight_or(tensor: Tensor | None, unused: Tensor) -> Tensor:
    """The weight, or any tensor where there is none: the kernel takes a pointer and does not follow it."""
    return unused if tensor is None else _weight(tensor)


def _alike(B: Tensor, C: Tensor) -> tuple[Tensor, Tensor]:
    """B and C with the same strides and adjacent positions; slices of one projection already have both."""
    if B.stride() == C.stride() and (B.stride(-1) == 1 or B.shape[-1] == 1):
        return B, C
    return B.contiguous(), C.contiguous()


def _constants(
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    D: Tensor | None,
    delta_bias: Tensor | None,
    delta_softplus: bool,
    tile: Tile,
    spacing: int,
) -> dict[str, int | bool | None]:
    """What the kernels are compiled for. Lengths and strides too: loads are wide only where alignment is known."""
    state = A.shape[-1]
    return {
        "DIRECTIONS": delta.shape[2],
        "CHANNELS": delta.shape[3],
        "LENGTH": delta.shape[4],
        "STATE": state,
        "STRIDE_B": B.stride(0),
        "STRIDE_G": B.stride(1),
        "STRIDE_M": B.stride(2),
        "STRIDE_N": B.stride(3),
        "SPACING": spacing,
        "BLOCK_C": tile.channels,
        "BLOCK_L": tile.positions,
        "BLOCK_N": power_of_two(state),
        "HAS_D": D is not None,
        "HAS_BIAS": delta_bias is not None,
        "SOFTPLUS": delta_softplus,
        "num_warps": tile.warps,
        "maxnreg": tile.registers,
        "enable_fp_fusion": True,
    }
