"""Functions of image-sized logits, computed in bands of rows.

The logits of a batch of images may take hundreds of megabytes, and a loss makes several tensors of their size. In
bands, these have the size of a band; the backward pass computes each band again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

MOST_ELEMENTS = 1 << 22  # of a band's logits: 16 MiB in float32

PerPixel = Callable[..., Tensor]


def by_bands(function: PerPixel, logits: Tensor, *others: Tensor) -> Tensor:
    """`function(logits, *others)`: one value for each prediction, whatever its neighbors are.

    Logits (n, classes, h, w) and others (n, h, w) give (n, h, w), at least in float32; gradients flow to the logits.
    Logits (n, classes), and small maps, are computed at once.
    """
    if logits.dim() != 4 or logits.numel() <= MOST_ELEMENTS:
        return function(logits, *others)
    values: Tensor = _ByBands.apply(function, logits, *others)  # type: ignore[no-untyped-call]
    return values


def sum_by_bands(function: PerPixel, logits: Tensor, *others: Tensor) -> Tensor:
    """`function(logits, *others)`, a sum over predictions of any shape, as the sum over bands.

    Shapes and gradients are as of `by_bands`.
    """
    if logits.dim() != 4 or logits.numel() <= MOST_ELEMENTS:
        return function(logits, *others)
    total: Tensor = _SumByBands.apply(function, logits, *others)  # type: ignore[no-untyped-call]
    return total


class _ByBands(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: PerPixel, logits: Tensor, *others: Tensor) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(logits, *others)
        parts = [function(_wide(logits[:, :, rows]), *(o[:, rows] for o in others)) for rows in _rows(logits)]
        return torch.cat(parts, 1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _again(ctx, lambda rows: gradient[:, rows])


class _SumByBands(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: PerPixel, logits: Tensor, *others: Tensor) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(logits, *others)
        first, *rest = _rows(logits)
        total = function(_wide(logits[:, :, first]), *(o[:, first] for o in others))
        for rows in rest:
            total = total + function(_wide(logits[:, :, rows]), *(o[:, rows] for o in others))
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _again(ctx, lambda _: gradient)


def _again(ctx: Any, gradient_of: Callable[[slice], Tensor]) -> tuple[Tensor | None, ...]:
    """The gradient of the logits, with each band computed again."""
    logits, *others = ctx.saved_tensors
    result = torch.empty_like(logits)
    for rows in _rows(logits):
        band = _wide(logits[:, :, rows].detach()).requires_grad_()
        with torch.enable_grad():
            values = ctx.function(band, *(o[:, rows] for o in others))
        result[:, :, rows] = torch.autograd.grad(values, band, gradient_of(rows))[0]
    return None, result, *(None for _ in others)


def _rows(logits: Tensor) -> Iterator[slice]:
    n, classes, height, width = logits.shape
    step = max(1, MOST_ELEMENTS // (n * classes * width))
    for start in range(0, height, step):
        yield slice(start, min(start + step, height))


def _wide(band: Tensor) -> Tensor:
    return band if band.dtype == torch.float64 else band.float()
