"""What a chart marks out: the best for their cost, and names where none covers another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

Item = TypeVar("Item")


@dataclass(frozen=True)
class Box:
    """A rectangle that is taken: left and right edge, and the baseline of a line of text."""

    left: float
    right: float
    baseline: float


def spread_out(places: Sequence[float], apart: float, top: float, bottom: float) -> list[float]:
    """The nearest places (least squares), in the same order, `apart` or more from each other, from `top` to `bottom`.

    Where there is no room for that, they are as far apart as there is room for.
    """
    if not places:
        return []
    n = len(places)
    apart = min(apart, (bottom - top) / max(n - 1, 1))
    order = sorted(range(n), key=lambda i: places[i])
    # Less i * apart, the places must only not decrease: isotonic regression, by pooling neighbours out of order.
    pools: list[tuple[float, int]] = []
    for i, k in enumerate(order):
        mean, size = places[k] - i * apart, 1
        while pools and pools[-1][0] > mean:
            other, count = pools.pop()
            mean, size = (mean * size + other * count) / (size + count), size + count
        pools.append((mean, size))
    flat = [mean for mean, size in pools for _ in range(size)]
    moved = [0.0] * n
    for i, k in enumerate(order):
        moved[k] = min(max(flat[i], top), bottom - (n - 1) * apart) + i * apart
    return moved


def free_place(
    left: float, width: float, baseline: float, taken: Sequence[Box], top: float, bottom: float
) -> float | None:
    """The nearest baseline from `top` to `bottom` at which a text touches nothing that is taken, or None."""
    for step in range(0, 28, 3):  # farther away a name would not seem to belong to its point
        for y in (baseline + step, baseline - step):
            free = all(abs(y - b.baseline) >= 12.5 or left >= b.right or b.left >= left + width for b in taken)
            if free and top <= y <= bottom:
                return y
    return None


def frontier(items: Iterable[Item], key: Callable[[Item], tuple[float, float]]) -> list[Item]:
    """The items that no other beats in both cost and value, by cost; `key` gives the two."""
    best: list[Item] = []
    for item in sorted(items, key=lambda i: (key(i)[0], -key(i)[1])):
        if not best or key(item)[1] > key(best[-1])[1]:
            best.append(item)
    return best
