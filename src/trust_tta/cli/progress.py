"""Progress on stderr: a bar where there is a terminal, a plain line every five seconds where there is none."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import Protocol, TextIO, TypeVar

Item = TypeVar("Item")

INTERVAL = 5.0  # seconds between plain lines


class Advance(Protocol):
    """Say that `steps` more are done; `note` is what to show beside the count."""

    def __call__(self, steps: int = 1, note: str = "") -> None: ...


@contextmanager
def progress(total: int | None, label: str) -> Iterator[Advance]:
    """Show progress towards `total` steps (None: unknown) while the block calls what it is given."""
    if not sys.stderr.isatty():
        yield plain_lines(total, label, sys.stderr, time.monotonic)
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bars = Progress(
        *columns,
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=sys.stdout.isatty(),  # a redirected output stays where the user sent it
    )
    with bars:
        task = bars.add_task(label, total=total)

        def advance(steps: int = 1, note: str = "") -> None:
            bars.update(task, advance=steps, description=f"{label} {note}" if note else label)

        yield advance


def track(items: Iterable[Item], label: str, *, total: int | None = None) -> Iterator[Item]:
    """Hand on `items` and show how many are done."""
    if total is None and isinstance(items, Sized):
        total = len(items)
    with progress(total, label) as advance:
        for item in items:
            yield item
            advance()


def plain_lines(total: int | None, label: str, stream: TextIO, clock: Callable[[], float]) -> Advance:
    """Lines `label: 12 of 40, 31 s, about 73 s left, note`, at most one every INTERVAL seconds of `clock`."""
    start = last = clock()
    done = 0

    def advance(steps: int = 1, note: str = "") -> None:
        nonlocal done, last
        done += steps
        now = clock()
        if now - last < INTERVAL:
            return
        last = now
        parts = [f"{done} of {total}" if total else str(done), f"{now - start:.0f} s"]
        if total and done:
            parts.append(f"about {(now - start) * (total - done) / done:.0f} s left")
        print(f"{label}:", ", ".join([*parts, note] if note else parts), file=stream, flush=True)

    return advance
