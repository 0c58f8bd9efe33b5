"""The options of a line as they act, so that two spellings of one choice of orders are one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trust_tta.errors import ConfigError
from trust_tta.orders import PAPER_ORDERS, ScanOrder


def acting_options(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Explicit `orders` count as their number `k`, and are None where they are the paper's or continue these.

    The paper's six and two more are k = 8, as its first two are k = 2; others stay as they are listed.
    """
    listed = values.get("orders")
    if not isinstance(listed, list):
        return values
    try:
        orders = [ScanOrder(order) for order in listed]
    except ConfigError:  # a store may be of another program's making
        return values
    continues = orders[: len(PAPER_ORDERS)] == list(PAPER_ORDERS[: len(orders)])
    return {**values, "k": len(orders), "orders": None if continues else [str(order) for order in orders]}
