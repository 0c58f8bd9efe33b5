"""The paper's ablations of TRUST: diversity without averaged weights, and averaged weights without diversity."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trust_tta.errors import StateError
from trust_tta.methods.losses import pseudo_label_loss
from trust_tta.methods.modes import check_count
from trust_tta.methods.optimizers import load_optimizer
from trust_tta.methods.trust import Trust
from trust_tta.orders import DEFAULT_ORDER, OrderLike


class Ensemble(Trust):
    """Diversity without averaged weights: K networks, each of one order, whose predictions are averaged.

    Every order has weights and moments of its own that start at the source and never meet; each predicts in its
    own order. The output is the logarithm of the mean probability. `detach()` gives the source: there is no
    single adapted network.
    """

    name = "ensemble"

    def __init__(
        self,
        model: nn.Module,
        *,
        orders: Sequence[OrderLike] | None = None,
        k: int = 6,
        lr: float = 1e-4,
        steps: int = 1,
        parameters: str = "ss2d",
        episodic: bool = False,
        batch_statistics: bool = True,
    ) -> None:
        super().__init__(
            model,
            orders=orders,
            k=k,
            lr=lr,
            steps=steps,
            parameters=parameters,
            episodic=episodic,
            batch_statistics=batch_statistics,
        )
        self.load_extra_state({})

    def adapt(self, images: Tensor) -> Tensor:
        idle = self.optimizer
        before, after = [], []
        for i, order in enumerate(self.orders):
            self.load_snapshot(self.weights[i])
            self.optimizer = self.optimizers[i]
            for step in range(self.steps):
                logits = self.predict(images, order=order)
                if step == 0:
                    before.append(logits.detach())
                self.update(pseudo_label_loss(logits))
            self.weights[i] = self.snapshot()
            with torch.no_grad():
                after.append(self.predict(images, order=order))
        self.optimizer = idle
        self._set_weights(self.source)
        self.logits_before = log_mean_probability(before)
        return log_mean_probability(after)

    @torch.no_grad()
    def evaluate(self, images: Tensor) -> Tensor:
        logits = []
        for order, weights in zip(self.orders, self.weights, strict=True):
            self.load_snapshot(weights)
            logits.append(self.model(images, order=order))
        self._set_weights(self.source)
        return log_mean_probability(logits)

    def extra_state(self) -> dict[str, Any]:
        optimizers = [o.state_dict() for o in self.optimizers if o]
        return {"orders": self._names(), "weights": self.weights, "optimizers": optimizers}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        self.optimizers = [self._make_optimizer() for _ in self.orders]
        self.weights = state.get("weights", [self._vector.vector(self.source.values()) for _ in self.orders])
        if state.get("orders", self._names()) != self._names():
            raise StateError(f"this state is of the orders {state['orders']}; this ensemble has {self._names()}")
        for optimizer, saved in zip(self.optimizers, state.get("optimizers", ()), strict=False):
            load_optimizer(optimizer, saved)  # type: ignore[arg-type]

    def _names(self) -> list[str]:
        return [str(order) for order in self.orders]


class Repetition(Trust):
    """Averaged weights without diversity: the default order `k` times, and the mean of the weights."""

    name = "repetition"

    def __init__(
        self,
        model: nn.Module,
        *,
        k: int = 6,
        lr: float = 1e-4,
        steps: int = 1,
        parameters: str = "ss2d",
        episodic: bool = False,
        stochastic_depth: bool = False,
        batch_statistics: bool = True,
    ) -> None:
        check_count("k", k)
        super().__init__(
            model,
            orders=[DEFAULT_ORDER] * k,
            lr=lr,
            steps=steps,
            parameters=parameters,
            episodic=episodic,
            stochastic_depth=stochastic_depth,
            batch_statistics=batch_statistics,
        )


def log_mean_probability(logits: Sequence[Tensor]) -> Tensor:
    """log of the mean of K softmaxes of (n, classes)."""
    return torch.stack([z.log_softmax(1) for z in logits]).logsumexp(0) - math.log(len(logits))
