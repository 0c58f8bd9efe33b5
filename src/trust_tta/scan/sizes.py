"""Sizes of launches in plain integers; Triton's own functions for them take microseconds, some hundred times a pass."""

from __future__ import annotations


def ceil_div(size: int, block: int) -> int:
    """How many blocks hold `size`."""
    return -(-size // block)


def power_of_two(size: int) -> int:
    """The least power of two that is not below `size`."""
    return 1 << (size - 1).bit_length()
