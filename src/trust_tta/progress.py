"""Progress of long-running work: one protocol, which only the command line draws."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Called by functions that take long."""

    def start(self, total: int | None, what: str) -> None:
        """Begin `total` steps (None: unknown); `what` names them in a few words."""

    def advance(self, n: int = 1) -> None:
        """Report `n` more steps."""

    def note(self, text: str) -> None:
        """A line to keep: a finished cell, an epoch, a file that was skipped."""

    def finish(self) -> None:
        """End the steps."""


class Silent:
    """Shows nothing."""

    def start(self, total: int | None, what: str) -> None:
        pass

    def advance(self, n: int = 1) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def finish(self) -> None:
        pass


SILENT: Progress = Silent()
