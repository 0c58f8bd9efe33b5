"""A moving average of the weights."""

from __future__ import annotations

import torch
from torch import nn


def decay_at(step: int, decay: float) -> float:
    """The decay at a step counted from 0: lower at first, so that the average forgets the initial weights."""
    return min(decay, (1 + step) / (10 + step))


@torch.no_grad()
def update_average(average: nn.Module, model: nn.Module, decay: float) -> None:
    """average = decay * average + (1 - decay) * model, over the parameters."""
    torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 1 - decay)


@torch.no_grad()
def copy_buffers(average: nn.Module, model: nn.Module) -> None:
    """Give the average the running statistics of the model; averaging them twice would only delay them."""
    for own, other in zip(average.buffers(), model.buffers(), strict=True):
        own.copy_(other)
