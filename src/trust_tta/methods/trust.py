"""TRUST: adapt under several traversal orders, average the resulting weights, predict with the average.

Dastani et al., "TRUST: Test-Time Refinement using Uncertainty-Guided SSM Traverses", NeurIPS 2025, Algorithms 1 and 2.
Prediction before the update, checks, undo and counters are in `base.py`; the parallel modes and the merges other than
the mean are in `parallel.py`.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import BeforeValidator, model_validator
from torch import Tensor, nn

from trust_tta.errors import ConfigError, TrustWarning, users_level
from trust_tta.methods import merging, parallel
from trust_tta.methods.base import Learner, LearningOptions
from trust_tta.methods.ensembling import forward_views, log_mean_probability
from trust_tta.methods.losses import class_confusion, confusion_loss, entropy, most_likely, pseudo_label_loss
from trust_tta.methods.parallel import OrderStep
from trust_tta.methods.parameters import ParameterSet
from trust_tta.methods.statistics import has_statistics
from trust_tta.ops.segmentation_logits import Logits
from trust_tta.orders import (
    DEFAULT_ORDER,
    VMAMBA_SCAN_ORDERS,
    OrderLike,
    ScanOrder,
    default_orders,
    find_order,
    order_name,
    paper_orders,
)
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


class WeightAveraging(Learner):
    """Algorithms 1 and 2: one step on hard pseudo-labels under each of `orders`, then the mean of the weights.

    `mode`, `merge_by` and `mirror` are the options `mode`, `merge` and `views` of TRUST.
    """

    chunked_loss = True
    orders: list[ScanOrder | str]
    evaluate_order: ScanOrder | str = DEFAULT_ORDER
    last_prediction: Logits  # before the last of several steps
    mode = "sequential"
    merge_by = "mean"
    mirror = False
    reuses_first_logits = True  # the first step's logits are the prediction before the update

    def adapted_names(self, model: nn.Module) -> list[str]:
        require_orders(model)
        return super().adapted_names(model)

    def adapt(self, images: Tensor) -> Logits:
        """Algorithm 1 for one batch; of several `steps` per order, the last ones are averaged."""
        before = self.options.predict == "before"
        first_orders = self.orders if self.mode == "replicate" else self.orders[:1]
        if before and not (self.reuses_first_logits and self.evaluate_order in first_orders):
            self.prediction_before = self.last_prediction = self.final_prediction(images)
        steps = self.adapt_under_orders(images)
        if self.merge_by == "mean":  # of the steps that were made
            made = torch.stack([step.made for step in steps])
            self.weights.load(merging.mean([step.weights for step in steps], made))
        else:
            self.weights.load(parallel.merge(self, steps))
        del steps  # frees the snapshots before the prediction
        return self.last_prediction if before else self.final_prediction(images)

    def adapt_under_orders(self, images: Tensor) -> list[OrderStep]:
        """Algorithm 2: one step under each order, each starting from the weights of the previous one."""
        if self.mode != "sequential":
            return parallel.adapt(self, images)
        for _ in range(self.options.steps):
            steps = [self.adapt_under(order, images, first=i == 0) for i, order in enumerate(self.orders)]
        return steps

    def adapt_under(
        self, order: OrderLike, images: Tensor, *, first: bool, augmented: Tensor | None = None
    ) -> OrderStep:
        """The body of Algorithm 2: one gradient step on pseudo-labels under one order; returns the adapted weights.

        `first`: the weights are those before the update. `augmented`: images (n, c, h, w) to adapt on in place of the
        given ones.
        """
        seen = images if augmented is None else augmented
        logits = self.logits(seen, order=order, stochastic_depth=self.options.stochastic_depth)
        prediction = self.predict(images, order=order) if self.options.stochastic_depth else logits.detach()
        if first and order == self.evaluate_order and self.reuses_first_logits:
            self.last_prediction = prediction
            self.prediction_before = prediction if self.prediction_before is None else self.prediction_before
        made = self.step(self.loss(logits, most_likely(prediction)))
        mean_entropy = entropy(logits.detach()).mean() if self.merge_by != "mean" else None
        return OrderStep(self.weights.snapshot(), made, mean_entropy)

    def loss(self, logits: Logits, labels: Tensor | None = None) -> Tensor:
        """Cross-entropy to the pseudo-labels or, with loss="confusion", minimum class confusion."""
        if getattr(self.options, "loss", "labels") == "confusion":
            return confusion_loss(class_confusion(logits))
        return pseudo_label_loss(logits, labels)

    @torch.no_grad()
    def final_prediction(self, images: Tensor) -> Logits:
        """Logits of the present weights in the default order; with `mirror`, of the images and their mirror images."""
        forward = partial(self.logits, order=self.evaluate_order)
        if not self.mirror:
            return forward(images)
        self.counters.forwards += 1  # counted in forwards over the batch
        return log_mean_probability(forward_views(forward, images, mirror=True))

    def infer(self, images: Tensor) -> Logits:
        forward = partial(self.frozen_logits, order=self.evaluate_order)
        return log_mean_probability(forward_views(forward, images, mirror=True)) if self.mirror else forward(images)


class TrustNaive(WeightAveraging):
    """TRUST with the default order alone: the SS2D weights on their own pseudo-labels."""

    name = "trust_naive"
    Options = NaiveOptions
    orders = [DEFAULT_ORDER]


class Trust(WeightAveraging):
    """TRUST with the paper's orders, its parallel modes and the other merges."""

    Options = TrustOptions
    options: TrustOptions

    def adapted_names(self, model: nn.Module) -> list[str]:
        parallel.check_options(self.options, model)
        if self.options.loss == "labels" and not any(map(has_statistics, model.modules())):
            message = (
                "without BatchNorm, TRUST's pseudo-labels collapse in long streams under strong corruptions "
                "(docs/reference/trust.md); loss='confusion' works there"
            )
            warnings.warn(message, TrustWarning, stacklevel=users_level())
        return super().adapted_names(model)

    def reset_state(self) -> None:
        self.orders = self.options.chosen(scan_orders_of(self.model))
        self.evaluate_order = find_order(self.options.evaluate_order, scan_orders_of(self.model))
        self.mode, self.merge_by = self.options.mode, self.options.merge
        self.mirror = self.options.views == "mirror"
        if self.mode != "sequential":  # sums must not depend on how the orders were listed
            self.orders.sort(key=str)
        self.reuses_first_logits = self.mode != "split" and not self.mirror


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
