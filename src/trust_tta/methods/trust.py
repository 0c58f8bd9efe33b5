"""TRUST: adapt under several traversal orders, average the resulting weights, predict with the average.

Dastani et al., "TRUST: Test-Time Refinement using Uncertainty-Guided SSM Traverses", NeurIPS 2025,
Algorithms 1 and 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from trust_tta.errors import ConfigError, ShapeError
from trust_tta.methods import merging, optimizers
from trust_tta.methods.base import Method
from trust_tta.methods.losses import entropy, pseudo_label_loss
from trust_tta.methods.modes import choose, stochastic_depth_on
from trust_tta.methods.parameters import PARAMETER_SETS, select
from trust_tta.orders import PAPER_ORDERS, OrderLike, ScanOrder


class End(NamedTuple):
    """Where a step under one order ends: the weights, the mean entropy of its predictions, whether it was made."""

    theta: Tensor
    entropy: Tensor
    finite: Tensor


class Trust(Method):
    """Hard pseudo-labels under K orders, one Adam step each, merged weights, prediction in the default order."""

    name = "trust"

    def __init__(
        self,
        model: nn.Module,
        *,
        orders: Sequence[OrderLike] | None = None,
        k: int = 6,
        lr: float = 1e-4,
        steps: int = 1,
        parameters: str = "ss2d",
        mode: str = "sequential",
        parallel: str = "replicate",
        merge: str = "mean",
        evaluate_order: OrderLike = "abcd",
        episodic: bool = False,
        stochastic_depth: bool = False,
        batch_statistics: bool = True,
    ) -> None:
        require_orders(model)
        kinds = choose("parameters", parameters, PARAMETER_SETS)
        super().__init__(
            model,
            adapted=select(model, kinds),
            lr=lr,
            steps=steps,
            episodic=episodic,
            batch_statistics=batch_statistics,
        )
        self.orders = choose_orders(orders, k)
        self.parallel = choose("mode", mode, {"sequential": False, "parallel": True})
        self.split = choose("parallel", parallel, {"replicate": False, "split": True})
        self.merge = choose("merge", merge, {m: m for m in ("mean", "entropy", "slerp")})
        self.evaluate_order = ScanOrder(evaluate_order)
        self.stochastic_depth = stochastic_depth
        if self.parallel:  # sums must not depend on how the orders were listed
            self.orders = sorted(self.orders)

    def adapt(self, images: Tensor) -> Tensor:
        """Algorithm 1, for one batch."""
        self.load_average(*self.forward_and_adapt(images))
        with torch.no_grad():
            return self.predict(images, order=self.evaluate_order)

    @torch.no_grad()
    def evaluate(self, images: Tensor) -> Tensor:
        logits: Tensor = self.model(images, order=self.evaluate_order)
        return logits

    def load_average(self, thetas: list[Tensor], entropies: list[Tensor]) -> None:
        """Go on with the average; the K weights are let go of before the prediction takes its memory."""
        if thetas:
            self.load_snapshot(self.average(thetas, entropies))

    def forward_and_adapt(self, images: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Algorithm 2: the weights after each order, and the entropy of its predictions."""
        if self.parallel:
            return self.adapt_side_by_side(images)
        for _ in range(self.steps - 1):
            self.accepted([self.adapt_under(order, images) for order in self.orders])
        return self.accepted([self.adapt_under(order, images) for order in self.orders])

    def adapt_under(self, order: ScanOrder, images: Tensor) -> End:
        """One step under one order."""
        logits = self.adapting_forward(images, order)
        labels = self.pseudo_labels(images, order, logits)
        finite = self.descend(pseudo_label_loss(logits, labels))
        return End(self.snapshot(), entropy(logits.detach()).mean(), finite)

    def accepted(self, ends: list[End], *, moved: Sequence[bool] = ()) -> tuple[list[Tensor], list[Tensor]]:
        """The weights and entropies of the updates that were made, and of those whose weights had `moved` before."""
        made = self.settle([end.finite for end in ends])
        kept = [end for end, *fits in zip(ends, made, moved or made, strict=True) if any(fits)]
        return [end.theta for end in kept], [end.entropy for end in kept]

    def adapting_forward(self, images: Tensor, order: ScanOrder) -> Tensor:
        with stochastic_depth_on(self.model, self.stochastic_depth, seed=self.counters.forwards):
            logits = self.predict(images, order=order, recorded=not self.stochastic_depth)
        unchanged = self.parallel or order == self.orders[0]
        whole = not (self.stochastic_depth or (self.parallel and self.split))
        if self.logits_before is None and unchanged and whole and order == self.evaluate_order:
            self.logits_before = logits.detach()
        return logits

    def pseudo_labels(self, images: Tensor, order: ScanOrder, logits: Tensor) -> Tensor:
        """The most likely classes; a second, undisturbed forward gives them only when the first was disturbed."""
        if not self.stochastic_depth:
            return logits.detach().argmax(1)
        with torch.no_grad():
            return self.predict(images, order=order).argmax(1)

    def average(self, thetas: list[Tensor], entropies: list[Tensor]) -> Tensor:
        if self.merge == "mean":
            return merging.mean(thetas)
        weights = merging.inverse_entropy_weights(torch.stack(entropies))
        if self.merge == "entropy":
            return merging.weighted(thetas, weights)
        layers = zip(*(self.layers(theta).values() for theta in thetas), strict=True)
        return torch.cat([merging.slerp(layer, weights).flatten() for layer in layers])  # each has a sphere of its own

    def adapt_side_by_side(self, images: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """The parallel mode: every order starts from the same weights and moments; the moments are averaged here.

        The K adaptations do not depend on each other. One after the other they take as long on one device as side by
        side, and the memory of one.
        """
        parts = self.parts(images) if self.split else images.expand(len(self.orders), *images.shape)
        before = replace(self.counters)
        start, start_moments = self.snapshot(), optimizers.save(self.optimizer)
        ends: list[End] = []
        moved: list[bool] = []
        total = optimizers.Mean()
        for order, part in zip(self.orders, parts, strict=True):
            self.load_snapshot(start)
            optimizers.load(self.optimizer, start_moments)
            earlier = [self.settle([self.adapt_under(order, part).finite]) for _ in range(self.steps - 1)]
            moved.append([True] in earlier)
            ends.append(self.adapt_under(order, part))
            total.add(self.optimizer, ends[-1].finite | moved[-1])
        self.load_snapshot(start)
        thetas, entropies = self.accepted(ends, moved=moved)
        optimizers.load(self.optimizer, total.value() if thetas else start_moments)
        if self.split:  # counted in passes over the whole batch
            share = len(self.orders)
            self.counters.forwards = before.forwards + (self.counters.forwards - before.forwards) // share
            self.counters.backwards = before.backwards + (self.counters.backwards - before.backwards) // share
        return thetas, entropies

    def parts(self, images: Tensor) -> Tensor:
        """The batch divided among the orders; too small a batch is refused before anything changes."""
        k, n = len(self.orders), images.shape[0]
        if n < k:
            raise ShapeError(
                f"{n} images cannot be split among {k} orders; give at least {k} or use parallel='replicate'"
            )
        return equal_parts(images, k)


class TrustNaive(Trust):
    """TRUST with the default order alone: the SS2D weights on their own pseudo-labels."""

    name = "trust_naive"

    def __init__(
        self,
        model: nn.Module,
        *,
        lr: float = 1e-4,
        steps: int = 1,
        parameters: str = "ss2d",
        episodic: bool = False,
        stochastic_depth: bool = False,
        batch_statistics: bool = True,
    ) -> None:
        super().__init__(
            model,
            orders=["abcd"],
            lr=lr,
            steps=steps,
            parameters=parameters,
            episodic=episodic,
            stochastic_depth=stochastic_depth,
            batch_statistics=batch_statistics,
        )


def require_orders(model: nn.Module) -> None:
    if not hasattr(model, "slots"):
        raise ConfigError(
            f"TRUST permutes traversal orders and {type(model).__name__} has none; "
            "use a VMamba, or another method such as 'tent'"
        )


def choose_orders(orders: Sequence[OrderLike] | None, k: int) -> list[ScanOrder]:
    """The explicit list, the first `k` of what `rank_orders` gave, or the first `k` of the paper's orders."""
    if orders is not None:
        if isinstance(orders, str) or not isinstance(orders, Sequence):
            raise ConfigError(f"orders is {orders!r}; give a list of traversal orders, such as ['abcd', 'badc']")
        if orders and all(isinstance(pair, tuple) and isinstance(pair[0], ScanOrder) for pair in orders):
            orders = [pair[0] for pair in orders[:k]]  # type: ignore[misc]
        chosen = [ScanOrder(order) for order in orders]
        if not chosen:
            raise ConfigError("orders is empty; give at least one traversal order, or leave it out for the paper's six")
        return chosen
    if not 1 <= k <= len(PAPER_ORDERS):
        raise ConfigError(
            f"k is {k}; without explicit orders it is 1 to {len(PAPER_ORDERS)} (the paper's orders): "
            "for more, give orders=[...], as rank_orders lists them"
        )
    return list(PAPER_ORDERS[:k])


def equal_parts(images: Tensor, k: int) -> Tensor:
    """(n, ...) as (k, ceil(n/k), ...); where k does not divide n, the first images serve twice."""
    size = -(-images.shape[0] // k)
    return images[torch.arange(k * size, device=images.device) % images.shape[0]].view(k, size, *images.shape[1:])
