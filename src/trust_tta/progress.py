"""Progress of long-running work: a protocol that the command line implements."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Called by functions that take long."""

    def start(self, total: int | None, what: str) -> None:
        """Begin `total` steps (None: unknown); `what` names them, "" if only their percentage means something."""

    def advance(self, n: int = 1) -> None:
        """Report `n` more steps."""

    def note(self, text: str) -> None:
        """Print a line: a finished cell, an epoch, a skipped file."""

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
