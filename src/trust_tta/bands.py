"""Functions of image-sized logits, computed in bands of rows.

The logits of a batch of images may take hundreds of megabytes, and a loss makes several tensors of their size. In
bands, these have the size of a band; the backward pass computes each band again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import reduce
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
    return _apply(function, logits, others, summed=False)


def sum_by_bands(function: PerPixel, logits: Tensor, *others: Tensor) -> Tensor:
    """`function(logits, *others)`, a sum over predictions of any shape, as the sum over bands.

    Shapes and gradients are as of `by_bands`.
    """
    return _apply(function, logits, others, summed=True)


def _apply(function: PerPixel, logits: Tensor, others: tuple[Tensor, ...], *, summed: bool) -> Tensor:
    if logits.dim() != 4 or logits.numel() <= MOST_ELEMENTS:
        return function(logits, *others)
    values: Tensor = _Bands.apply(function, summed, logits, *others)  # type: ignore[no-untyped-call]
    return values


class _Bands(torch.autograd.Function):
    """The values of all bands one below the other, or their sum; the backward pass computes each band again."""

    @staticmethod
    def forward(ctx: Any, function: PerPixel, summed: bool, logits: Tensor, *others: Tensor) -> Tensor:
        ctx.function, ctx.summed = function, summed
        ctx.save_for_backward(logits, *others)
        bands = (function(_wide(logits[:, :, rows]), *(o[:, rows] for o in others)) for rows in _rows(logits))
        return reduce(torch.add, bands) if summed else torch.cat(list(bands), 1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        logits, *others = ctx.saved_tensors
        result = torch.empty_like(logits)
        for rows in _rows(logits):
            band = _wide(logits[:, :, rows].detach()).requires_grad_()
            with torch.enable_grad():
                values = ctx.function(band, *(o[:, rows] for o in others))
            given = gradient if ctx.summed else gradient[:, rows]
            result[:, :, rows] = torch.autograd.grad(values, band, given)[0]
        return None, None, result, *(None for _ in others)


def _rows(logits: Tensor) -> Iterator[slice]:
    n, classes, height, width = logits.shape
    step = max(1, MOST_ELEMENTS // (n * classes * width))
    for start in range(0, height, step):
        yield slice(start, min(start + step, height))


def _wide(band: Tensor) -> Tensor:
    return band if band.dtype == torch.float64 else band.float()
