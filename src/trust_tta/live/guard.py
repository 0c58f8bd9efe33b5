"""Options of the guard, and the record of each decision."""

from __future__ import annotations

import json
import warnings
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, model_validator

from trust_tta.errors import TrustWarning
from trust_tta.schema import Count, Fraction, Schema

Action: TypeAlias = Literal["none", "skip", "rollback", "source", "pause"]
EventKind: TypeAlias = Literal[
    "alarm",
    "change",
    "source_leads",
    "source_leads_over",
    "few_classes",
    "few_classes_over",
    "broken_input",
    "single_image",
    "start",
    "request",
    "storage",
]

# Options of earlier versions, and what to do instead.
REMOVED_OPTIONS = {
    "on_collapse": "on_alarm replaces it",
    "check_every": "every batch is checked within the budget",
} | dict.fromkeys(
    (
        *("on_drift", "on_return", "on_class_shift", "on_few_classes", "on_broken_input"),
        *("canary_tolerance", "drift_tolerance", "reservoir_tolerance", "agreement", "weight_distance"),
        *("slowest", "keep"),
    ),
    "alpha replaces it",
)


class Guard(Schema):
    """Compares the adapted network with the source, mixes their predictions, and undoes harmful adaptation.

    `alpha`: on a stream where adaptation does no harm, an alarm is ever raised with at most this probability.
    `on_alarm`: "rollback", to the last good snapshot, and for a second alarm before another one has proved good, to the
    source; "source"; "pause", no update until `resume`; "none", only report.
    """

    alpha: Annotated[float, Field(gt=0, lt=1)] = Field(
        default=0.01, description="probability of ever raising an alarm where adaptation does no harm"
    )
    budget: Fraction = Field(default=0.1, description="share of the method's passes that comparing it may add")
    snapshot_every: Count = Field(default=1024, description="images between two snapshots")
    on_alarm: Literal["rollback", "source", "pause", "none"] = Field(
        default="rollback", description="the test is certain that adaptation harms"
    )

    @model_validator(mode="before")
    @classmethod
    def _drop_removed_options(cls, values: Any) -> Any:
        removed = [name for name in REMOVED_OPTIONS if name in values]
        if removed:
            reasons = "; ".join(f"{name} ({REMOVED_OPTIONS[name]})" for name in removed)
            warnings.warn(f"removed options of Guard are ignored: {reasons}", TrustWarning, stacklevel=5)
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
