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
    return Stream(make("tent", lr=1e-3), guard=Guard(check_every=64), **options)


@cache
def snapshot() -> State:
    """Of a stream that has learned, probed and filled its reservoir."""
    stream = open_stream()
    for images in clean(12, seed=2):
        stream(images)
    state = {"method": stream.method.state_dict(), **stream._session.state()}
    assert all(state["watch"]["monitors"][name] for name in ("inputs", "latest", "served", "probes", "opinions"))
    assert state["watch"]["reservoir"]["classes"]
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


WINDOWS = ("watch", "monitors")
HOSTILE = {
    "counter of another type": put("books", "batches", "x"),
    "counter that is a float": put("books", "images", 3.0),
    "counter that is a bool": put("books", "events", True),
    "flag that is a number": put("books", "paused", 1),
    "negative counter": put("books", "updates", -1),
    "huge counter": put("books", "images", 10**30),
    "counter not finite": put("books", "peak_distance", float("nan")),
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
    "unknown action": put("lasting", {"drift": "explode"}),
    "action is a list": put("lasting", {"drift": ["skip"]}),
    "monitor is missing": drop("watch"),
    "monitor is a list": put("watch", [1, 2]),
    "part of the monitor is missing": drop("watch", "learns"),
    "unknown part of the monitor": put("watch", "more", 1),
    "budget is a string": put("watch", "credit", "1"),
    "budget not finite": put("watch", "credit", float("inf")),
    "endless probes": put("watch", "doubt", 10**9),
    "distance is a tensor": put("watch", "distance", torch.zeros(2)),
    "windows are None": put("watch", "monitors", None),
    "unknown window": put(*WINDOWS, "more", []),
    "window is a dict": put(*WINDOWS, "served", {}),
    "window of numbers": put(*WINDOWS, "served", [1, 2]),
    "window of an empty batch": put(*WINDOWS, "served", [[0, torch.ones(6, dtype=torch.float64)]]),
    "window of other sums": put(*WINDOWS, "served", [[1, torch.zeros(6, dtype=torch.float64)]]),
    "window of negative shares": put(*WINDOWS, "served", [[1, torch.tensor([2.0, -1.0], dtype=torch.float64)]]),
    "window of integers": put(*WINDOWS, "inputs", [[1, torch.ones(2, 12, dtype=torch.int64)]]),
    "window not finite": put(*WINDOWS, "inputs", [[1, torch.full((2, 12), torch.nan, dtype=torch.float64)]]),
    "window of another dimension": put(*WINDOWS, "inputs", [[1, torch.ones(24, dtype=torch.float64)]]),
    "window of several shapes": put(*WINDOWS, "inputs", [[1, torch.ones(2, n, dtype=torch.float64)] for n in (3, 4)]),
    "endless window": put(*WINDOWS, "latest", [[1, torch.ones(2, 1, dtype=torch.float64)]] * 5000),
    "probes of zeros": put(*WINDOWS, "probes", [[1, torch.zeros(14, dtype=torch.float64)]]),
    "probes of an odd length": put(*WINDOWS, "probes", [[1, torch.ones(5, dtype=torch.float64)]]),
    "comparisons that are too short": put(*WINDOWS, "opinions", [[1, torch.ones(3, dtype=torch.float64)]]),
    "reservoir is None": put("watch", "reservoir", None),
    "reservoir without images": put("watch", "reservoir", "images", None),
    "reservoir of floats": put("watch", "reservoir", "images", torch.zeros(1, 3, 12, 12)),
    "reservoir of other images": put(
        "watch", "reservoir", {"images": torch.ones(1, 7, 12, 12, dtype=torch.half), "classes": [0]}
    ),
    "reservoir not finite": put(
        "watch", "reservoir", {"images": torch.full((1, 3, 12, 12), torch.inf, dtype=torch.half), "classes": [0]}
    ),
    "reservoir with classes that are no integers": put("watch", "reservoir", "classes", ["a"]),
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
    """Their counters had other names, and their monitors fewer parts."""
    state = copy.deepcopy(snapshot())
    counters = state["books"]
    for new, old in {
        "good_snapshot": "good",
        "candidate_snapshot": "candidate",
        "last_snapshot": "snapshot",
        "peak_distance": "farthest",
        "update_interval": "slow",
        "update_delay": "wait",
    }.items():
        counters[old] = counters.pop(new)
    counters |= {"attentive": 52, "slow": 4, "wait": 3}
    del state["watch"]["differed"], state["watch"]["doubted"], state["watch"]["monitors"]["opinions"]
    write_state(tmp_path / "old", state, about={})
    stream = open_stream()
    stream.load(tmp_path / "old")
    assert states_equal(stream.method.state_dict(), snapshot()["method"])
    assert (stream.batches, stream._session.counters.update_interval) == (12, 4)
    assert [stream(images).adapted for images in clean(4, seed=6)] == [False, False, False, True]


def test_a_snapshot_of_a_calibrated_stream_is_taken_by_another(tmp_path: Path) -> None:
    first = open_stream(reference=reference("tent"))
    for images in clean(12, seed=2):
        first(1.5 * images + 1)
    write_state(tmp_path / "a", {"method": first.method.state_dict(), **first._session.state()}, about={})
    second = open_stream(reference=reference("tent"))
    second.load(tmp_path / "a")
    images = clean(1, seed=9)[0]
    assert torch.equal(first(images).logits, second(images).logits)
