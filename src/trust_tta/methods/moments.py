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
    """The mean of what several optimisers remember, gathered one by one."""

    def __init__(self) -> None:
        self.total: list[Tensor] = []
        self.count = 0

    def add(self, optimizer: Optimizer | None) -> None:
        if self.count == 0:
            self.total = save(optimizer)
        elif self.total:
            torch._foreach_add_(self.total, read(optimizer))
        self.count += 1

    def value(self) -> list[Tensor]:
        if self.total:
            torch._foreach_div_(self.total, self.count)
        return self.total
