"""Between a map and the two sequences that the scan reads: along its rows, and along its columns.

`spread` and `join` are adjoint to each other. Plain functions: `core` differentiates through them by hand.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def spread_reference(x: Tensor) -> Tensor:
    """x (b, c, h, w) -> (b, 2, c, h*w), by definition."""
    return torch.stack((x.flatten(2), x.transpose(2, 3).flatten(2)), dim=1)


def join_reference(y: Tensor, height: int, width: int) -> Tensor:
    """y (b, 2, c, h*w) -> (b, c, h, w): both sequences put back in their places and summed, by definition."""
    b, _, c, _ = y.shape
    rows, columns = y.unbind(1)
    return rows.reshape(b, c, height, width) + columns.reshape(b, c, width, height).transpose(2, 3)


def spread(x: Tensor, *, silu: bool, triton: bool) -> Tensor:
    """x (b, c, h, w), or SiLU of it, -> (b, 2, c, h*w)."""
    if triton:
        from trust_tta.scan import triton_layout

        return triton_layout.spread(x, silu=silu)
    from trust_tta.scan import cpu_layout

    return cpu_layout.spread(F.silu(x) if silu else x)


def join(y: Tensor, height: int, width: int, *, silu_of: Tensor | None, triton: bool) -> Tensor:
    """y (b, 2, c, h*w) -> (b, c, h, w), channel-last in memory; times the slope of SiLU at `silu_of` (b, c, h, w)."""
    if triton:
        from trust_tta.scan import triton_layout

        return triton_layout.join(y, height, width, silu_of=silu_of)
    from trust_tta.scan import cpu_layout

    x = cpu_layout.join(y, height, width)
    return x if silu_of is None else torch.ops.aten.silu_backward(x, silu_of)


def join_and_normalise(
    y: Tensor, height: int, width: int, weight: Tensor, bias: Tensor, eps: float, *, triton: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The joined map x (b, h, w, c) and its layer norm over the channels: norm, x, mean, 1 / deviation (b, h, w, 1)."""
    if triton:
        from trust_tta.scan import triton_layout

        return triton_layout.join_and_normalise(y, height, width, weight, bias, eps)
    x = join(y, height, width, silu_of=None, triton=False).permute(0, 2, 3, 1)
    normal, mean, scale = torch.ops.aten.native_layer_norm(x, x.shape[-1:], weight, bias, eps)
    return normal, x, mean, scale
