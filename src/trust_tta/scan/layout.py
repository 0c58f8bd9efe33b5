"""Between a map and the two sequences that the scan reads: along its rows, and along its columns.

`spread` and `join` are adjoint to each other: the backward of one is the other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def spread_reference(x: Tensor) -> Tensor:
    """x (b, c, h, w) -> (b, 2, c, h*w), by definition."""
    return torch.stack((x.flatten(2), x.transpose(2, 3).flatten(2)), dim=1)


def join_reference(y: Tensor, height: int, width: int) -> Tensor:
    """y (b, 2, c, h*w) -> (b, c, h, w): both sequences put back in their places and summed, by definition."""
    b, _, c, _ = y.shape
    rows, columns = y.unbind(1)
    return rows.reshape(b, c, height, width) + columns.reshape(b, c, width, height).transpose(2, 3)


@torch.library.custom_op("trust_tta::spread", mutates_args=())
def spread(x: Tensor, triton: bool) -> Tensor:
    """x (b, c, h, w) -> (b, 2, c, h*w)."""
    if triton:
        from trust_tta.scan import triton_layout

        return triton_layout.spread(x)
    from trust_tta.scan import cpu_layout

    return cpu_layout.spread(x)


@spread.register_fake
def _(x: Tensor, triton: bool) -> Tensor:
    b, c, h, w = x.shape
    return x.new_empty((b, 2, c, h * w))


@torch.library.custom_op("trust_tta::join", mutates_args=())
def join(y: Tensor, height: int, width: int, triton: bool) -> Tensor:
    """y (b, 2, c, h*w) -> (b, c, h, w), channel-last in memory."""
    if triton:
        from trust_tta.scan import triton_layout

        return triton_layout.join(y, height, width)
    from trust_tta.scan import cpu_layout

    return cpu_layout.join(y, height, width)


@join.register_fake
def _(y: Tensor, height: int, width: int, triton: bool) -> Tensor:
    return y.new_empty((y.shape[0], height, width, y.shape[2])).permute(0, 3, 1, 2)


def _save_spread(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.triton = inputs
    ctx.size = x.shape[2:]


def _save_join(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.triton = inputs[-1]


spread.register_autograd(lambda ctx, du: (join(du, *ctx.size, ctx.triton), None), setup_context=_save_spread)
join.register_autograd(lambda ctx, dx: (spread(dx, ctx.triton), None, None, None), setup_context=_save_join)
