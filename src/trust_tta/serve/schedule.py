"""What may run next: requests wait in bounded queues, one per stream, and share batches; tasks come before them.

A task has its streams to itself, and so has a batch, unless no batch changes anything: those of one stream may then run
side by side. Not thread-safe: the engine takes care of threads.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from torch import Tensor

from trust_tta.serve.settings import RequestError, Settings

if TYPE_CHECKING:
    from trust_tta.serve.engine import Answer


class Key(NamedTuple):
    """Requests that may share a batch."""

    stream: str
    adapt: bool


@dataclass(eq=False)
class Request:
    """Images (n, ...) that wait for their answer."""

    images: Tensor
    future: Future[Answer] = field(default_factory=Future)
    since: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, eq=False)
class Lot:
    """Requests that run as one batch."""

    key: Key
    requests: list[Request]

    @property
    def streams(self) -> frozenset[str]:
        return frozenset([self.key.stream])


@dataclass(frozen=True, eq=False)
class Task:
    """Something to do while nothing else happens to its streams."""

    do: Callable[[], Any]
    streams: frozenset[str]
    future: Future[Any] = field(default_factory=Future)


Work: TypeAlias = Lot | Task


@dataclass(eq=False)
class _Queue:
    requests: deque[Request] = field(default_factory=deque)
    images: int = 0


class Schedule:
    """Queues, tasks, and what runs. `side_by_side`: batches of one stream need not wait for each other."""

    def __init__(self, settings: Settings, *, side_by_side: bool) -> None:
        self.settings, self.side_by_side = settings, side_by_side
        self.images = 0  # queued
        self.everything = False  # is due, also what could wait for others to join its batch
        self._queues: dict[Key, _Queue] = {}
        self._tasks: list[Task] = []
        self._running: list[Work] = []

    @property
    def waiting(self) -> bool:
        """Whether there is anything that has not begun."""
        return bool(self._queues or self._tasks)

    @property
    def running(self) -> int:
        return len(self._running)

    def add(self, key: Key, request: Request, *, seconds_per_image: float) -> bool:
        """Put a request into the queue of its stream, or refuse it where that is full.

        True if what is due has changed by it. `seconds_per_image` tells when to try again.
        """
        settings, count = self.settings, len(request.images)
        again = 1 + int(self.images * seconds_per_image)
        if self.images + count > settings.most_queued_in_all:
            raise RequestError(
                503, f"{self.images} images are queued, and no more are accepted for now", retry_after=again
            )
        own = sum(queue.images for other in (True, False) if (queue := self._queues.get(Key(key.stream, other))))
        if own + count > settings.most_queued:
            raise RequestError(
                429,
                f"{own} images of the stream '{key.stream}' are queued, and no more are accepted for now",
                retry_after=again,
            )
        queue = self._queues.setdefault(key, _Queue())
        queue.requests.append(request)
        queue.images += count
        self.images += count
        return len(queue.requests) == 1 or queue.images >= settings.batch_size

    def add_task(self, task: Task) -> None:
        self._tasks.append(task)

    def begin(self) -> Work | None:
        """The first task whose streams are free, or the batch that has waited longest of those that are due.

        None if nothing can begin yet. What began holds its streams until `end`.
        """
        work = self._take_task() or self._take_lot()
        if work is not None:
            self._running.append(work)
        return work

    def end(self, work: Work) -> None:
        self._running.remove(work)

    def due(self) -> int:
        """How many batches could begin at once."""
        size = self.settings.batch_size
        return sum(max(1, queue.images // size) if self.side_by_side else 1 for _, queue in self._due())

    def until_due(self) -> float | None:
        """Seconds until a batch is due if nothing else happens; None if none will be."""
        if not (free := [queue.requests[0].since for _, queue in self._free()]):
            return None
        return max(0.0, min(free) + self.settings.max_wait - time.monotonic())

    def _take_task(self) -> Task | None:
        held = {stream for work in self._running for stream in work.streams}
        for place, task in enumerate(self._tasks):
            if held.isdisjoint(task.streams):
                return self._tasks.pop(place)
            held |= task.streams  # a later task may not overtake it
        return None

    def _take_lot(self) -> Lot | None:
        if not (due := [(queue.requests[0].since, key) for key, queue in self._due()]):
            return None
        key = min(due)[1]
        queue, chosen, images = self._queues[key], list[Request](), 0
        while queue.requests and (not chosen or images + len(queue.requests[0].images) <= self.settings.batch_size):
            images += len(queue.requests[0].images)
            chosen.append(queue.requests.popleft())
        queue.images -= images
        self.images -= images
        if not queue.requests:
            del self._queues[key]
        return Lot(key, chosen)

    def _due(self) -> Iterator[tuple[Key, _Queue]]:
        late = time.monotonic() - self.settings.max_wait
        for key, queue in self._free():
            if self.everything or queue.requests[0].since <= late or queue.images >= self.settings.batch_size:
                yield key, queue

    def _free(self) -> Iterator[tuple[Key, _Queue]]:
        """The queues of streams that nothing holds, and that no task waits for."""
        held = {stream for task in self._tasks for stream in task.streams}
        for work in self._running:
            if isinstance(work, Task) or not self.side_by_side:
                held |= work.streams
        return ((key, queue) for key, queue in self._queues.items() if key.stream not in held)
