"""`spread` and `join` on a CPU: compiled transpositions, a few channels of an image at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from trust_tta.scan import layout
from trust_tta.scan.cpu_kernels import jit, span
from trust_tta.scan.threads import CHUNKS, run_tasks

COMPILED = (torch.float32, torch.float64)


def spread(x: Tensor) -> Tensor:
    """x (b, c, h, w) -> (b, 2, c, h*w)."""
    if x.dtype not in COMPILED:
        return layout.spread_reference(x)
    b, c, h, w = x.shape
    pixels = x.detach().permute(0, 2, 3, 1).contiguous()
    u = x.new_empty((b, 2, c, h * w))
    source, target = pixels.numpy(), u.numpy()
    run_tasks(lambda first, last: _spread(source, target, CHUNKS, first, last), b * CHUNKS, u.numel())
    return u


def join(y: Tensor, height: int, width: int) -> Tensor:
    """y (b, 2, c, h*w) -> (b, c, height, width), channel-last in memory."""
    if y.dtype not in COMPILED:
        pixels = layout.join_reference(y, height, width).permute(0, 2, 3, 1).contiguous()
        return pixels.permute(0, 3, 1, 2)
    b, _, c, _ = y.shape
    x = y.new_empty((b, height, width, c))
    source, target = y.detach().contiguous().numpy(), x.numpy()
    run_tasks(lambda first, last: _join(source, target, CHUNKS, first, last), b * CHUNKS, y.numel())
    return x.permute(0, 3, 1, 2)


@jit
def _spread(x, u, chunks, first, last):  # type: ignore[no-untyped-def]
    """u (b, 2, c, h*w) = the rows and the columns of x (b, h, w, c), for tasks first..last-1."""
    _, height, width, channels = x.shape
    for task in range(first, last):
        b, _, _, low, high = span(task, 1, chunks, channels)
        for i in range(height):
            for c in range(low, high):
                for j in range(width):
                    u[b, 0, c, i * width + j] = x[b, i, j, c]
        for j in range(width):
            for c in range(low, high):
                for i in range(height):
                    u[b, 1, c, j * height + i] = x[b, i, j, c]


@jit
def _join(y, x, chunks, first, last):  # type: ignore[no-untyped-def]
    """x (b, h, w, c) = the sum of the rows and the columns of y (b, 2, c, h*w), for tasks first..last-1."""
    _, height, width, channels = x.shape
    for task in range(first, last):
        b, _, _, low, high = span(task, 1, chunks, channels)
        for i in range(height):
            for c in range(low, high):
                for j in range(width):
                    x[b, i, j, c] = y[b, 0, c, i * width + j]
        for j in range(width):
            for c in range(low, high):
                for i in range(height):
                    x[b, i, j, c] += y[b, 1, c, j * height + i]
