"""States of methods that were changed, and snapshots that were damaged."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from tests.fuzz.harness import Drawn, damaged, edited, edits, fuzz, nothing_written, refusal, values
from tests.fuzz.tensors import odd_tensors
from tests.methods.networks import batches, convnet, make, run, same
from trust_tta.live.snapshots import read_state, write_state
from trust_tta.methods.base import Method
from trust_tta.methods.registry import METHODS

NEEDS_VMAMBA = ("foa", "dpcore", "trust_naive", "trust", "ensemble", "repetition", "augmentation")
OPTIONS: dict[str, dict[str, Any]] = {
    **{name: {} for name in METHODS if name not in NEEDS_VMAMBA},
    "bn stream": {"statistics": "stream"},
    "tent sgd": {"optimizer": "sgd", "statistics": "stream"},
}
BATCHES = batches(2, images=8, size=12)


@cache
def method(kind: str) -> Method:
    """One that has met a batch."""
    made: Method = make(kind.split()[0], convnet(), **OPTIONS[kind])
    run(made, BATCHES[:1])
    return made


@cache
def good_state(kind: str) -> dict[str, Any]:
    return method(kind).state_dict()


@cache
def snapshot(folder: Path) -> bytes:
    write_state(folder / "good.safetensors", good_state("tent"), about={"number": 1})
    return (folder / "good.safetensors").read_bytes()


@fuzz(900, kind=st.sampled_from(sorted(OPTIONS)), changes=edits(values | odd_tensors.map(Drawn)))
def test_odd_values_in_states(folder: Path, kind: str, changes: Any) -> None:
    """A state is taken, and the method goes on with finite predictions, or refused, and nothing was touched."""
    adapting = method(kind)
    adapting.load_state_dict(good_state(kind))
    state = edited(good_state(kind), changes, more=("step", "exp_avg"))
    taken = False
    with refusal():
        adapting.load_state_dict(state)
        taken = True
    if not taken:
        assert same(adapting.state_dict(), good_state(kind))
    with refusal():
        assert bool(adapting(BATCHES[1]).isfinite().all())


@fuzz(200, change=damaged(st.just(b"")), places=st.lists(st.integers(0, 1 << 16), min_size=1, max_size=3))
def test_damaged_snapshots(folder: Path, change: bytes, places: list[int]) -> None:
    content = snapshot(folder)
    for place in places:
        at = place % (len(content) + 1)
        content = content[:at] + change + content[at + max(len(change), 1) :]
    (folder / "snapshot.safetensors").write_bytes(content)
    with nothing_written(folder), refusal():
        read_state(folder / "snapshot.safetensors")
