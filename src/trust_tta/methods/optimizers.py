"""Optimisers of one vector, and what they remember: to keep, to bring back, to average."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from trust_tta.errors import ConfigError, StateError
from trust_tta.methods.state import clone


def make_optimizer(name: str, weights: Tensor, *, lr: float) -> Optimizer:
    """Fused ones: they leave out a step on the device's own word."""
    if name == "adam":
        return torch.optim.Adam([weights], lr=lr, fused=True)
    if name == "sgd":
        optimizer = torch.optim.SGD([weights], lr=lr, momentum=0.9, fused=True)
        # It would make the momentum of its first step from whatever the memory holds, were that step left out.
        optimizer.state[weights]["momentum_buffer"] = torch.zeros_like(weights)
        return optimizer
    raise ConfigError(f"unknown optimizer {name!r}; choose 'adam' or 'sgd'")


def load_optimizer(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Take back moments and step counts; the settings stay those of `optimizer`."""
    settings = [{key: value for key, value in g.items() if key != "params"} for g in optimizer.param_groups]
    if [s.keys() | {"params"} for s in settings] != [g.keys() for g in state["param_groups"]]:
        raise StateError("this state was made with another optimizer; create the method with the same one")
    optimizer.load_state_dict(clone(state))
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group.update(own)


def read(optimizer: Optimizer | None) -> list[Tensor]:
    """The tensors themselves, parameter by parameter; none before the first step."""
    if optimizer is None:
        return []
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return [v for p in parameters if p in optimizer.state for v in optimizer.state[p].values() if isinstance(v, Tensor)]


def save(optimizer: Optimizer | None) -> list[Tensor]:
    saved: list[Tensor] = clone(read(optimizer))
    return saved


def load(optimizer: Optimizer | None, saved: list[Tensor]) -> None:
    """Bring back what `save` gave; nothing at all means: before the first step."""
    if optimizer is None:
        return
    if saved:
        torch._foreach_copy_(read(optimizer), saved)
    else:
        optimizer.state.clear()


class Mean:
    """The weighted mean of what an optimiser remembers at several moments."""

    def __init__(self) -> None:
        self.total: list[Tensor] = []
        self.weight: Tensor | None = None

    def add(self, optimizer: Optimizer | None, weight: Tensor) -> None:
        """Add what it remembers now, with a weight () on the device."""
        present = read(optimizer)
        if not present:
            return
        weight = weight.to(present[0].dtype)
        if self.weight is None:
            self.total, self.weight = [tensor * weight for tensor in present], weight
            return
        for total, tensor in zip(self.total, present, strict=True):  # nothing of their size beside them
            total.addcmul_(tensor, weight)
        self.weight = self.weight + weight

    def value(self) -> list[Tensor]:
        """The mean; none where nothing was added. Not a number where all weights are zero."""
        if self.weight is not None:
            torch._foreach_div_(self.total, self.weight)
        return self.total
