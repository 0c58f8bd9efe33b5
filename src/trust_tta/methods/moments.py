"""What an optimiser remembers, as plain lists of tensors: to keep, to bring back, to average."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

from trust_tta.methods.state import clone


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
        part = torch._foreach_mul(present, weight)
        if self.weight is None:
            self.total, self.weight = list(part), weight
        else:
            torch._foreach_add_(self.total, part)
            self.weight = self.weight + weight

    def value(self) -> list[Tensor]:
        """The mean; none where nothing was added. Not a number where all weights are zero."""
        if self.weight is not None:
            torch._foreach_div_(self.total, self.weight)
        return self.total
