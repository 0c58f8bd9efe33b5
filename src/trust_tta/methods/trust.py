"""TRUST: adapt under several traversal orders, average the resulting weights, predict with the average.

Dastani et al., "TRUST: Test-Time Refinement using Uncertainty-Guided SSM Traverses", NeurIPS 2025,
Algorithms 1 and 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import BeforeValidator, model_validator
from torch import Tensor, nn

from trust_tta.errors import ConfigError
from trust_tta.methods import merging
from trust_tta.methods.base import Learner, LearningOptions
from trust_tta.methods.losses import class_confusion, confusion_loss, entropy, most_likely, pseudo_label_loss
from trust_tta.methods.parallel import Step, adapt_apart, adapt_side_by_side, check_copies
from trust_tta.methods.parameters import ParameterSet
from trust_tta.methods.views import log_mean_probability, mirrored
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

TEMPERATURE = 2.5  # of the class confusion, where it is the loss


def _letters(orders: Any) -> Any:
    """A list of orders, in whichever form, as letters."""
    if orders is None:
        return None
    if isinstance(orders, (str, ScanOrder)) or not isinstance(orders, Sequence):
        raise ConfigError(f"{show(orders)} is not a list of traversal orders; give one such as ['abcd', 'badc']")
    if not orders:
        raise ConfigError("the list is empty; give at least one traversal order, or omit it for the paper's six")
    return tuple(order_name(order) for order in orders)


Letters = Annotated[str, BeforeValidator(order_name)]
Orders = Annotated[tuple[str, ...] | None, BeforeValidator(_letters)]


class Averaging(Learner):
    """Algorithms 1 and 2: hard pseudo-labels under each of `orders`, one step each, then the mean of the weights."""

    orders: list[ScanOrder | str]
    evaluate_order: ScanOrder | str = DEFAULT_ORDER
    needs_entropies = False  # whether the merge asks for entropies
    before: Logits  # the prediction with the weights before the last round of a batch
    seen = False  # whether the present round has made it

    def adapted_names(self, model: nn.Module) -> list[str]:
        require_orders(model)
        return super().adapted_names(model)

    def adapt(self, images: Tensor) -> Logits:
        """Algorithm 1, for one batch."""
        if self.options.predict == "before" and not self.sees_before():
            self.coarse_before = self.before = self.evaluate_now(images)
        steps = self.forward_and_adapt(images)
        if steps:
            self.weights.write(self.merge(steps))
        del steps  # before the prediction takes its memory
        return self.evaluate_now(images) if self.options.predict == "after" else self.before

    def forward_and_adapt(self, images: Tensor) -> list[Step]:
        """Algorithm 2: a step under each order; of several rounds, the last."""
        for _ in range(self.options.steps):
            self.seen = False
            steps = [self.adapt_under(order, images) for order in self.orders]
            self.update.unsettled += [step.finite for step in steps]
        return steps

    def adapt_under(self, order: OrderLike, images: Tensor) -> Step:
        """The body of Algorithm 2: one step under one order."""
        logits = self.adapting_forward(images, order)
        labels = self.pseudo_labels(images, order, logits)
        finite = self.update.descend(self.loss(logits, labels))
        return Step(self.weights.read(), finite, entropy(logits.detach()).mean() if self.needs_entropies else None)

    def loss(self, logits: Logits, chosen: Tensor | None) -> Tensor:
        """Of the labels `chosen`, or, where the option `loss` says so, minimum class confusion without labels."""
        if getattr(self.options, "loss", "labels") == "labels":
            return pseudo_label_loss(logits, chosen)
        return confusion_loss(class_confusion(logits, temperature=TEMPERATURE))

    def adapting_forward(self, images: Tensor, order: OrderLike) -> Logits:
        return self.predict.coarse(images, order=order, stochastic_depth=self.options.stochastic_depth)

    def pseudo_labels(self, images: Tensor, order: OrderLike, logits: Logits) -> Tensor:
        """The most likely classes; a second, undisturbed forward gives them only when the first was disturbed."""
        if self.options.stochastic_depth:
            with torch.no_grad():
                logits = self.predict.coarse(images, order=order)
        if order == self.evaluate_order and self.sees_before() and not self.seen:
            self.seen, self.before = True, logits.detach()
            self.coarse_before = self.before if self.coarse_before is None else self.coarse_before
        return most_likely(logits)

    def merge(self, steps: Sequence[Step]) -> Tensor:
        """The mean of the weights after the steps that were made; as they were if none was."""
        return merging.mean([step.theta for step in steps], torch.stack([step.finite for step in steps]))

    def sees_before(self) -> bool:
        """Whether an adapting pass is also the prediction with the weights before its round."""
        return self.orders[0] == self.evaluate_order

    def evaluate_now(self, images: Tensor) -> Logits:
        """A counted prediction in the evaluation's order."""
        with torch.no_grad():
            return self.predict.coarse(images, order=self.evaluate_order)

    def infer(self, images: Tensor) -> Logits:
        return self.predict.frozen(images, order=self.evaluate_order)


class NaiveOptions(LearningOptions):
    """`loss`: the paper's hard pseudo-labels, or minimum class confusion, as in `tide`."""

    parameters: ParameterSet = "ss2d"
    loss: Literal["labels", "confusion"] = "labels"


class TrustNaive(Averaging):
    """TRUST with the default order alone: the SS2D weights on their own pseudo-labels."""

    name = "trust_naive"
    Options = NaiveOptions
    orders = [DEFAULT_ORDER]
    in_bands = True


class OrderOptions(LearningOptions):
    """`orders`: an explicit list, or what `rank_orders` gave, of which the first `k` are taken; None: `k` of the
    paper's six, those of the lowest entropy, or of the network's own where it has others."""

    parameters: ParameterSet = "ss2d"
    orders: Orders = None
    k: Count = 6

    @model_validator(mode="before")
    @classmethod
    def _cut_ranking(cls, values: Any) -> Any:
        orders = values.get("orders") if isinstance(values, dict) else None
        if isinstance(orders, Sequence) and orders and all(_is_ranked(pair) for pair in orders):
            return {**values, "orders": [pair[0] for pair in orders][: values.get("k", 6)]}
        return values

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


def _is_ranked(pair: object) -> bool:
    return isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], float)


class TrustOptions(OrderOptions):
    """`mode`: "sequential", each order continues from the one before; "replicate", all start from the same weights and
    see the whole batch; "split", the same with a share of the batch each, normalized by the statistics of that share
    or of the whole "batch". `merge`: the mean, means weighted by 1 / entropy, the same along the sphere, and how the
    authors' code takes the last. `loss`: the paper's hard pseudo-labels, or minimum class confusion. `views`: predict
    the mean probability of the images and of their mirror images."""

    mode: Literal["sequential", "replicate", "split"] = "sequential"
    split_statistics: Literal["part", "batch"] = "part"
    merge: Literal["mean", "entropy", "slerp", "slerp_released"] = "mean"
    evaluate_order: Letters = "abcd"
    loss: Literal["labels", "confusion"] = "labels"
    views: Literal["none", "mirror"] = "none"


class Trust(Averaging):
    """TRUST: the paper's orders, and its two parallel modes."""

    Options = TrustOptions
    options: TrustOptions
    in_bands = True

    def adapted_names(self, model: nn.Module) -> list[str]:
        names = super().adapted_names(model)
        one_pass = (self.options.mode, self.options.split_statistics) == ("split", "batch")
        if one_pass and self.options.statistics != "source":
            check_copies(model)
        return names

    def start(self) -> None:
        scan_orders = scan_orders_of(self.model)
        self.orders = self.options.chosen(scan_orders)
        self.evaluate_order = find_order(self.options.evaluate_order, scan_orders)
        self.needs_entropies = self.options.merge != "mean"
        if self.options.mode != "sequential":  # sums must not depend on how the orders were listed
            self.orders.sort(key=str)

    def forward_and_adapt(self, images: Tensor) -> list[Step]:
        if self.options.mode == "sequential":
            return super().forward_and_adapt(images)
        shared = self.options.mode == "split" and self.options.split_statistics == "batch"
        if shared and (self.statistics.of_batches or self.statistics.norms):  # else the images do not meet
            return adapt_side_by_side(self, images)
        return adapt_apart(self, images)

    def merge(self, steps: Sequence[Step]) -> Tensor:
        if not self.needs_entropies:
            return super().merge(steps)
        kept = [step for step in steps if bool(step.finite)]
        if not kept:
            return steps[0].theta
        thetas, entropies = [step.theta for step in kept], [step.entropy for step in kept if step.entropy is not None]
        weights = merging.inverse_entropy_weights(torch.stack(entropies))
        if self.options.merge == "entropy":
            return merging.weighted(thetas, weights)
        networks = [list(self.weights.by_name(theta).values()) for theta in thetas]
        if self.options.merge == "slerp_released":
            return self.weights.flatten(merging.slerp_released(networks, weights))
        layers = zip(*networks, strict=True)
        return self.weights.flatten(merging.slerp(layer, weights) for layer in layers)  # each has a sphere of its own

    def sees_before(self) -> bool:
        if self.options.mode == "split" or self.options.views == "mirror":
            return False
        return self.evaluate_order in self.orders if self.options.mode == "replicate" else super().sees_before()

    def evaluate_now(self, images: Tensor) -> Logits:
        if self.options.views == "none":
            return super().evaluate_now(images)
        self.counters.forwards += 1  # counted in passes over the batch
        return log_mean_probability(mirrored(super().evaluate_now, images))

    def infer(self, images: Tensor) -> Logits:
        if self.options.views == "none":
            return super().infer(images)
        return log_mean_probability(mirrored(super().infer, images))


def scan_orders_of(model: nn.Module) -> tuple[str, ...]:
    """The names of a network's scan orders, its own first; VMamba's where a network from outside does not say."""
    names: tuple[str, ...] = getattr(model, "scan_orders", VMAMBA_SCAN_ORDERS)
    return names


def require_orders(model: nn.Module) -> None:
    if not hasattr(model, "scan_directions"):
        raise ConfigError(
            f"TRUST permutes traversal orders and {type(model).__name__} has none; "
            "use a VMamba, or another method such as 'tent'"
        )
