"""States as nested dicts and lists of tensors and plain values: what each may be, and copies of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn

from trust_tta.errors import StateError
from trust_tta.schema import show


@dataclass(frozen=True)
class Array:
    """A dense, finite tensor; None in `shape` allows any length, None as `dtype` any floating-point type."""

    shape: tuple[int | None, ...]
    dtype: torch.dtype | None = None
    least: float = -math.inf
    most: float = math.inf
    whole: bool = False  # whole numbers alone, such as a count of steps

    @classmethod
    def like(cls, tensor: Tensor, **limits: Any) -> Array:
        return cls(tuple(tensor.shape), tensor.dtype, **limits)


@dataclass(frozen=True)
class Number:
    """A finite number of exactly one Python type."""

    kind: type[int] | type[float]
    least: float = -math.inf
    most: float = math.inf


@dataclass(frozen=True)
class Optional:
    """Something that is missing until the first batch has come."""

    spec: Spec


Spec: TypeAlias = "Array | Number | Optional | dict[str, Spec] | list[Spec] | str | int"  # str, int: exactly this


def check(state: Any, spec: Spec, *, where: str = "") -> None:
    """Refuse a state whose structure, types, shapes or values are not those of `spec`."""
    if isinstance(spec, Optional):
        check(state, spec.spec, where=where)
    elif isinstance(spec, Array):
        _check_tensor(state, spec, where)
    elif isinstance(spec, Number):
        _check_number(state, spec, where)
    elif isinstance(spec, dict):
        _check_keys(state, spec, where)
        for key, value in state.items():
            check(value, spec[key], where=f"{where}.{key}" if where else key)
    elif isinstance(spec, list):
        if not isinstance(state, (list, tuple)) or len(state) != len(spec):
            given = f"{len(state)} entries" if isinstance(state, (list, tuple)) else f"a {type(state).__name__}"
            raise _misfit(where, f"is {given}; {len(spec)} entries are wanted")
        for i, (value, wanted) in enumerate(zip(state, spec, strict=True)):
            check(value, wanted, where=f"{where}[{i}]")
    elif type(state) is not type(spec) or state != spec:
        raise _misfit(where, f"is {show(state)}; {spec!r} is wanted")


def clone(tree: Any) -> Any:
    """A copy of nested dicts and lists that shares no tensor with the original."""
    groups: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
    twin = _with_empty_tensors(tree, groups)
    for copies, originals in groups.values():  # one kernel for all of a kind, where the device has one
        torch._foreach_copy_(copies, originals)
    return twin


def _misfit(where: str, problem: str) -> StateError:
    return StateError(
        f"the state does not fit: {where or 'it'} {problem}; was it made with the same network and options?"
    )


def _check_keys(state: Any, spec: dict[str, Spec], where: str) -> None:
    if not isinstance(state, Mapping):
        raise _misfit(where, f"is a {type(state).__name__}; a dict is wanted")
    missing = [key for key, wanted in spec.items() if key not in state and not isinstance(wanted, Optional)]
    unknown = [key for key in state if key not in spec]
    if missing:
        raise _misfit(where, f"lacks {_names(missing)}")
    if unknown:
        raise _misfit(where, f"holds {_names(unknown)}, which is unknown here")


def _names(keys: list[Any]) -> str:
    return show(keys[0]) + (f" and {len(keys) - 1} more" if len(keys) > 1 else "")


def _check_number(value: Any, spec: Number, where: str) -> None:
    if type(value) is not spec.kind or not spec.least <= value <= spec.most or not math.isfinite(value):
        wanted = "an integer" if spec.kind is int else "a finite number"
        limit = f" >= {spec.least:g}" if math.isfinite(spec.least) else ""
        raise _misfit(where, f"is {show(value)}; {wanted}{limit} is wanted")


def _check_tensor(value: Any, spec: Array, where: str) -> None:
    if not isinstance(value, Tensor):
        raise _misfit(where, f"is a {type(value).__name__}; a tensor is wanted")
    if value.layout is not torch.strided or value.is_meta or value.is_quantized:
        raise _misfit(where, "is a sparse, quantized or meta tensor; a dense one is wanted")
    shape = tuple(value.shape)
    if len(shape) != len(spec.shape) or any(w not in (None, g) for g, w in zip(shape, spec.shape, strict=True)):
        raise _misfit(where, f"has shape {shape}; {str(spec.shape).replace('None', 'any')} is wanted")
    if (value.dtype != spec.dtype) if spec.dtype else not value.is_floating_point():
        raise _misfit(where, f"is {value.dtype}; {spec.dtype or 'a floating-point type'} is wanted")
    if value.numel() == 0:
        return
    low, high = (float(limit) for limit in value.detach().aminmax())
    if not (math.isfinite(low) and math.isfinite(high)):
        raise StateError(f"the state holds values in {where} that are not finite; take an earlier one")
    if low < spec.least or high > spec.most or (spec.whole and bool((value.detach() % 1).any())):
        wanted = f"{'whole ' if spec.whole else ''}values from {spec.least:g} to {spec.most:g}"
        raise _misfit(where, f"holds values from {low:g} to {high:g}; {wanted} are wanted")


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
    if isinstance(tree, (list, tuple)):
        return [_with_empty_tensors(value, groups) for value in tree]
    return tree


class Memory(nn.Module):
    """Numbers that travel with a network and are part of a method's state.

    `MEMORY` names the tensors, of at least 0 unless `LIMITS` says otherwise.
    """

    MEMORY: ClassVar[tuple[str, ...]]
    LIMITS: ClassVar[Mapping[str, Mapping[str, float]]] = {}

    def values(self) -> dict[str, Tensor]:
        return {name: getattr(self, name).detach() for name in self.MEMORY}

    def spec(self) -> dict[str, Spec]:
        limits = {name: self.LIMITS.get(name, {"least": 0}) for name in self.MEMORY}
        return {name: Array.like(value, **limits[name]) for name, value in self.values().items()}

    @torch.no_grad()
    def load(self, state: dict[str, Tensor]) -> None:
        for name in self.MEMORY:
            getattr(self, name).copy_(state[name])
