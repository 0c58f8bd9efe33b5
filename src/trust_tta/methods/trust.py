"""TRUST: adapt under several traversal orders, average the resulting weights, predict with the average.

Dastani et al., "TRUST: Test-Time Refinement using Uncertainty-Guided SSM Traverses", NeurIPS 2025,
Algorithms 1 and 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trust_tta.errors import ConfigError, ShapeError, StateError
from trust_tta.methods import merging
from trust_tta.methods.base import Method
from trust_tta.methods.copies import Copies
from trust_tta.methods.losses import entropy, pseudo_label_loss
from trust_tta.methods.modes import choose, stochastic_depth_on
from trust_tta.methods.parameters import PARAMETER_SETS, has_batch_norm, select
from trust_tta.orders import PAPER_ORDERS, OrderLike, ScanOrder


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
        self.copies = Copies(self.model, self.adapted, len(self.orders), lr) if self.parallel else None
        if self.parallel:  # which copy is which must not depend on how the orders were listed
            self.orders = sorted(self.orders)

    def adapt(self, images: Tensor) -> Tensor:
        """Algorithm 1, for one batch."""
        thetas, entropies = self.forward_and_adapt(images)
        if thetas:
            self.load_snapshot(self.average(thetas, entropies))
        with torch.no_grad():
            return self.predict(images, order=self.evaluate_order)

    def forward_and_adapt(self, images: Tensor) -> tuple[list[list[Tensor]], list[Tensor]]:
        """Algorithm 2: the weights after each order, and the entropy of its predictions."""
        if self.copies is not None:
            return self.adapt_side_by_side(images, self.copies)
        thetas: list[list[Tensor]] = []
        entropies: list[Tensor] = []
        for _ in range(self.steps):
            thetas, entropies = [], []
            for order in self.orders:
                logits = self.adapting_forward(images, order)
                labels = self.pseudo_labels(images, order, logits)
                loss = pseudo_label_loss(logits, labels)
                if self.update(loss):
                    thetas.append(self.snapshot())
                    entropies.append(entropy(logits.detach()).mean())
        return thetas, entropies

    def adapting_forward(self, images: Tensor, order: ScanOrder) -> Tensor:
        with stochastic_depth_on(self.model, self.stochastic_depth, seed=self.counters.forwards):
            logits = self.predict(images, order=order)
        first = self.logits_before is None and order == self.orders[0]
        if first and order == self.evaluate_order and not self.stochastic_depth:
            self.logits_before = logits.detach()
        return logits

    def pseudo_labels(self, images: Tensor, order: ScanOrder, logits: Tensor) -> Tensor:
        """The most likely classes; a second, undisturbed forward gives them only when the first was disturbed."""
        if not self.stochastic_depth:
            return logits.detach().argmax(1)
        with torch.no_grad():
            return self.predict(images, order=order).argmax(1)

    def average(self, thetas: list[list[Tensor]], entropies: list[Tensor]) -> list[Tensor]:
        if self.merge == "mean":
            return merging.mean(thetas)
        weights = merging.inverse_entropy_weights(torch.stack(entropies))
        return merging.weighted(thetas, weights) if self.merge == "entropy" else merging.slerp(thetas, weights)

    def adapt_side_by_side(self, images: Tensor, copies: Copies) -> tuple[list[list[Tensor]], list[Tensor]]:
        """The parallel mode: every order trains a copy that starts from the current weights, in one pass."""
        batch = self.parts(images) if self.split else images
        orders = [self.model.slots(order, 1) for order in self.orders]  # type: ignore[operator]
        thetas: list[list[Tensor]] = []
        entropies: list[Tensor] = []
        copies.start_from(self.adapted)
        for _ in range(self.steps):
            with stochastic_depth_on(copies.network, self.stochastic_depth, seed=self.counters.forwards):
                logits = copies.predict(batch, orders)
            labels = logits.detach().argmax(2)
            if self.stochastic_depth:
                with torch.no_grad():
                    labels = copies.predict(batch, orders).argmax(2)
            elif not self.split and self.logits_before is None and self.evaluate_order in self.orders:
                self.logits_before = logits.detach()[self.orders.index(self.evaluate_order)]
            losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(copies.count, -1)
            if self.update_side_by_side(losses.mean(1), copies):
                thetas = copies.snapshots()
                entropies = list(entropy(logits.detach().flatten(0, 1)).view(copies.count, -1).mean(1))
        return thetas, entropies

    def update_side_by_side(self, losses: Tensor, copies: Copies) -> bool:
        """Descend the losses (K,), each in its own copy; counted in passes over the whole batch."""
        passes = 1 if self.split else copies.count
        self.counters.forwards += passes * (2 if self.stochastic_depth else 1)
        self.counters.backwards += passes
        updated = copies.update(losses.sum())
        if updated:
            self.counters.updates += copies.count
        else:
            self.counters.skipped += copies.count
        return updated

    def parts(self, images: Tensor) -> Tensor:
        """The batch divided among the orders; too small a batch is refused before anything changes."""
        k, n = len(self.orders), images.shape[0]
        least = k + 1 if k > 1 and self.batch_statistics and has_batch_norm(self.model) else k
        if n < least:
            raise ShapeError(
                f"{n} images cannot be split among {k} orders; give at least {least} or use parallel='replicate'"
            )
        return equal_parts(images, k)

    def extra_state(self) -> dict[str, Any]:
        return {"copies": None if self.copies is None else self.copies.state_dict()}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        saved = state.get("copies")
        if state and (saved is None) != (self.copies is None):
            raise StateError(f"this state is of another mode; create '{self.name}' with the mode it was saved in")
        if self.copies is not None:
            self.copies = Copies(self.model, self.adapted, len(self.orders), self.lr)
            if saved is not None:
                self.copies.load_state_dict(saved)


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
    """The explicit list, or the first `k` of the paper's orders."""
    if orders is not None:
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
