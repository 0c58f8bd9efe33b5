"""The policy from alarms to actions, and the record of each decision."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

from pydantic import Field

from trust_tta.schema import Count, Fraction, Positive, Schema

Action: TypeAlias = Literal["none", "skip", "slow", "rollback", "source", "pause"]
EventKind: TypeAlias = Literal[
    "drift",
    "drift_over",
    "class_shift",
    "class_shift_over",
    "few_classes",
    "few_classes_over",
    "collapse",
    "broken_input",
    "start",
    "request",
    "storage",
    "merge",
]


class Guard(Schema):
    """The policy from alarms to actions.

    Actions: "none", only report it; "skip", no update while the alarm lasts, and where it shows late, as a class shift
    does, the updates until then are undone; "slow", half as many updates; "rollback", to the last good snapshot, and
    half as many updates; "source", to the source network; "pause", no update until `resume`. A second collapse before a
    new snapshot has proved good always leads to the source.
    """

    on_drift: Action = Field(default="none", description="the images changed: what adaptation is for")
    on_return: Action = Field(
        default="source", description="a drift is over: what was learned on it is no longer needed"
    )
    on_class_shift: Action = Field(default="skip", description="only the classes changed: there is nothing to adapt to")
    on_few_classes: Action = Field(default="source", description="only a few classes come: their statistics mislead")
    on_collapse: Action = Field(default="rollback", description="what was learned is wrong")
    on_broken_input: Action = Field(default="skip", description="most images are blank, equal or not finite")

    budget: Fraction = Field(default=0.02, description="share of the method's work that may be spent on watching it")
    check_every: Count = Field(default=1024, description="images between two checks of the canary")
    canary_tolerance: Fraction = Field(default=0.05, description="by how much the score on the canary may fall")
    drift_tolerance: Fraction = Field(
        default=0.25, description="the same while the images differ from a calibrated reference"
    )
    reservoir_tolerance: Fraction = Field(
        default=0.15, description="the same for a canary taken from the stream itself"
    )
    agreement: Fraction = Field(
        default=0.6, description="agreement with the source below which learning counts as wrong"
    )
    weight_distance: Positive = Field(
        default=4.0, description="relative norm of what was learned above which it does too"
    )
    slowest: Count = Field(default=64, description="batches per update, at most, after repeated collapses")
    snapshot_every: Count = Field(default=1024, description="images between two snapshots")
    keep: Count = Field(default=4, description="snapshots to keep in addition to the last good one")


@dataclass(frozen=True)
class Event:
    """A decision and its evidence, as plain values. `batch`: in the stream; `time`: in seconds since 1970."""

    number: int
    batch: int
    time: float
    kind: EventKind
    action: str
    reason: str
    evidence: dict[str, Any]

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, line: str) -> Event:
        return cls(**json.loads(line))


@dataclass(frozen=True)
class Pace:
    """How often to update: on every `slow`-th batch, after `wait` more batches."""

    slow: int = 1
    wait: int = 0

    def step(self) -> Pace:
        """After a batch that could have been an update."""
        return Pace(slow=self.slow, wait=self.wait - 1 if self.wait else self.slow - 1)

    def slower(self, slowest: int) -> Pace:
        slow = min(2 * self.slow, slowest)
        return Pace(slow=slow, wait=slow - 1)

    def faster(self) -> Pace:
        slow = max(1, self.slow // 2)
        return Pace(slow=slow, wait=min(self.wait, slow - 1))
