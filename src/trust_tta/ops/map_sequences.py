"""Sequences of tokens out of a map along any steps, and back: PyTorch's gather, or Triton kernels on a GPU.

The steps are tensors, so that one CUDA graph serves all scan orders.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from trust_tta.ops.functional import uses_triton
from trust_tta.ops.tensors import to_pixels


class Paths(NamedTuple):
    """k sequences of m steps through a map of l tokens, for all images or for each (with a batch dimension first).

    Every token is visited n times.
    """

    visits: Tensor  # (k, m): the row-major token at each step; l stands for a zero
    places: Tensor  # (n, l): the steps k * m + i at which a token is visited


def read_map(x: Tensor, paths: Paths, *, silu: bool = False, backend: str = "auto") -> Tensor:
    """x (b, c, h, w), or SiLU(x), along the paths: (b, k, c, m)."""
    if uses_triton(x, backend):
        return _ReadMap.apply(x, *paths, silu)  # type: ignore[no-untyped-call]
    tokens = F.pad((F.silu(x) if silu else x).flatten(2), (0, 1))
    return _gather(tokens, paths.visits)


def merge_map(
    y: Tensor, paths: Paths, height: int, width: int, *, half: Tensor | None = None, backend: str = "auto"
) -> Tensor:
    """The adjoint of `read_map` for y (b, k, c, m): (b, c, height, width).

    `half` (b, c, ceil(height / 2), ceil(width / 2)): a map that is added, upsampled to the nearest pixel.
    """
    if uses_triton(y, backend):
        return _MergeMap.apply(y, *paths, height, width, half)  # type: ignore[no-untyped-call]
    merged = _gather(y.transpose(1, 2).flatten(2), paths.places).sum(1).unflatten(2, (height, width))
    return merged if half is None else merged + F.interpolate(half, (height, width), mode="nearest")


def read(x: Tensor, steps: Tensor) -> Tensor:
    """x (b, k, c, l) along its last axis at `steps` (k, m) or (b, k, m): (b, k, c, m)."""
    steps = steps if steps.dim() == 3 else steps[None]
    return x.gather(3, steps[:, :, None].expand(*x.shape[:3], steps.shape[-1]))


def _gather(tokens: Tensor, steps: Tensor) -> Tensor:
    """tokens (b, c, l) at `steps` (n, m) or (b, n, m): (b, n, c, m)."""
    return read(tokens.unsqueeze(1).expand(-1, steps.shape[-2], -1, -1), steps)


def _kernels() -> Any:
    from trust_tta.ops.triton import map_sequences as kernels

    return kernels


class _ReadMap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, visits: Tensor, places: Tensor, silu: bool) -> Tensor:
        ctx.save_for_backward(x if silu else None, places)
        ctx.size = x.shape[2:]
        return _kernels().read_map(to_pixels(x), visits, silu=silu)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, du: Tensor) -> tuple[Tensor | None, ...]:
        x, places = ctx.saved_tensors
        dx = _kernels().merge_map(du, places, *ctx.size, silu_of=None if x is None else to_pixels(x))
        return dx.permute(0, 3, 1, 2), None, None, None


class _MergeMap(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, y: Tensor, visits: Tensor, places: Tensor, height: int, width: int, half: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(visits)
        ctx.half = None if half is None else half.shape
        add = None if half is None else to_pixels(half)
        return _kernels().merge_map(y, places, height, width, add=add).permute(0, 3, 1, 2)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor | None, ...]:
        (visits,), pixels = ctx.saved_tensors, to_pixels(dx)
        dy = _kernels().read_map(pixels, visits, silu=False) if ctx.needs_input_grad[0] else None
        dhalf = None
        if ctx.needs_input_grad[5]:
            maps = pixels.permute(0, 3, 1, 2)
            dhalf = torch.ops.aten.upsample_nearest2d_backward(maps, list(maps.shape[2:]), list(ctx.half))
        return dy, None, None, None, None, dhalf
