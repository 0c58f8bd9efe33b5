"""The state of a method: its specification, saving and loading, and rollback after a failed batch.

A state is made of nested dicts and lists of tensors and plain values. It is checked whole against its `Spec` before
anything is loaded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from trust_tta.errors import DataError, StateError
from trust_tta.schema import show

if TYPE_CHECKING:
    from trust_tta.methods.base import Method

STATE_FORMAT = 7
MAX_COUNT = 2.0**53  # of a counter


@dataclass
class Counters:
    """Numbers of operations since the method was created or reset."""

    batches: int = 0
    forwards: int = 0
    backwards: int = 0
    updates: int = 0
    skipped: int = 0  # updates skipped because the loss or a gradient was not finite
    recoveries: int = 0  # resets to the source that the method itself decided on
    refused: int = 0  # batches refused because their predictions were not finite


def save_state(method: Method) -> dict[str, Any]:
    """The whole state as copied tensors and plain values."""
    extra = extra_state(method)
    state: dict[str, Any] = {"format": STATE_FORMAT, "method": method.name, **method.weights.state_dict()}
    state |= {"statistics": method.statistics.state(), "extra": extra, "counters": asdict(method.counters)}
    if buffers := method.network_buffers.values():
        state["buffers"] = buffers
    return clone(state)  # a pickle of views would hold all that they are views of


def load_state(method: Method, state: Mapping[str, Any]) -> None:
    """Load the result of `save_state`; a state that does not fit is refused before anything changes."""
    if not isinstance(state, Mapping) or "method" not in state or "format" not in state:
        raise StateError(f"this is a {type(state).__name__} and no state; give what state_dict() of a method gave")
    if type(state["format"]) is not int or state["format"] != STATE_FORMAT:
        raise StateError(
            f"this state has format {show(state['format'])} and this version reads format {STATE_FORMAT}; "
            "adapt again from the source, or load it with the version that saved it"
        )
    if not isinstance(state["method"], str) or state["method"] != method.name:
        raise StateError(f"this state is of the method {show(state['method'])}; '{method.name}' takes its own alone")
    if isinstance(state.get("statistics"), Mapping):
        state = {**state, "statistics": method.statistics.upgrade(state["statistics"])}
    optimizer = state.get("optimizer")
    if isinstance(optimizer, Mapping) and optimizer.keys() != method.weights.optimizer_state.keys():
        raise StateError("this state was made with another optimizer; create the method with the same one")
    extra: dict[str, Spec] = {name: Optional(spec) for name, spec in method.state_spec().items()}
    counters: dict[str, Spec] = {f.name: Number(int, least=0, most=MAX_COUNT) for f in fields(Counters)}
    rest: dict[str, Spec] = {"statistics": method.statistics.spec(), "extra": extra, "counters": counters}
    rest["buffers"] = method.network_buffers.spec()
    check(state, {"format": STATE_FORMAT, "method": method.name, **method.weights.state_spec(), **rest})
    method.check_state(state)
    with restored_on_error(method):
        method.weights.load_state_dict(state)
        method.statistics.load(state["statistics"])
        method.network_buffers.load(state.get("buffers", {}))
        set_extra_state(method, state["extra"])
        method.counters = Counters(**state["counters"])
    method.prediction_before = None


@contextmanager
def restored_on_error(method: Method) -> Iterator[None]:
    """Restore the method if the block raises; a batch refused for its predictions is counted."""
    vector, optimizer = method.weights.snapshot(), clone(method.weights.optimizer_state)
    statistics, buffers = method.statistics.state(), method.network_buffers.values()
    extra = clone(extra_state(method))
    counters, before = replace(method.counters), method.prediction_before
    try:
        yield
    except BaseException as error:
        method.weights.load(vector)
        method.weights.load_optimizer_state(optimizer)
        method.statistics.load(statistics)
        method.network_buffers.load(buffers)
        set_extra_state(method, extra)
        method.counters = counters
        method.counters.refused += isinstance(error, DataError)
        method.prediction_before = before
        raise


def extra_state(method: Method) -> dict[str, Any]:
    """The attributes that `state_spec` names and that are not None."""
    return {name: value for name in method.state_names if (value := getattr(method, name)) is not None}


def set_extra_state(method: Method, values: Mapping[str, Any]) -> None:
    """Set the attributes that `state_spec` names to copies of `values`; missing ones to None."""
    method.reset_state()
    copies = clone(dict(values))
    for name in method.state_names:
        setattr(method, name, copies.get(name))


def network_state(method: Method) -> dict[str, Tensor]:
    """The tensors of the adapted network, with the statistics of the stream where the method keeps them."""
    state = {**method.shared.network.state_dict(), **{name: p.detach() for name, p in method.adapted.items()}}
    for path, norm in method.statistics.norms.items():
        mean, variance = norm.prediction_statistics()
        state[f"{path}.running_mean"], state[f"{path}.running_var"] = mean.detach(), variance.detach()
    return state


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
    """An entry that may be missing, as before the first batch."""

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
    leaves, structure = tree_flatten(tree)
    groups: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            leaves[i] = torch.empty_like(leaf, requires_grad=False)
            copies, originals = groups.setdefault((leaf.device, leaf.dtype), ([], []))
            copies.append(leaves[i])
            originals.append(leaf.detach())
    for copies, originals in groups.values():  # one kernel for all of a kind, where the device has one
        torch._foreach_copy_(copies, originals)
    return tree_unflatten(leaves, structure)


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


class StateModule(nn.Module):
    """A module of buffers that are part of a method's state.

    `STATE` names the tensors, of at least 0 unless `LIMITS` says otherwise.
    """

    STATE: ClassVar[tuple[str, ...]]
    LIMITS: ClassVar[Mapping[str, Mapping[str, float]]] = {}

    def spec(self, names: Iterable[str] | None = None) -> dict[str, Spec]:
        limits = {name: self.LIMITS.get(name, {"least": 0}) for name in names or self.STATE}
        return {name: Array.like(getattr(self, name), **limits[name]) for name in limits}

    @torch.no_grad()
    def load(self, state: dict[str, Tensor]) -> None:
        for name in self.STATE:
            getattr(self, name).copy_(state[name])

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Copies the buffers: those of a module that came from another process are in shared memory."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        for name, buffer in self.named_buffers(recurse=False):
            setattr(self, name, buffer.clone())
