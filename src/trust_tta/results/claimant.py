"""Who holds a cell, and whether that process lives."""

from __future__ import annotations

import os
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Claimant:
    """One open store in one process; `place` tells where its pid means anything, without naming the host."""

    token: str
    pid: int
    born: str | None  # start time of the process in ticks since boot: tells a reused pid apart
    place: str | None  # boot and pid namespace; None where the system does not say

    @classmethod
    def current(cls) -> Claimant:
        """A new claimant for the running process."""
        pid = os.getpid()
        state = _process_state(pid)
        return cls(token=uuid.uuid4().hex, pid=pid, born=state[1] if state else None, place=_place())

    def lives(self) -> bool | None:
        """Whether the process is still there; None where this machine cannot tell."""
        if self.place is None or self.place != _place():
            return None
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        state = _process_state(self.pid)
        if state is None or self.born is None:
            return None
        return state[0] not in "ZX" and state[1] == self.born


def _place() -> str | None:
    # Only Linux: elsewhere signal 0 may end the process, or a pid cannot be tied to a boot.
    if sys.platform != "linux":
        return None
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def _process_state(pid: int) -> tuple[str, str] | None:
    """State letter and start time from /proc, or None where it cannot be read."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    after_name = text.rpartition(")")[2].split()  # the name may itself hold spaces and brackets
    return after_name[0], after_name[19]
