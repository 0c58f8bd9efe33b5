"""Progress of long-running work, which the command line shows."""

from __future__ import annotations


class Progress:
    """Called by functions that take long; this one shows nothing."""

    def start(self, total: int | None, what: str) -> None:
        """Begin `total` steps (None: unknown); `what` names them, "" to show only a percentage."""

    def advance(self, n: int = 1) -> None:
        """Report `n` more steps."""

    def note(self, text: str) -> None:
        """Print a line: a finished cell, an epoch, a skipped file."""

    def finish(self) -> None:
        """End the steps."""


SILENT = Progress()
