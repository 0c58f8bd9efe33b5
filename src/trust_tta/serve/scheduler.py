"""The order of work: bounded request queues, one per stream, formed into batches; tasks run before batches.

A task and a batch each have their streams to themselves. Not thread-safe: the engine holds a lock.
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
    from trust_tta.serve.engine import Prediction


class QueueKey(NamedTuple):
    """Requests with the same key may share a batch."""

    stream: str
    adapt: bool


@dataclass(eq=False)
class PredictRequest:
    """Images (n, ...) and the future of their prediction."""

    images: Tensor
    future: Future[Prediction] = field(default_factory=Future)
    since: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, eq=False)
class RequestBatch:
    """Requests that run as one batch."""

    key: QueueKey
    requests: list[PredictRequest]

    @property
    def streams(self) -> frozenset[str]:
        return frozenset([self.key.stream])


@dataclass(frozen=True, eq=False)
class Task:
    """A function to call while nothing else uses its streams."""

    function: Callable[[], Any]
    streams: frozenset[str]
    future: Future[Any] = field(default_factory=Future)


Work: TypeAlias = RequestBatch | Task


@dataclass(eq=False)
class _Queue:
    requests: deque[PredictRequest] = field(default_factory=deque)
    images: int = 0


class Scheduler:
    """Queues, tasks, and what is running. `flush`: run partial batches at once instead of waiting for more requests."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.images = 0  # queued
        self.flush = False
        self._queues: dict[QueueKey, _Queue] = {}
        self._tasks: list[Task] = []
        self._running: list[Work] = []

    @property
    def waiting(self) -> bool:
        """Whether anything has not begun."""
        return bool(self._queues or self._tasks)

    @property
    def running(self) -> int:
        return len(self._running)

    def add(self, key: QueueKey, request: PredictRequest, *, seconds_per_image: float) -> bool:
        """Queue a request, or refuse it where the queue is full; True if a worker should look at the queues again.

        `seconds_per_image` is used to tell a refused client when to try again.
        """
        settings, count = self.settings, len(request.images)
        retry_after = 1 + int(self.images * seconds_per_image)
        if self.images + count > settings.max_queued_total:
            raise RequestError(
                503, f"{self.images} images are queued, and no more are accepted for now", retry_after=retry_after
            )
        own = sum(queue.images for adapt in (True, False) if (queue := self._queues.get(QueueKey(key.stream, adapt))))
        if own + count > settings.max_queued:
            raise RequestError(
                429,
                f"{own} images of the stream '{key.stream}' are queued, and no more are accepted for now",
                retry_after=retry_after,
            )
        queue = self._queues.setdefault(key, _Queue())
        queue.requests.append(request)
        queue.images += count
        self.images += count
        return len(queue.requests) == 1 or queue.images >= settings.batch_size

    def add_task(self, task: Task) -> None:
        self._tasks.append(task)

    def begin(self) -> Work | None:
        """Take the first task whose streams are free, or the due batch that has waited longest; None if there is none.

        It holds its streams until `end`.
        """
        work = self._take_task() or self._take_batch()
        if work is not None:
            self._running.append(work)
        return work

    def end(self, work: Work) -> None:
        self._running.remove(work)

    def due(self) -> int:
        """The number of batches that could begin now."""
        return sum(1 for _ in self._due())

    def until_due(self) -> float | None:
        """Seconds until a batch is due if no request is added; None if none will be."""
        if not (since := [queue.requests[0].since for _, queue in self._free()]):
            return None
        return max(0.0, min(since) + self.settings.max_wait - time.monotonic())

    def _take_task(self) -> Task | None:
        held = {stream for work in self._running for stream in work.streams}
        for place, task in enumerate(self._tasks):
            if held.isdisjoint(task.streams):
                return self._tasks.pop(place)
            held |= task.streams  # a later task may not overtake it
        return None

    def _take_batch(self) -> RequestBatch | None:
        if not (due := [(queue.requests[0].since, key) for key, queue in self._due()]):
            return None
        key = min(due)[1]
        queue, chosen, images = self._queues[key], list[PredictRequest](), 0
        while queue.requests and (not chosen or images + len(queue.requests[0].images) <= self.settings.batch_size):
            images += len(queue.requests[0].images)
            chosen.append(queue.requests.popleft())
        queue.images -= images
        self.images -= images
        if not queue.requests:
            del self._queues[key]
        return RequestBatch(key, chosen)

    def _due(self) -> Iterator[tuple[QueueKey, _Queue]]:
        late = time.monotonic() - self.settings.max_wait
        for key, queue in self._free():
            if self.flush or queue.requests[0].since <= late or queue.images >= self.settings.batch_size:
                yield key, queue

    def _free(self) -> Iterator[tuple[QueueKey, _Queue]]:
        """The queues of streams that no running work holds and no task waits for."""
        held = {stream for work in (*self._tasks, *self._running) for stream in work.streams}
        return ((key, queue) for key, queue in self._queues.items() if key.stream not in held)
