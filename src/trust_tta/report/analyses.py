"""What both drawings of the entropy of orders share."""

from __future__ import annotations

import math
from collections.abc import Sequence

from trust_tta.results.order_records import EntropyByOrder


def aligned(maps: Sequence[EntropyByOrder]) -> tuple[tuple[str, ...], list[tuple[float, ...]]]:
    """The orders of all records by alphabet, and each record's entropies in that order, NaN where it has none."""
    orders = tuple(sorted({order for record in maps for order in record.orders}))
    found = [dict(zip(record.orders, record.entropy, strict=True)) for record in maps]
    return orders, [tuple(values.get(order, math.nan) for order in orders) for values in found]


def lowest(values: Sequence[float], k: int) -> set[int]:
    """The places of the `k` lowest numbers."""
    known = [i for i, v in enumerate(values) if math.isfinite(v)]
    return set(sorted(known, key=lambda i: (values[i], i))[:k])
