"""What a method remembers: gathered before a batch, saved for another day, checked whole before it is taken back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from trust_tta.errors import DataError, StateError
from trust_tta.methods.state import Number, Optional, Spec, check, clone
from trust_tta.schema import show

if TYPE_CHECKING:
    from torch import Tensor

    from trust_tta.methods.base import Method

STATE_FORMAT = 7
MOST = 2.0**53  # that a counter can have counted


@dataclass
class Counters:
    """What a method has done since it was made or reset."""

    batches: int = 0
    forwards: int = 0
    backwards: int = 0
    updates: int = 0
    skipped: int = 0  # updates refused because the loss or a gradient was not finite
    recoveries: int = 0  # returns to the source that the method itself decided on
    refused: int = 0  # batches refused because their predictions were not finite

    def set(self, other: Counters) -> None:
        vars(self).update(vars(other))


def save(method: Method) -> dict[str, Any]:
    """The whole state as copied tensors and plain values."""
    rest = {"statistics": method.statistics.state(), "extra": moving_values(method)}
    counters = asdict(method.counters)
    return {
        "format": STATE_FORMAT, "method": method.name, **method.weights.state(), **rest, "counters": counters,
    }  # fmt: skip


def network_state(method: Method) -> dict[str, Tensor]:
    """The tensors of the network as it is adapted, with the statistics of the stream where the method follows it."""
    state = {**method.caller.network.state_dict(), **{name: p.detach() for name, p in method.adapted.items()}}
    for path, norm in method.statistics.norms.items():
        mean, variance = norm.used()
        state[f"{path}.running_mean"], state[f"{path}.running_var"] = mean.detach(), variance.detach()
    return state


def shared_by_forks(method: Method) -> dict[int, Any]:
    """What a fork takes as it is, by identity: the source's weights, frozen ones, and the caller's buffers."""
    network = method.caller.network
    shared: list[Tensor] = [*method.weights.source.values(), *network.buffers()]
    # Parameters that the network has only within the method are the method's own.
    frozen = dict(network.named_parameters()).keys() - method.adapted.keys()
    for each in (method.model, network):
        shared += [p for name, p in each.named_parameters() if name in frozen]
    return {id(tensor): tensor for tensor in shared}


def load(method: Method, state: Mapping[str, Any]) -> None:
    """Take back what `save` gave; refused whole if it does not fit."""
    _check(method, state)
    with undone_on_error(method):
        method.weights.load(state)
        method.statistics.load(state["statistics"])
        set_moving_values(method, state["extra"])
        method.counters.set(Counters(**state["counters"]))
    method.coarse_before = None


@contextmanager
def undone_on_error(method: Method) -> Iterator[None]:
    """Bring everything back when what is inside does not come to its end; a batch that was refused is counted."""
    vector, moments = method.weights.read(), clone(method.weights.moments)
    statistics, values = method.statistics.state(), moving_values(method)
    counters, before = replace(method.counters), method.coarse_before
    try:
        yield
    except BaseException as error:
        method.weights.write(vector)
        method.weights.load_moments(moments)
        method.statistics.load(statistics)
        set_moving_values(method, values)
        method.counters.set(counters)
        method.counters.refused += isinstance(error, DataError)
        method.coarse_before = before
        raise


def moving_values(method: Method) -> dict[str, Any]:
    """Copies of the attributes that `moving` names and that have a value."""
    values = {name: getattr(method, name) for name in method.moving()}
    copies: dict[str, Any] = clone({name: value for name, value in values.items() if value is not None})
    return copies


def set_moving_values(method: Method, values: Mapping[str, Any]) -> None:
    """Copies of `values` in place of the method's own; what is missing is None."""
    method.start()
    copies = clone(values)
    for name in method.moving():
        setattr(method, name, copies.get(name))


def _check(method: Method, state: Mapping[str, Any]) -> None:
    if not isinstance(state, Mapping) or "method" not in state or "format" not in state:
        raise StateError(f"this is a {type(state).__name__} and no state; give what state_dict() of a method gave")
    if type(state["format"]) is not int or state["format"] != STATE_FORMAT:
        raise StateError(
            f"this state has format {show(state['format'])} and this version reads format {STATE_FORMAT}; "
            "adapt again from the source, or load it with the version that saved it"
        )
    if not isinstance(state["method"], str) or state["method"] != method.name:
        raise StateError(f"this state is of the method {show(state['method'])}; '{method.name}' takes its own alone")
    if isinstance(state.get("optimizer"), Mapping) and state["optimizer"].keys() != method.weights.moments.keys():
        raise StateError("this state was made with another optimizer; create the method with the same one")
    moving: dict[str, Spec] = {name: Optional(spec) for name, spec in method.moving().items()}
    counters: dict[str, Spec] = {f.name: Number(int, least=0, most=MOST) for f in fields(Counters)}
    rest: dict[str, Spec] = {"statistics": method.statistics.spec(), "extra": moving, "counters": counters}
    check(state, {"format": STATE_FORMAT, "method": method.name, **method.weights.spec(), **rest})
    method.check_state(state)
