"""The guard's policy: which action follows which alarm; and the record of each decision."""

from __future__ import annotations

import json
import warnings
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

from pydantic import Field, model_validator

from trust_tta.errors import TrustWarning
from trust_tta.schema import Count, Fraction, Schema

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
    "single_image",
    "start",
    "request",
    "storage",
    "merge",
]

REMOVED_OPTIONS = (
    "canary_tolerance",
    "drift_tolerance",
    "reservoir_tolerance",
    "agreement",
    "weight_distance",
    "slowest",
    "keep",
)


class Guard(Schema):
    """Maps alarms to actions.

    Actions: "none", only report; "skip", no update while the alarm lasts, and for an alarm that is raised late, as a
    class shift is, the updates until then are undone; "slow", half as many updates; "rollback", to the last good
    snapshot, and half as many updates; "source", to the source network; "pause", no update until `resume`. A second
    collapse before a new snapshot has proved good always leads to the source.
    """

    on_drift: Action = Field(default="none", description="the images changed: what adaptation is for")
    on_return: Action = Field(default="source", description="a drift is over: what was learned on it is not needed")
    on_class_shift: Action = Field(default="skip", description="only the classes changed: there is nothing to adapt to")
    on_few_classes: Action = Field(default="source", description="only a few classes come: their statistics mislead")
    on_collapse: Action = Field(default="rollback", description="what was learned is wrong")
    on_broken_input: Action = Field(default="skip", description="most images are blank, equal or not finite")

    budget: Fraction = Field(default=0.02, description="share of the method's forward passes spent on monitoring it")
    check_every: Count = Field(default=1024, description="images between two checks of the canary")
    snapshot_every: Count = Field(default=1024, description="images between two snapshots")

    @model_validator(mode="before")
    @classmethod
    def _drop_removed_options(cls, values: Any) -> Any:
        removed = [name for name in REMOVED_OPTIONS if name in values]
        if removed:
            warnings.warn(
                f"Guard has no option {', '.join(removed)} any more, which is ignored; omit it",
                TrustWarning,
                stacklevel=5,
            )
        return {name: value for name, value in values.items() if name not in removed}


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
        """The event as one line of JSON."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, line: str) -> Event:
        return cls(**json.loads(line))
