"""Traversal orders: which of the scan directions each group of scan parameters reads."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import TypeAlias

from trust_tta.errors import ConfigError

LETTERS = "abcd"  # a row-major, b column-major, c reversed a, d reversed b


@dataclass(frozen=True, order=True, init=False, repr=False)
class ScanOrder:
    """A permutation pi of the four directions: parameter group k reads direction pi[k].

    Accepts letters ("badc"), digits ("1032"), a sequence of four integers, or another ScanOrder. `str()` gives letters,
    iteration gives the four integers.
    """

    indices: tuple[int, int, int, int]

    def __init__(self, order: OrderLike = LETTERS) -> None:
        object.__setattr__(self, "indices", _parse(order))

    @classmethod
    def all(cls) -> tuple[ScanOrder, ...]:
        """The 24 orders, in lexicographic order."""
        return tuple(cls(p) for p in permutations(range(4)))

    @property
    def inverse(self) -> ScanOrder:
        """The order rho with rho[pi[k]] = k: direction j is read by group inverse[j]."""
        return ScanOrder([self.indices.index(j) for j in range(4)])

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, k: int) -> int:
        return self.indices[k]

    def __str__(self) -> str:
        return "".join(LETTERS[i] for i in self.indices)

    def __repr__(self) -> str:
        return f"ScanOrder('{self}')"


OrderLike: TypeAlias = str | Sequence[int] | ScanOrder


def _parse(order: OrderLike) -> tuple[int, int, int, int]:
    if isinstance(order, ScanOrder):
        return order.indices
    try:
        if isinstance(order, str):
            indices = [LETTERS.index(c) if c in LETTERS else int(c) for c in order]
        else:
            indices = [operator.index(i) for i in order]
    except (TypeError, ValueError):
        indices = []
    if sorted(indices) != [0, 1, 2, 3]:
        raise ConfigError(
            f"scan order {order!r} is not a permutation of four directions; "
            "give four different letters of 'abcd' (as 'badc') or digits of '0123' (as '1032')"
        )
    a, b, c, d = indices
    return a, b, c, d


VMAMBA_SCAN_ORDERS = tuple(str(order) for order in ScanOrder.all())
DEFAULT_ORDER = ScanOrder("abcd")
PAPER_ORDERS = tuple(ScanOrder(o) for o in ("abcd", "abdc", "adcb", "bacd", "badc", "dbca"))  # as the paper runs them
_BY_ENTROPY = tuple(ScanOrder(o) for o in ("abcd", "abdc", "dbca", "adcb", "badc", "bacd"))  # its offline phase


def paper_orders(k: int) -> tuple[ScanOrder, ...]:
    """The `k` of the paper's six orders with the lowest entropy, in the paper's sequence."""
    if not 1 <= k <= len(PAPER_ORDERS):
        raise ConfigError(
            f"k is {k}; without explicit orders it is 1 to {len(PAPER_ORDERS)} (the paper's orders): "
            "for more, give orders=[...], as rank_orders lists them"
        )
    return tuple(order for order in PAPER_ORDERS if order in _BY_ENTROPY[:k])


def find_order(order: OrderLike, scan_orders: Sequence[str]) -> ScanOrder | str:
    """A network's traversal order by name; the default order "abcd" means its first."""
    name = order_name(order)
    if name in scan_orders:
        return name if len(name) != len(LETTERS) else order if isinstance(order, ScanOrder) else ScanOrder(name)
    if name == LETTERS:
        return scan_orders[0]
    shown = ", ".join(scan_orders[:6]) + (", ..." if len(scan_orders) > 6 else "")
    raise ConfigError(f"scan order {order!r} is none of this network's; it has {shown}")


def order_name(order: OrderLike) -> str:
    """The letters of a ScanOrder in any form; other strings, which name the orders of some networks, are unchanged."""
    if isinstance(order, ScanOrder):
        return str(order)
    return order if isinstance(order, str) and len(order) != len(LETTERS) else str(ScanOrder(order))


def default_orders(k: int, scan_orders: Sequence[str]) -> tuple[ScanOrder | str, ...]:
    """`k` of the paper's orders where the network has them, else the first `k` of its own."""
    if {str(order) for order in PAPER_ORDERS} <= set(scan_orders):
        return paper_orders(k)
    return tuple(find_order(name, scan_orders) for name in scan_orders[:k])
