"""What a method costs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Counters:
    """What a method has done since it was made or reset."""

    batches: int = 0
    forwards: int = 0
    backwards: int = 0
    updates: int = 0
    skipped: int = 0  # updates refused because the loss or a gradient was not finite
    recoveries: int = 0  # returns to the source that the method itself decided on
