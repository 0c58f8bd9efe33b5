"""The passes of a method over its network: forward, to predict; backward, to update its weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trust_tta.errors import ConfigError
from trust_tta.methods.safety import stochastic_depth_on
from trust_tta.methods.saving import Counters
from trust_tta.methods.statistics import Statistics
from trust_tta.methods.weights import Weights
from trust_tta.ops.cuda_graphs import Recorder
from trust_tta.ops.segmentation_logits import Logits, Pixels, whole
from trust_tta.orders import OrderLike
from trust_tta.preprocessing import network_input


class Passes:
    """Forward passes; called, it gives the logits (n, classes, ...) of a counted one."""

    def __init__(self, model: nn.Module, weights: Weights, statistics: Statistics, counters: Counters) -> None:
        self.model, self.statistics, self.counters = model, statistics, counters
        shares = [] if statistics.shares is None else [statistics.shares.value]
        # A method calls it with a tensor of its own, which no one else changes.
        self.counted = Forward(model, [*weights.tensors, *shares], lasting=True)
        self.uncounted, self.observing = Forward(model), Forward(model)  # of their own: norms that observe do otherwise

    def __call__(self, images: Tensor, *, order: OrderLike | None = None, recorded: bool = True) -> Tensor:
        return whole(self.coarse(images, order=order, recorded=recorded))

    def coarse(
        self,
        images: Tensor,
        *,
        order: OrderLike | None = None,
        stochastic_depth: bool = False,
        recorded: bool = True,
    ) -> Logits:
        """The same; the logits of pixels are `Pixels`, for losses in bands. Not `recorded` where it is changed."""
        self.counters.forwards += 1
        if stochastic_depth:
            with stochastic_depth_on(self.model, seed=self.counters.forwards - 1):
                return self.counted(images, order, recorded=False)  # chance cannot be recorded
        return self.counted(images, order, recorded=recorded and not self.statistics.mixed)

    def moving(self, images: Tensor) -> Logits:
        """As `coarse`, without gradients, but the statistics move."""
        self.counters.forwards += 1
        with torch.no_grad(), self.statistics.observing():
            return self.observing(images)

    def frozen(self, images: Tensor, *, order: OrderLike | None = None) -> Logits:
        """A pass for `infer`, which is not counted and moves nothing."""
        if self.uncounted.coarse:
            images = network_input(self.model, images)
        return self.uncounted(images, order, recorded=not self.statistics.mixed)

    def plain(self, images: Tensor) -> Logits:
        """A pass that is neither counted nor recorded."""
        return self.counted(images, recorded=False)


class Forward:
    """The forward pass of a network, recorded where the device can: images (n, c, h, w) to logits.

    In the given order or the network's own. Logits of pixels are `Pixels`.
    """

    def __init__(self, network: nn.Module, parameters: Sequence[Tensor] = (), *, lasting: bool = False) -> None:
        self.coarse = hasattr(network, "forward_coarse")
        self.network = network
        self.recorder = Recorder(CoarseNetwork(network) if self.coarse else network, parameters, lasting=lasting)

    def __call__(self, images: Tensor, order: OrderLike | None = None, *, recorded: bool = True) -> Logits:
        run = self.recorder if recorded else self.recorder.plain
        logits = run(images, self._directions(order, len(images)))
        return Pixels(logits, (images.shape[2], images.shape[3])) if self.coarse else logits

    def _directions(self, order: OrderLike | None, images: int) -> Tensor | None:
        """An order as the network takes it; None for a network without orders."""
        choose: Callable[[OrderLike | None, int], Tensor] | None = getattr(self.network, "scan_directions", None)
        if choose is not None:
            return choose(order, images)
        if order is not None:
            raise ConfigError(f"{type(self.network).__name__} has no traversal orders, and order={order} was asked for")
        return None


class CoarseNetwork(nn.Module):
    """A network that labels pixels, up to the logits of its head: images (n, c, h, w) -> (n, classes, h', w')."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor, **order: Any) -> Tensor:
        logits: Tensor = self.network.forward_coarse(images, **order)
        return logits


class Updates:
    """Backward passes; called, it descends a loss. What is not finite is skipped and counted."""

    def __init__(self, weights: Weights, statistics: Statistics, counters: Counters) -> None:
        self.weights, self.statistics, self.counters = weights, statistics, counters
        self.unsettled: list[Tensor] = []  # what `descend` gave and nothing in the batch waits for

    def __call__(self, loss: Tensor, *, start: Tensor | None = None) -> bool:
        """Whether the loss and its gradient were finite, so that a step was made.

        With `start`, a vector of weights, the step is taken from there, wherever the weights are now.
        """
        return self.settle([self.descend(loss, start=start)])[0]

    def descend(self, loss: Tensor, *, start: Tensor | None = None) -> Tensor:
        """As a call, but nobody waits for the device, which itself skips a step; `settle` counts."""
        shares = self.statistics.shares
        finite = self.weights.differentiate(loss, extra=None if shares is None else shares.value)
        self.counters.backwards += 1
        self.weights.step(finite, start=start)
        return finite

    def settle(self, finite: list[Tensor]) -> list[bool]:
        """Wait for the device, count the updates that `descend` made and those that it skipped."""
        made: list[bool] = torch.stack(finite).tolist()
        self.counters.updates += sum(made)
        self.counters.skipped += len(made) - sum(made)
        return made

    def gradient(self, loss: Tensor) -> Tensor | None:
        """The backward pass alone; the gradient (n,) in the order of the weights' vector, until the next pass.

        None, counted as skipped, where it or the loss is not finite.
        """
        finite = bool(self.weights.differentiate(loss))
        self.counters.backwards += 1
        self.counters.skipped += not finite
        return self.weights.gradient if finite else None
