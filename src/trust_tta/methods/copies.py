"""K copies of the adapted weights that learn side by side while the rest of the network is shared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap


class Copies:
    """Stacked weights (K, ...), one row a copy, each with moments of its own in one Adam."""

    def __init__(self, adapted: Mapping[str, Tensor], count: int, lr: float) -> None:
        self.count = count
        self.weights = {n: nn.Parameter(p.detach().expand(count, *p.shape).clone()) for n, p in adapted.items()}
        self.optimizer = torch.optim.Adam(self.weights.values(), lr=lr)

    def start_from(self, adapted: Mapping[str, Tensor]) -> None:
        """Every copy begins at the current weights; the moments are kept."""
        with torch.no_grad():
            for name, stacked in self.weights.items():
                stacked.copy_(adapted[name].expand_as(stacked))

    def predict(self, model: nn.Module, images: Tensor, slots: Tensor, *, split: bool) -> Tensor:
        """Logits (K, n, classes) of copy k under slots[k], on images (n, ...), or on images[k] of (K, n, ...)."""

        def run(weights: dict[str, Tensor], slots: Tensor, images: Tensor) -> Tensor:
            logits: Tensor = functional_call(model, weights, (images,), {"order": slots})
            return logits

        copies = vmap(run, in_dims=(0, 0, 0 if split else None), randomness="different")
        logits: Tensor = copies(dict(self.weights), slots, images)
        return logits

    def update(self, loss: Tensor) -> bool:
        """Descend the sum of the copies' losses; False, and nothing changed, if anything is not finite."""
        parameters = list(self.weights.values())
        gradients = torch.autograd.grad(loss, parameters)
        if not bool(torch.stack([loss.detach(), *(g.sum() for g in gradients)]).isfinite().all()):
            return False
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        self.optimizer.step()
        self.optimizer.zero_grad()
        return True

    def snapshots(self) -> list[list[Tensor]]:
        """The K sets of weights, each in the order of `adapted`."""
        return [[w.detach()[k] for w in self.weights.values()] for k in range(self.count)]

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state)
