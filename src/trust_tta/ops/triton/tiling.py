"""Tile sizes of the grouped scan's kernels, and its inputs as the kernels read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trust_tta.ops.tensors import ScanInputs

SPACING = 128  # positions between saved states in long rows


def ceil_div(size: int, block: int) -> int:
    """Number of blocks that hold `size`; triton.cdiv takes microseconds, a few hundred times per pass."""
    return -(-size // block)


def power_of_two(size: int) -> int:
    """The smallest power of two that is at least `size`."""
    return 1 << (size - 1).bit_length()


def may_approximate(x: Tensor) -> bool:
    """Whether the hardware's approximate functions are exact enough; Triton's interpreter has none."""
    return x.dtype != torch.float32 and x.device.type != "cpu"


@dataclass(frozen=True)
class Tile:
    """Tile of one program: channels x positions, with its warps.

    A warp holds 128 positions of a channel; more positions than that in a tile of several warps make the scans slow.
    With several `stages` the next chunks are read while one is worked on.
    """

    channels: int
    positions: int
    warps: int
    stages: int = 1


@dataclass(frozen=True)
class Tiling:
    """The tiles of both kernels; the state is saved every `spacing` positions, which divides both tiles' positions."""

    forward: Tile
    backward: Tile
    spacing: int


def choose_tiling(shape: Sequence[int], dtype: torch.dtype) -> Tiling:
    """Tiles for delta (b, g, m, c, l), by shape and dtype alone so that runs repeat.

    The fastest on an H200 at the stages of VMamba-T; a warp holds twice the positions in half precision. What is
    saved for the backward does not depend on the dtype.
    """
    channels, length = shape[-2:]
    half = dtype != torch.float32
    if length <= 64:
        return make_tiling(channels, length, forward=Tile(4, 64, 1), backward=Tile(4 if half else 8, 64, 1))
    wide = 256 if half else 128
    if length <= 256:
        return make_tiling(channels, length, forward=Tile(4 if half else 2, wide, 1), backward=Tile(2, 128, 1))
    long = length > 1024
    if half:
        forward, backward = Tile(1, wide, 1, stages=3 if long else 1), Tile(2, wide, 1, stages=4 if long else 3)
    else:
        forward = Tile(1, wide, 1, stages=4 if long else 1)
        backward = Tile(4, wide, 1, stages=2) if long else Tile(2, wide, 1, stages=3)
    return make_tiling(channels, length, forward=forward, backward=backward)


def make_tiling(channels: int, length: int, *, forward: Tile, backward: Tile) -> Tiling:
    """Both tiles, cut to the powers of two that hold the channels and the positions."""
    spacing = min(forward.positions, backward.positions, SPACING)
    return Tiling(_fit(forward, channels, length), _fit(backward, channels, length), spacing)


def _fit(tile: Tile, channels: int, length: int) -> Tile:
    return replace(
        tile,
        channels=min(tile.channels, power_of_two(channels)),
        positions=min(tile.positions, max(16, power_of_two(length))),
    )


def states_shape(delta: Sequence[int], state: int) -> tuple[int, ...]:
    """Shape (b, g, m, boundaries, n, c) of the states that the forward kernel saves."""
    batch, groups, directions, channels, length = delta
    spacing = choose_tiling(delta, torch.float32).spacing
    return (batch, groups, directions, ceil_div(length, spacing) - 1, state, channels)


def prepare(inputs: ScanInputs) -> ScanInputs:
    """The inputs as the kernels read them: contiguous, weights in float32, B and C with the same strides."""
    u, delta, A, B, C, D, bias, softplus = inputs
    # Slices of one projection already have adjacent positions and equal strides.
    if B.stride() != C.stride() or (B.stride(-1) != 1 and B.shape[-1] != 1):
        B, C = B.contiguous(), C.contiguous()
    D, bias = (None if t is None else _weight(t) for t in (D, bias))
    return ScanInputs(u.contiguous(), delta.contiguous(), _weight(A), B, C, D, bias, softplus)


def _weight(tensor: Tensor) -> Tensor:
    return tensor.float().contiguous()


def pointers(inputs: ScanInputs) -> list[Tensor]:
    """The tensors in the order of the kernels' arguments; A stands in for None, which they do not read."""
    return [inputs.A if t is None else t for t in inputs[:7]]


def constants(inputs: ScanInputs, tile: Tile, spacing: int) -> dict[str, int | bool | None]:
    """Compile-time constants of the kernels; lengths and strides too, because wide loads need a known alignment."""
    (_, _, directions, channels, length), state = inputs.delta.shape, inputs.A.shape[-1]
    stride_b, stride_g, stride_m, stride_n, _ = inputs.B.stride()
    return {
        "DIRECTIONS": directions, "CHANNELS": channels, "LENGTH": length, "STATE": state,
        "STRIDE_B": stride_b, "STRIDE_G": stride_g, "STRIDE_M": stride_m, "STRIDE_N": stride_n, "SPACING": spacing,
        "BLOCK_C": tile.channels, "BLOCK_L": tile.positions, "BLOCK_N": power_of_two(state),
        "STAGES": tile.stages,
        "HAS_D": inputs.D is not None, "HAS_BIAS": inputs.delta_bias is not None, "SOFTPLUS": inputs.delta_softplus,
        "APPROX": may_approximate(inputs.delta),
        "num_warps": tile.warps, "enable_fp_fusion": True,
    }  # fmt: skip
