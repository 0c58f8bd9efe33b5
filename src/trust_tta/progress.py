"""How far a long piece of work has come: one protocol, which only the command line draws."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Told by whoever works, shown by whoever waits."""

    def start(self, total: int | None, what: str) -> None:
        """A stretch of `total` steps begins (None: nobody knows how many); `what` names it in a few words."""

    def advance(self, n: int = 1) -> None:
        """So many more steps are done."""

    def note(self, text: str) -> None:
        """A line worth keeping: a finished cell, an epoch, a file that was skipped."""

    def finish(self) -> None:
        """The stretch is over."""


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
