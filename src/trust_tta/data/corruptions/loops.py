"""Pixel loops in numba, for operations that numpy cannot vectorize over images."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trust_tta.ops.numba_jit import compiled

Array = NDArray[Any]
# no fastmath: sums must come out the same wherever an image stands in its batch
_jit = compiled(nogil=True, error_model="numpy")


@_jit
def gather_neighbors(images: Array, shifts: Array, reach: int) -> None:
    """Give each pixel the color of a near one, bottom right to top left, in place.

    images: (n, h, w, c); shifts: (n, rounds, h - 2 * reach, w - 2 * reach, 2) as (dx, dy) in -reach..reach-1.
    """
    n, height, width, channels = images.shape
    for i in range(n):
        for r in range(shifts.shape[1]):
            for y in range(height - reach, reach, -1):
                for x in range(width - reach, reach, -1):
                    dx = shifts[i, r, y - reach - 1, x - reach - 1, 0]
                    dy = shifts[i, r, y - reach - 1, x - reach - 1, 1]
                    for c in range(channels):
                        images[i, y, x, c] = images[i, y + dy, x + dx, c]


@_jit
def streak(images: Array, weights: Array, dy: Array, dx: Array, out: Array) -> None:
    """Weighted sum of bytes along a line of offsets, edges repeated, rounded to bytes.

    images, out: (n, h, w, c) uint8; weights: (k,); dy, dx: (n, k).
    """
    n, height, width, channels = images.shape
    total = np.empty(channels)
    for i in range(n):
        for y in range(height):
            for x in range(width):
                total[:] = 0.5
                for k in range(weights.shape[0]):
                    row = min(max(y + dy[i, k], 0), height - 1)
                    column = min(max(x + dx[i, k], 0), width - 1)
                    for c in range(channels):
                        total[c] += weights[k] * images[i, row, column, c]
                for c in range(channels):
                    out[i, y, x, c] = np.uint8(min(total[c], 255.0))


@_jit
def add_zoomed(images: Array, rows: Array, columns: Array, out: Array) -> None:
    """Add a linearly interpolated zoom of every image to `out`.

    images, out: (n, h, w, c); rows: (h,) and columns: (w,) are the places to read at.
    """
    n, height, width, channels = images.shape
    for i in range(n):
        for y in range(height):
            top = min(int(rows[y]), height - 1)
            bottom = min(top + 1, height - 1)
            down = rows[y] - top
            for x in range(width):
                left = min(int(columns[x]), width - 1)
                right = min(left + 1, width - 1)
                along = columns[x] - left
                for c in range(channels):
                    upper = images[i, top, left, c] * (1 - along) + images[i, top, right, c] * along
                    lower = images[i, bottom, left, c] * (1 - along) + images[i, bottom, right, c] * along
                    out[i, y, x, c] += upper * (1 - down) + lower * down


@_jit
def _reflect(index: int, size: int, repeat_edge: int) -> int:
    period = 2 * (size - 1 + repeat_edge)
    if period == 0:
        return 0
    index %= period
    return index if index < size else period - index - repeat_edge


@_jit
def sample(images: Array, rows: Array, columns: Array, repeat_edge: int, out: Array) -> None:
    """Read images at fractional places, linearly interpolated and reflected at the border.

    images, out: (n, h, w, c); rows, columns: (n, h, w). repeat_edge 1 reflects about the pixel's outer edge
    (d c b a | a b c d), 0 about its center (d c b | a b c d).
    """
    n, height, width, channels = images.shape
    for i in range(n):
        for y in range(height):
            for x in range(width):
                row, column = math.floor(rows[i, y, x]), math.floor(columns[i, y, x])
                down, along = rows[i, y, x] - row, columns[i, y, x] - column
                top, bottom = _reflect(row, height, repeat_edge), _reflect(row + 1, height, repeat_edge)
                left, right = _reflect(column, width, repeat_edge), _reflect(column + 1, width, repeat_edge)
                for c in range(channels):
                    upper = images[i, top, left, c] * (1 - along) + images[i, top, right, c] * along
                    lower = images[i, bottom, left, c] * (1 - along) + images[i, bottom, right, c] * along
                    out[i, y, x, c] = upper * (1 - down) + lower * down


@_jit
def chamfer_distance(edges: Array, out: Array) -> None:
    """Distance (h, w) to the nearest edge in steps of a king's and a knight's move, infinite where there is none."""
    height, width = edges.shape
    moves = ((0, 1, 1.0), (1, 0, 1.0), (1, 1, 1.4), (1, -1, 1.4))
    leaps = ((1, 2, 2.1969), (1, -2, 2.1969), (2, 1, 2.1969), (2, -1, 2.1969))
    for sweep in range(2):
        ahead = 1 - 2 * sweep
        for j in range(height * width):
            place = j if sweep == 0 else height * width - 1 - j
            y, x = place // width, place % width
            nearest = 0.0 if edges[y, x] else (np.inf if sweep == 0 else out[y, x])
            for down, right, cost in moves + leaps:
                row, column = y - ahead * down, x - ahead * right
                if 0 <= row < height and 0 <= column < width:
                    nearest = min(nearest, out[row, column] + cost)
            out[y, x] = nearest
