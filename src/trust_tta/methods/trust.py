"""TRUST: adapt under several traversal orders, average the resulting weights, predict with the average.

Dastani et al., "TRUST: Test-Time Refinement using Uncertainty-Guided SSM Traverses", NeurIPS 2025, Algorithms 1 and 2.
Prediction before the update, checks, undo and counters are in `base.py`; the parallel modes and the merges other than
the mean are in `parallel.py`; options are in `trust_options.py`.
"""

from __future__ import annotations

import warnings
from functools import partial

import torch
from torch import Tensor, nn

from trust_tta.errors import TrustWarning, users_level
from trust_tta.methods import merging, parallel
from trust_tta.methods.base import Learner
from trust_tta.methods.ensembling import forward_views, log_mean_probability
from trust_tta.methods.losses import class_confusion, confusion_loss, entropy, most_likely, pseudo_label_loss
from trust_tta.methods.parallel import OrderStep
from trust_tta.methods.statistics import has_statistics
from trust_tta.methods.trust_options import NaiveOptions, TrustOptions, require_orders, scan_orders_of
from trust_tta.ops.segmentation_logits import Logits
from trust_tta.orders import DEFAULT_ORDER, OrderLike, ScanOrder, find_order


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
