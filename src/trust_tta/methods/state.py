"""Saved state: nested dicts and lists of tensors and plain values."""

from __future__ import annotations

from collections.abc import Mapping
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


def check_weights(saved: Mapping[str, Tensor], own: Mapping[str, Tensor], method: str) -> None:
    """Refuse saved weights that are not those that the method adapts, or are not finite."""
    if {name: t.shape for name, t in saved.items()} != {name: t.shape for name, t in own.items()}:
        raise StateError(f"this state adapts other parameters than this '{method}'; was the network another?")
    if not all(bool(t.isfinite().all()) for t in saved.values()):
        raise StateError("this state holds weights that are not finite; take an earlier one")


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
