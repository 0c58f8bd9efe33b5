"""Options of TRUST and its ablations, and the traversal orders of a network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, model_validator
from torch import nn

from trust_tta.errors import ConfigError
from trust_tta.methods.base import LearningOptions
from trust_tta.methods.parameters import ParameterSet
from trust_tta.orders import VMAMBA_SCAN_ORDERS, ScanOrder, default_orders, find_order, order_name, paper_orders
from trust_tta.schema import Count, show


def _order_names(orders: Any) -> Any:
    if orders is None:
        return None
    if isinstance(orders, (str, ScanOrder)) or not isinstance(orders, Sequence):
        raise ConfigError(f"{show(orders)} is not a list of traversal orders; give one such as ['abcd', 'badc']")
    if not orders:
        raise ConfigError("the list is empty; give at least one traversal order, or omit it for the paper's six")
    return tuple(order_name(order) for order in orders)


OrderName = Annotated[str, BeforeValidator(order_name)]
OrderNames = Annotated[tuple[str, ...] | None, BeforeValidator(_order_names)]


class OrderOptions(LearningOptions):
    """`orders`: an explicit list, or the first `k` of a ranking by `rank_orders`; None: the `k` of the paper's six with
    the lowest entropy, or of the network's own orders where it has others."""

    parameters: ParameterSet = "ss2d"
    orders: OrderNames = None
    k: Count = 6

    @model_validator(mode="before")
    @classmethod
    def _cut_ranking(cls, values: Any) -> Any:
        orders = values.get("orders") if isinstance(values, dict) else None
        if not isinstance(orders, Sequence) or not orders:
            return values
        ranked = all(isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], float) for pair in orders)
        return {**values, "orders": [pair[0] for pair in orders][: values.get("k", 6)]} if ranked else values

    @model_validator(mode="after")
    def _enough_orders(self) -> Self:
        if self.orders is None:
            paper_orders(self.k)
        return self

    def chosen(self, scan_orders: Sequence[str] = VMAMBA_SCAN_ORDERS) -> list[ScanOrder | str]:
        """The orders for a network with these scan orders."""
        if self.orders is None:
            return list(default_orders(self.k, scan_orders))
        return [find_order(order, scan_orders) for order in self.orders]


class NaiveOptions(LearningOptions):
    """`loss`: the paper's hard pseudo-labels, or minimum class confusion, as in `tide`."""

    parameters: ParameterSet = "ss2d"
    loss: Literal["labels", "confusion"] = "labels"


class TrustOptions(OrderOptions):
    """`mode`: "sequential", each order continues from the one before; "replicate", all start from the same weights and
    see the whole batch; "split", the same with a part of the batch each, normalized by the statistics of that part or
    of the whole "batch". `merge`: the mean, means weighted by 1 / entropy, the same along the sphere, and how the
    authors' code computes the last. `loss`: the paper's hard pseudo-labels, or minimum class confusion. `views`:
    predict the mean probability of the images and of their mirror images."""

    mode: Literal["sequential", "replicate", "split"] = "sequential"
    split_statistics: Literal["part", "batch"] = "part"
    merge: Literal["mean", "entropy", "slerp", "slerp_released"] = "mean"
    evaluate_order: OrderName = "abcd"
    loss: Literal["labels", "confusion"] = "labels"
    views: Literal["none", "mirror"] = "none"


def scan_orders_of(model: nn.Module) -> tuple[str, ...]:
    """The names of a network's scan orders, its own first; VMamba's where a network from outside does not say."""
    names: tuple[str, ...] = getattr(model, "scan_orders", VMAMBA_SCAN_ORDERS)
    return names


def require_orders(model: nn.Module) -> None:
    """Refuse a network without scan orders."""
    if getattr(model, "order_free", False):
        raise ConfigError(
            f"TRUST needs several scan orders, and {type(model).__name__} sums over all tokens: every order gives the "
            "same logits; use another method such as 'tent' or 'tide'"
        )
    if not hasattr(model, "scan_directions"):
        raise ConfigError(
            f"TRUST permutes traversal orders and {type(model).__name__} has none; "
            "use a VMamba, or another method such as 'tent'"
        )
