"""Roles of parameters. Methods choose what to adapt by role, never by the spelling of a name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["norm", "scan", "projection", "other"]


@dataclass(frozen=True)
class Role:
    """The role of one parameter.

    `norm`: affine weight of a normalization that may be adapted; `scan`: parameters of the recurrence (A, D,
    steps, B, C); `projection`: layers into and out of it; `other`: everything else.
    `last`: belongs to the last stage or to the head.
    """

    kind: Kind
    last: bool = False
