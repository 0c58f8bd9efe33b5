"""A state that was damaged anywhere is refused in one line, before anything is touched."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.methods.networks import LEARNERS, batches, make, run, same, vmamba
from trust_tta.errors import StateError
from trust_tta.methods.registry import list_methods
from trust_tta.methods.state import STATE_FORMAT, Array, Number, Optional, check

KINDS: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in list_methods()} | {
    "tent-sgd": ("tent", {"optimizer": "sgd"}),
    "tent-stream": ("tent", {"statistics": "stream"}),
    "eta-loose": ("eta", {"margin": 0.95, "d_margin": 2.0}),
    "sar-loose": ("sar", {"margin": 0.95, "reset_threshold": 0}),
}


# Their lengths are those of the classes, of the features and of the stream.
FREE = (
    "mean_prediction", "mean_features", "told", "marginal", "scores", "spread", "window", "agreement", "log_p", "votes",
    "evidence",
    "network_share", "error", "class_probs", "images", "kept", "entropies", "coreset",
)  # fmt: skip


def leaves(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths to everything in a nested state, inner nodes included."""
    items: Any = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from leaves(value, (*path, key))


def damages(value: Any, *, free: bool) -> Iterator[Any]:
    """Broken variants of a value of this kind; a `free` tensor may have any length and precision."""
    yield from (object(), "text", None, float("nan"))
    if isinstance(value, Tensor):
        yield value[None]
        if not free:
            yield value[:0] if value.dim() else torch.zeros(3)
            yield torch.cat([value.flatten(), value.flatten()])
            yield value.to(torch.float64 if value.dtype == torch.float32 else torch.float16)
        yield torch.full_like(value, -1) if not value.is_floating_point() else torch.full_like(value, torch.nan)
        yield torch.full_like(value, -1) if not value.is_floating_point() else torch.full_like(value, torch.inf)
        yield torch.empty_like(value, device="meta")
        yield value.reshape(value.shape or 1).to_sparse()
        yield value.to(torch.complex64)
    elif isinstance(value, dict):
        yield {**value, "more": torch.zeros(1)}
        yield list(value.items())
    elif isinstance(value, (int, float)):
        yield from (-1 if value >= 0 else 1j, True, float("inf"), 10**400)


def replaced(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    twin = dict(tree) if isinstance(tree, dict) else list(tree)
    twin[path[0]] = replaced(tree[path[0]], path[1:], value)
    return twin


@pytest.mark.parametrize("kind", KINDS)
def test_damage_anywhere_is_refused_in_one_line_and_changes_nothing(kind: str) -> None:
    name, options = KINDS[kind]
    method = make(name, vmamba(), **options)
    run(method, batches(2))
    before = method.state_dict()
    tried = 0
    for path in list(leaves(before)):
        if path[0] == "adapted" and len(path) > 1 and path[1] not in list(before["adapted"])[:2]:
            continue  # one layer is checked as another
        value = before
        for key in path:
            value = value[key]
        for damage in damages(value, free=path[:1] == ("extra",) and path[-1] in FREE):
            with pytest.raises(StateError) as error:
                method.load_state_dict(replaced(before, path, damage))
            assert "\n" not in str(error.value), path
            tried += 1
    assert tried > 30
    assert same(method.state_dict(), before)
    method.load_state_dict(before)


@pytest.mark.parametrize("name", LEARNERS)
@pytest.mark.parametrize(("moment", "value"), [("step", -1.0), ("step", 0.5), ("exp_avg_sq", -1e-3)])
def test_moments_out_of_range_are_refused(name: str, moment: str, value: float) -> None:
    method = make(name, vmamba())
    state = method.state_dict()
    state["optimizer"][moment].fill_(value)
    with pytest.raises(StateError, match=f"optimizer.{moment} holds values from {value:g}"):
        method.load_state_dict(state)


def test_moments_of_three_numbers_are_refused() -> None:
    """They once corrupted the memory of the process."""
    method = make("tent", vmamba())
    state = method.state_dict()
    state["optimizer"]["exp_avg"] = torch.zeros(3)
    with pytest.raises(StateError, match=r"optimizer.exp_avg has shape \(3,\); \(\d+,\) is wanted"):
        method.load_state_dict(state)


def test_a_negative_moving_variance_is_refused() -> None:
    method = make("bn", vmamba(), statistics="stream")
    state = method.state_dict()
    next(iter(state["statistics"]["variance"].values())).fill_(-1)
    with pytest.raises(StateError, match=r"statistics.variance\..* holds values from -1"):
        method.load_state_dict(state)


def test_another_format_says_what_to_do() -> None:
    method = make("tent", vmamba())
    state = {**method.state_dict(), "format": 3}
    with pytest.raises(StateError, match=f"has format 3 and this version reads format {STATE_FORMAT}; adapt again"):
        method.load_state_dict(state)


@pytest.mark.parametrize("place", ["format", "method"])
@pytest.mark.parametrize("odd", [torch.zeros(0), torch.zeros((), device="meta")], ids=["empty", "meta"])
def test_a_tensor_in_place_of_a_word_is_refused(place: str, odd: Tensor) -> None:
    method = make("tent", vmamba())
    with pytest.raises(StateError, match="this state "):
        method.load_state_dict({**method.state_dict(), place: odd})


def test_the_checker_knows_its_kinds() -> None:
    spec: Any = {"a": Array((None, 2), least=0), "b": Optional(Number(int, least=1)), "c": [Number(float), "x"]}
    check({"a": torch.zeros(3, 2), "c": [0.5, "x"]}, spec)
    check({"a": torch.zeros(0, 2), "b": 1, "c": (0.5, "x")}, spec)
    wrong: dict[str, Any] = {
        r"a has shape \(2,\); \(any, 2\)": {"a": torch.zeros(2), "c": [0.5, "x"]},
        "a is torch.int64; a floating-point type": {"a": torch.zeros(1, 2, dtype=torch.int64), "c": [0.5, "x"]},
        "lacks 'c'": {"a": torch.zeros(1, 2)},
        r"c\[1\] is 'y'; 'x' is wanted": {"a": torch.zeros(1, 2), "c": [0.5, "y"]},
        "c is 1 entries; 2 entries": {"a": torch.zeros(1, 2), "c": [0.5]},
        "b is True; an integer >= 1": {"a": torch.zeros(1, 2), "b": True, "c": [0.5, "x"]},
    }
    for message, state in wrong.items():
        with pytest.raises(StateError, match=message):
            check(state, spec)
