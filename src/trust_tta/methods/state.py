"""Saved state: nested dicts and lists of tensors and plain values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


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
