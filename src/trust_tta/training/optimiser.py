"""AdamW over two groups of parameters, and its learning rate step by step."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from trust_tta.training.recipe import TrainRecipe

_UNDECAYED = {"A_logs", "Ds", "dt_projs_bias"}  # set time scales: pulling them to zero changes the memory


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """The trainable parameters with decay, and those without: norms, biases, the scan's A, D and step biases."""
    decayed: list[nn.Parameter] = []
    free: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            leaf = name.rpartition(".")[2]
            (free if parameter.dim() <= 1 or leaf in _UNDECAYED else decayed).append(parameter)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": free, "weight_decay": 0.0}]


def make_optimiser(model: nn.Module, recipe: TrainRecipe, device: torch.device) -> torch.optim.AdamW:
    groups = parameter_groups(model, recipe.weight_decay)
    return torch.optim.AdamW(groups, lr=recipe.lr, fused=device.type == "cuda")


def learning_rate(step: int, steps_per_epoch: int, recipe: TrainRecipe) -> float:
    """Linear from lr/warmup to lr over the warm-up steps, then half a cosine down to zero after the last step."""
    warmup = round(recipe.warmup_epochs * steps_per_epoch)
    if step < warmup:
        return recipe.lr * (step + 1) / warmup
    total = recipe.epochs * steps_per_epoch
    return recipe.lr / 2 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup)))


def set_learning_rate(optimiser: torch.optim.Optimizer, lr: float) -> None:
    for group in optimiser.param_groups:
        group["lr"] = lr
