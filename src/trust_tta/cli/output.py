"""Output of commands: lines, progress, and checks that output paths can be written."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Self, TextIO

from trust_tta.atomic import remove_stale
from trust_tta.errors import TrustError
from trust_tta.progress import Progress
from trust_tta.report.text import printable

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

LINE_SECONDS = 5.0  # between lines of progress where there is no terminal


def say(text: str = "", *, stream: TextIO | None = None) -> None:
    """Print a line without control characters; all commands print through this function."""
    print(printable(text), file=stream, flush=True)


def writable_folder(flag: str, path: str | os.PathLike[str]) -> Path:
    """Refuse a folder that cannot be written or created; removes temporary files of killed runs."""
    folder = Path(path).expanduser()
    _try(f"{flag} {path}", folder)
    return folder


def writable_file(flag: str, path: str | os.PathLike[str]) -> Path:
    """Refuse a path where no file can be written."""
    file = Path(path).expanduser()
    if file.exists() and not file.is_file():
        raise TrustError(f"{flag} {path}: this is a folder or a device; give the name of a file")
    if file.exists() and not os.access(file, os.W_OK):
        raise TrustError(f"{flag} {path}: the file cannot be written; give another, or change its permissions")
    _try(f"{flag} {path}", file.absolute().parent)
    return file


def _try(what: str, folder: Path) -> None:
    nearest = next(parent for parent in (folder, *folder.absolute().parents) if os.path.lexists(parent))
    if not nearest.is_dir():
        raise TrustError(f"{what}: '{nearest}' is not a folder; give another")
    try:
        with tempfile.TemporaryFile(dir=nearest, prefix=".", suffix=".tmp"):
            pass
    except OSError as error:
        raise TrustError(f"{what}: '{nearest}' cannot be written ({error.strerror}); give another") from error
    if nearest == folder:
        remove_stale(folder)


class ProgressDisplay(Progress):
    """A context manager that shows progress on stderr and notes on stdout, and calls `on_note` after each note."""

    def __init__(
        self,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        on_note: Callable[[], None] | None = None,
    ) -> None:
        self._on_note = on_note
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._bars: Bars | None = None
        self._task: TaskID | None = None
        self._total: int | None = None
        self._what: str | None = None  # None: not started
        self._done = 0
        self._begun = self._last = 0.0
        self._first: tuple[float, int] | None = None  # when the first steps were done, and how many

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.finish()

    def start(self, total: int | None, what: str) -> None:
        self.finish()
        self._total, self._what, self._done = total, what, 0
        self._begun = self._last = self._clock()
        self._first = None
        if self._stream.isatty():
            from rich import progress
            from rich.console import Console

            self._bars = progress.Progress(
                progress.TextColumn("{task.description}", markup=False),
                progress.BarColumn(),
                progress.MofNCompleteColumn() if what else progress.TaskProgressColumn(),
                progress.TimeElapsedColumn(),
                progress.TimeRemainingColumn(),
                console=Console(file=self._stream),
                transient=True,
                redirect_stdout=sys.stdout.isatty(),  # stdout in a file or pipe must stay there
            )
            self._bars.start()
            self._task = self._bars.add_task(what, total=total)

    def advance(self, n: int = 1) -> None:
        self._done += n
        if n and self._first is None:
            self._first = self._clock(), self._done
        if self._bars is not None and self._task is not None:
            self._bars.advance(self._task, n)
        elif self._what is not None and self._clock() - self._last >= LINE_SECONDS:
            self._last = self._clock()
            say(self._line(), stream=self._stream)

    def note(self, text: str) -> None:
        say(text)
        if self._on_note is not None:
            self._on_note()

    def finish(self) -> None:
        if self._bars is not None:
            self._bars.stop()
        self._bars = self._task = self._what = None

    def _line(self) -> str:
        """`training: 12 of 40, 31 s, about 73 s left`, or `48 %, about 78 s left`, at the rate since the first step."""
        if self._what:
            count = f"{self._done} of {self._total}" if self._total else str(self._done)
            line = f"{self._what}: {count}, {self._last - self._begun:.0f} s"
        else:
            line = f"{100 * self._done // max(1, self._total or 1)} %"
        since, before = self._first or (0.0, self._done)
        if self._total is None or self._done == before:
            return line
        left = (self._last - since) * (self._total - self._done) / (self._done - before)
        return f"{line}, about {left:.0f} s left"
