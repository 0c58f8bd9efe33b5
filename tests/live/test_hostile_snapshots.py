"""Hostile snapshots are refused in one line, before weights, counters, alarms or windows change."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.live.test_guard import reference
from tests.live.toys import clean, make, states_equal
from trust_tta.errors import StateError
from trust_tta.live.guard import Guard
from trust_tta.live.snapshots import read_state, write_state
from trust_tta.live.stream import Stream

State = dict[str, Any]


def open_stream(**options: Any) -> Stream:
    return Stream(make("tent", lr=1e-3), guard=Guard(snapshot_every=64), **options)


@cache
def snapshot() -> State:
    """Of a stream that has learned, and compared its predictions."""
    stream = open_stream()
    for images in clean(12, seed=2):
        stream(images)
    stream(clean(1, size=7)[0])
    state = {"method": stream.method.state_dict(), **stream._session.state()}
    comparison = state["watch"]["comparison"]
    assert comparison["window"]
    assert len(comparison["pending"])
    return state


def put(*path: Any) -> Callable[[State], None]:
    """Set the value at a path of keys, the last of which is the value."""

    def change(state: State) -> None:
        *keys, last, value = path
        for key in keys:
            state = state[key]
        state[last] = value

    return change


def drop(*path: Any) -> Callable[[State], None]:
    def change(state: State) -> None:
        for key in path[:-1]:
            state = state[key]
        del state[path[-1]]

    return change


COMPARISON = ("watch", "comparison")
ONES = torch.ones(15, dtype=torch.float64)
HOSTILE = {
    "counter of another type": put("books", "batches", "x"),
    "counter that is a float": put("books", "images", 3.0),
    "counter that is a bool": put("books", "events", True),
    "flag that is a number": put("books", "paused", 1),
    "negative counter": put("books", "updates", -1),
    "huge counter": put("books", "images", 10**30),
    "unknown counter": put("books", "more", 1),
    "endless delay": put("books", "update_delay", 10**9),
    "endless delay, as earlier versions name it": put("books", "wait", 10**9),
    "endless interval": put("books", "update_interval", 10**9),
    "counters are a list": put("books", [1]),
    "counters are missing": drop("books"),
    "method is missing": drop("method"),
    "method is None": put("method", None),
    "alarms are None": put("lasting", None),
    "alarms are missing": drop("lasting"),
    "unknown alarm": put("lasting", {"x": "skip"}),
    "unknown action": put("lasting", {"broken_input": "explode"}),
    "action is a list": put("lasting", {"broken_input": ["skip"]}),
    "monitor is missing": drop("watch"),
    "monitor is a list": put("watch", [1, 2]),
    "part of the monitor is missing": drop("watch", "spent"),
    "unknown part of the monitor": put("watch", "more", 1),
    "budget is a string": put("watch", "credit", "1"),
    "budget not finite": put("watch", "credit", float("inf")),
    "negative cost": put("watch", "spent", -1.0),
    "credit is not a number": put("watch", "credit", float("nan")),
    "passes are a float": put("watch", "step_passes", 1.0),
    "compared batches are negative": put(*COMPARISON, "batches", -1),
    "amount is a tensor": put("watch", "allowance", torch.zeros(2)),
    "comparison is None": put(*COMPARISON, None),
    "part of the comparison is missing": drop(*COMPARISON, "test"),
    "unknown part of the comparison": put(*COMPARISON, "more", []),
    "total not finite": put(*COMPARISON, "total", float("nan")),
    "endless changes": put(*COMPARISON, "changes", [True] * 100),
    "few classes is a number": put(*COMPARISON, "few_classes", 1),
    "test is a list": put(*COMPARISON, "test", [1]),
    "test of infinite wealth": put(*COMPARISON, "test", "wealth", [float("inf")] * 3),
    "test of another number of stakes": put(*COMPARISON, "test", "wealth", [0.0]),
    "e-value is a string": put(*COMPARISON, "test", "e_value", "9"),
    "window is a dict": put(*COMPARISON, "window", {}),
    "window of numbers": put(*COMPARISON, "window", [1, 2]),
    "window of an empty batch": put(*COMPARISON, "window", [[0, ONES]]),
    "window of zeros": put(*COMPARISON, "window", [[1, 0 * ONES]]),
    "window of negative counts": put(*COMPARISON, "window", [[1, -ONES]]),
    "window of integers": put(*COMPARISON, "window", [[1, ONES.long()]]),
    "window not finite": put(*COMPARISON, "window", [[1, ONES * torch.nan]]),
    "window of another dimension": put(*COMPARISON, "window", [[1, ONES[None]]]),
    "window of an even length": put(*COMPARISON, "window", [[1, ONES[:14]]]),
    "window of several shapes": put(*COMPARISON, "window", [[1, ONES], [1, ONES[:13]]]),
    "endless window": put(*COMPARISON, "window", [[1, ONES]] * 5000),
    "endless pending predictions": put(*COMPARISON, "pending", torch.ones(32, 3, dtype=torch.float64)),
    "pending predictions of negative classes": put(*COMPARISON, "pending", -torch.ones(1, 3, dtype=torch.float64)),
    "pending predictions are a list": put(*COMPARISON, "pending", [[1, 2, 3]]),
    "window of another number of features": put("watch", "served", [[1, torch.ones(3, dtype=torch.float64)]]),
}


@pytest.fixture(scope="module")
def stream() -> Stream:
    stream = open_stream()
    for images in clean(3, seed=5):
        stream(images)
    return stream


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_snapshot_is_refused_whole(kind: str, stream: Stream, tmp_path: Path) -> None:
    hostile = copy.deepcopy(snapshot())
    HOSTILE[kind](hostile)
    write_state(tmp_path / "hostile", hostile, about={})
    before = {"method": stream.method.state_dict(), **stream._session.state()}
    before["books"]["last_snapshot"] += 1  # written before each request
    before["books"]["since_snapshot"] = 0
    with pytest.raises(StateError) as refused:
        stream.load(tmp_path / "hostile")
    assert "\n" not in str(refused.value)
    assert states_equal(before, {"method": stream.method.state_dict(), **stream._session.state()})


@pytest.mark.parametrize("levels", [100, 3000, 100_000])
def test_deep_nesting_is_refused(levels: int, stream: Stream, tmp_path: Path) -> None:
    import hashlib
    import json

    from safetensors.torch import save

    tree = '{"list":[' * levels + "1" + "]}" * levels
    header = json.dumps({"format": 1, "about": {}})[:-1] + f', "tree": {tree}}}'
    metadata = {"trust_tta": header, "sha256": hashlib.sha256(header.encode()).hexdigest()}
    (tmp_path / "deep").write_bytes(save({}, metadata))
    with pytest.raises(StateError, match=r"is nested deeper|cannot be read"):
        stream.load(tmp_path / "deep")


@pytest.mark.parametrize(
    "tree", [[1], "x", {"list": [1]}, {"dict": [[{"list": []}, 1]]}, {"dict": 3}, {"what": 1, "else": 2}]
)
def test_what_is_no_state_of_a_stream_is_refused(tree: Any, stream: Stream, tmp_path: Path) -> None:
    import hashlib
    import json

    from safetensors.torch import save

    header = json.dumps({"format": 1, "about": {}, "tree": tree})
    metadata = {"trust_tta": header, "sha256": hashlib.sha256(header.encode()).hexdigest()}
    (tmp_path / "odd").write_bytes(save({}, metadata))
    with pytest.raises(StateError, match=r"the snapshot .*"):
        stream.load(tmp_path / "odd")


def test_a_hostile_snapshot_in_the_folder_is_refused_at_the_start(tmp_path: Path) -> None:
    open_stream(snapshots=tmp_path).close()
    newest = max(tmp_path.glob("snapshot-*"))
    state, about = read_state(newest)
    state["books"]["batches"] = "x"
    write_state(newest, state, about=about)
    with pytest.raises(StateError, match="the snapshot's batches is 'x'"):
        open_stream(snapshots=tmp_path)


def test_snapshots_of_earlier_versions_are_read(tmp_path: Path) -> None:
    """Their counters had other names, and their monitor held windows of other statistics; the test begins anew."""
    state = copy.deepcopy(snapshot())
    counters = state["books"]
    for new, old in {
        "good_snapshot": "good",
        "candidate_snapshot": "candidate",
        "last_snapshot": "snapshot",
        "update_interval": "slow",
        "update_delay": "wait",
    }.items():
        counters[old] = counters.pop(new)
    for name in ("leading_since", "led"):
        del counters[name]
    counters |= {"attentive": 52, "slow": 4, "wait": 3, "peak_distance": 0.5, "collapsed": True, "since_check": 7}
    state["lasting"] = {"drift": "none", "class_shift": "skip"}
    state["watch"] = {"monitors": {"inputs": []}, "reservoir": {"images": None, "classes": []}, "credit": 3.0}
    write_state(tmp_path / "old", state, about={})
    stream = open_stream()
    stream.load(tmp_path / "old")
    assert states_equal(stream.method.state_dict(), snapshot()["method"])
    assert (stream.batches, stream._session.counters.update_interval) == (13, 4)
    assert [stream(images).adapted for images in clean(4, seed=6)] == [False, False, False, True]


def test_a_snapshot_with_the_comparison_before_pairs_is_read(tmp_path: Path) -> None:
    """It had a window more, and a budget without debts; the test begins anew."""
    state = copy.deepcopy(snapshot())
    state["books"]["doubtful"] = 3
    for name in ("step_passes", "allowance"):
        del state["watch"][name]
    state["watch"]["surprised"] = False
    comparison = state["watch"]["comparison"]
    comparison["recent"] = []
    del comparison["batches"]
    write_state(tmp_path / "old", state, about={})
    stream = open_stream()
    stream.load(tmp_path / "old")
    assert states_equal(stream.method.state_dict(), snapshot()["method"])
    assert stream(clean(1, seed=6)[0]).logits.isfinite().all()


def test_a_snapshot_of_a_calibrated_stream_is_taken_by_another(tmp_path: Path) -> None:
    first = open_stream(reference=reference("tent"))
    for images in clean(12, seed=2):
        first(1.5 * images + 1)
    write_state(tmp_path / "a", {"method": first.method.state_dict(), **first._session.state()}, about={})
    second = open_stream(reference=reference("tent"))
    second.load(tmp_path / "a")
    images = clean(1, seed=9)[0]
    assert torch.equal(first(images).logits, second(images).logits)
