"""Counters of a stream: everything a restart needs besides the method's state and the guard's comparison."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from trust_tta.errors import StateError
from trust_tta.live.snapshots import check_number
from trust_tta.schema import show

MAX_UPDATE_INTERVAL = 64  # batches per update, after repeated alarms

# Names in snapshots of earlier versions; None: no longer needed.
_OLD_NAMES: Mapping[str, str | None] = {
    "good": "good_snapshot",
    "candidate": "candidate_snapshot",
    "snapshot": "last_snapshot",
    "slow": "update_interval",
    "wait": "update_delay",
    **dict.fromkeys(("attentive", "doubtful", "farthest", "peak_distance", "since_check", "collapsed", "returned")),
}


@dataclass
class StreamCounters:
    """Plain values only; `vars` of it is part of every snapshot."""

    batches: int = 0
    images: int = 0
    events: int = 0
    updates: int = 0  # since the state was last restored
    restored_at: int = 0  # batch after which that was
    at_source: bool = True  # nothing has been learned, or all of it was undone
    since_snapshot: int = 0  # images
    good_snapshot: int = 0  # number of the last good snapshot
    candidate_snapshot: int = 0  # number of the one that becomes good if nothing happens; 0: none
    last_snapshot: int = 0  # number of the last one written
    paused: bool = False
    leading_since: int = 0  # batch since which the source has had more weight; 0: it has not
    led: int = 0  # images that it has predicted alone since
    update_interval: int = 1  # update on every n-th batch
    update_delay: int = 0  # batches until the next update

    def take_turn(self) -> bool:
        """Whether this batch is an update; counts it."""
        due = self.update_delay == 0
        self.update_delay = self.update_interval - 1 if due else self.update_delay - 1
        return due

    def halve_update_rate(self) -> None:
        self.update_interval = min(2 * self.update_interval, MAX_UPDATE_INTERVAL)
        self.update_delay = self.update_interval - 1

    def double_update_rate(self) -> None:
        self.update_interval = max(1, self.update_interval // 2)
        self.update_delay = min(self.update_delay, self.update_interval - 1)

    @classmethod
    def from_state(cls, state: Any) -> StreamCounters:
        """Counters of a snapshot, also of an earlier version; refused if a name, type or value is not allowed."""
        if not isinstance(state, Mapping):
            raise StateError(f"the snapshot's counters are a {type(state).__name__}; a dict is wanted")
        current: dict[Any, Any] = {_OLD_NAMES.get(name, name): value for name, value in state.items()}
        current.pop(None, None)
        kinds = {field.name: type(field.default) for field in fields(cls)}
        for name, value in current.items():
            if name not in kinds:
                raise StateError(f"the snapshot has an unknown counter {show(name)}; is it of a later version?")
            check_number(value, name, kinds[name])
        counters = cls(**current)
        check_number(counters.update_interval, "update_interval", int, low=1, high=MAX_UPDATE_INTERVAL)
        check_number(counters.update_delay, "update_delay", int, high=counters.update_interval - 1)
        return counters
