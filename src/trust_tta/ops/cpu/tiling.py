"""Tile sizes and scratch layout that the kernels and their callers share; free of numba, which is slow to load."""

from __future__ import annotations

LANES = 4  # channels of the grouped scan whose recurrences run side by side
TILE = 64  # channels of a map that are scanned at once: fewer make loops too short
# Offsets of a pixel's fields in the scratch of the map's backward.
U, DY, DU, DECAY, BEFORE, SLOPE, PIXEL = range(0, 7 * TILE, TILE)
# Offsets of a state's values along the sequence.
STATE, A, DA, CARRY, ROWS = range(0, 5 * TILE, TILE)


def scratch_size(length: int) -> int:
    """Numbers that one thread needs to scan a map of `length` pixels, forward or backward."""
    return ROWS + length * PIXEL + 2 * (length + 3) * TILE
