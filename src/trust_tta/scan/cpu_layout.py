"""`spread` and `join` on a CPU: compiled transpositions, a few channels of an image at a time."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from trust_tta.scan import layout
from trust_tta.scan.cpu_kernels import jit, span
from trust_tta.scan.threads import CHUNKS, run_tasks

TILE = 16  # pixels and channels that are turned together: both sides stay in the nearest cache
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

    def work(first: int, last: int) -> None:
        _join(source, target, np.empty((TILE, height * width), target.dtype), CHUNKS, first, last)

    run_tasks(work, b * CHUNKS, y.numel())
    return x.permute(0, 3, 1, 2)


@jit
def _spread(x, u, chunks, first, last):  # type: ignore[no-untyped-def]
    """u (b, 2, c, h*w) = the rows and the columns of x (b, h, w, c), for tasks first..last-1."""
    _, height, width, channels = x.shape
    for task in range(first, last):
        b, _, _, low, high = span(task, 1, chunks, channels)
        pixels = x[b].reshape((height * width, channels))
        for p0 in range(0, height * width, TILE):
            for c0 in range(low, high, TILE):
                _transpose(pixels, u[b, 0], p0, c0, min(p0 + TILE, height * width), min(c0 + TILE, high))
        for c in range(low, high):
            _turn(u[b, 0, c], u[b, 1, c], height, width)


@jit
def _transpose(x, out, i0, j0, i1, j1):  # type: ignore[no-untyped-def]
    """out[j, i] = x[i, j] on one tile; a whole tile has a size that the compiler knows."""
    if i1 - i0 == TILE and j1 - j0 == TILE:
        for j in range(TILE):
            for i in range(TILE):
                out[j0 + j, i0 + i] = x[i0 + i, j0 + j]
    else:
        for j in range(j0, j1):
            for i in range(i0, i1):
                out[j, i] = x[i, j]


@jit
def _turn(rows, columns, height, width):  # type: ignore[no-untyped-def]
    """One channel along its columns, from the same along its rows."""
    for j in range(width):
        for i in range(height):
            columns[j * height + i] = rows[i * width + j]


@jit
def _turn_and_add(columns, rows, out, height, width):  # type: ignore[no-untyped-def]
    for i in range(height):
        for j in range(width):
            out[i * width + j] = rows[i * width + j] + columns[j * height + i]


@jit
def _join(y, x, scratch, chunks, first, last):  # type: ignore[no-untyped-def]
    """x (b, h, w, c) = the sum of the rows and the columns of y (b, 2, c, h*w), for tasks first..last-1."""
    _, height, width, channels = x.shape
    for task in range(first, last):
        b, _, _, low, high = span(task, 1, chunks, channels)
        pixels = x[b].reshape((height * width, channels))
        for c0 in range(low, high, TILE):
            c1 = min(c0 + TILE, high)
            for c in range(c0, c1):
                _turn_and_add(y[b, 1, c], y[b, 0, c], scratch[c - c0], height, width)
            for p0 in range(0, height * width, TILE):
                _transpose(scratch, pixels[:, c0:c1], 0, p0, c1 - c0, min(p0 + TILE, height * width))
