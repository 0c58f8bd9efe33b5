"""Process pools, and ordered results from threads or processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import TypeVar

from trust_tta.errors import ConfigError, StateError

Task = TypeVar("Task")
Result = TypeVar("Result")


def check_workers(workers: int) -> None:
    """Refuse a number of processes that is not an integer >= 1."""
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        raise ConfigError(f"workers {workers!r} is not possible; give a number of processes >= 1")


@contextmanager
def worker_pool(workers: int) -> Iterator[Executor | None]:
    """A pool of processes, or None where one worker means this process."""
    check_workers(workers)
    if workers == 1:
        yield None
        return
    # spawn: a fork of a process with running threads can hang
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"), initializer=_follow_parent)
    try:
        yield pool
    except BrokenProcessPool as error:
        raise StateError(
            f"one of {workers} worker processes died; use workers=1 or free memory, "
            "and in a script call this under `if __name__ == '__main__':`"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def map_in_order(
    pool: Executor | None, function: Callable[[Task], Result], tasks: Iterable[Task], *, limit: int | None = None
) -> Iterator[Result]:
    """The results of `function` in the order of the tasks; at most `limit` (3 per worker) run or wait at a time."""
    if pool is None:
        yield from map(function, tasks)
        return
    limit = limit or 3 * getattr(pool, "_max_workers", 1)
    waiting: deque[Future[Result]] = deque()
    for task in tasks:
        waiting.append(pool.submit(function, task))
        if len(waiting) >= limit:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def _follow_parent() -> None:
    """Ignore interrupts, which the parent handles, and exit with the parent."""

    def exit_after_parent() -> None:
        if (parent := multiprocessing.parent_process()) is not None:
            parent.join()
            os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=exit_after_parent, daemon=True).start()
