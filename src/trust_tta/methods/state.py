"""Saved state: nested dicts and lists of tensors and plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trust_tta.errors import StateError


def clone(tree: Any) -> Any:
    """A copy of nested dicts and lists that shares no tensor with the original."""
    groups: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
    twin = _with_empty_tensors(tree, groups)
    for copies, originals in groups.values():  # one kernel for all of a kind, where the device has one
        torch._foreach_copy_(copies, originals)
    return twin


def _with_empty_tensors(
    tree: Any, groups: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]]
) -> Any:
    if isinstance(tree, Tensor):
        copies, originals = groups.setdefault((tree.device, tree.dtype), ([], []))
        copies.append(torch.empty_like(tree, requires_grad=False))
        originals.append(tree.detach())
        return copies[-1]
    if isinstance(tree, Mapping):
        return {key: _with_empty_tensors(value, groups) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_with_empty_tensors(value, groups) for value in tree]
    return tree


def all_finite(tensors: Sequence[Tensor]) -> Tensor:
    """Whether no element is infinite or not a number: a truth value on the device, which nobody has to wait for."""
    largest = torch._foreach_norm([t.detach() for t in tensors], float("inf"))
    return torch.stack(largest).isfinite().all()


def like(parameter: Tensor, gradient: Tensor | None) -> Tensor | None:
    """The gradient with the strides of its parameter, as fused optimisers want it."""
    if gradient is None or gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter, requires_grad=False).copy_(gradient)


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Take back moments and step counts; the settings stay those of `optimizer`."""
    settings = [{key: value for key, value in g.items() if key != "params"} for g in optimizer.param_groups]
    if [s.keys() | {"params"} for s in settings] != [g.keys() for g in state["param_groups"]]:
        raise StateError("this state was made with another optimizer; create the method with the same one")
    optimizer.load_state_dict(clone(state))
    for parameter, remembered in optimizer.state.items():
        for name, value in remembered.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                remembered[name] = like(parameter, value)
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group.update(own)
