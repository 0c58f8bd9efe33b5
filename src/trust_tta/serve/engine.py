"""One thread runs the network; requests wait in bounded queues, one per stream, and share batches."""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trust_tta.live.session import Result
from trust_tta.live.stream import Stream
from trust_tta.serve.pool import Pool
from trust_tta.serve.settings import RequestError, Settings

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Answer:
    """The answer to one request; image i has the id `<id>-<i>`.

    `output` (n, classes, ...): logits, or probabilities where the method gives these; the other is computed when asked
    for.
    """

    id: str
    output: NDArray[np.float32]
    adapted: bool
    gives_probabilities: bool = False

    @property
    def logits(self) -> NDArray[np.float32]:
        return np.log(np.maximum(self.output, 1e-12)) if self.gives_probabilities else self.output

    @property
    def probabilities(self) -> NDArray[np.float32]:
        return self.output if self.gives_probabilities else torch.from_numpy(self.output).softmax(1).numpy()

    @property
    def ids(self) -> list[str]:
        return [f"{self.id}-{row}" for row in range(len(self.output))]


class Batch(NamedTuple):
    """One pass of the network: the images (n, c, h, w) of all its requests, in order."""

    stream: Stream
    name: str
    images: Tensor
    answers: list[Answer]
    result: Result
    seconds: float


@dataclass(eq=False)
class _Waiting:
    images: Tensor
    since: float
    future: Future[Answer] = field(default_factory=Future)


class Key(NamedTuple):
    """Requests that may share a batch."""

    stream: str
    adapt: bool


class Engine:
    """Runs the batch that has waited longest among those that are full or due; tasks of `ask` come first.

    `on_batch` is called with every batch, in the engine's thread, before its requests are answered.
    """

    def __init__(self, pool: Pool, settings: Settings, on_batch: Callable[[Batch], None]) -> None:
        self.pool, self.settings, self._on_batch = pool, settings, on_batch
        self._queues: dict[Key, deque[_Waiting]] = {}
        self._tasks: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._changed = threading.Condition()
        self._images = 0  # queued
        self._seconds_per_image = 0.01
        self._draining = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def queued(self) -> int:
        """The number of queued images."""
        return self._images

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._draining

    def submit(self, stream: str, images: Tensor, *, adapt: bool) -> Future[Answer]:
        """Put images (n, c, h, w) into the queue of a stream; refused where it is full."""
        key, waiting = Key(stream, adapt), _Waiting(images, time.monotonic())
        with self._changed:
            if self._draining:
                raise RequestError(503, "the service is stopping", retry_after=5)
            own = sum(len(w.images) for adapts in (True, False) for w in self._queues.get(Key(stream, adapts), ()))
            again = 1 + int(self._images * self._seconds_per_image)
            if self._images + len(images) > self.settings.most_queued_in_all:
                raise RequestError(
                    503, f"{self._images} images are queued, and no more are accepted for now", retry_after=again
                )
            if own + len(images) > self.settings.most_queued:
                raise RequestError(
                    429,
                    f"{own} images of the stream '{stream}' are queued, and no more are accepted for now",
                    retry_after=again,
                )
            self._queues.setdefault(key, deque()).append(waiting)
            self._images += len(images)
            self._changed.notify()
        return waiting.future

    def ask(self, do: Callable[[], T]) -> Future[T]:
        """Run a task in the engine's thread, before the next batch."""
        future: Future[T] = Future()
        with self._changed:
            if self._draining:
                raise RequestError(503, "the service is stopping", retry_after=5)
            self._tasks.append((do, future))
            self._changed.notify()
        return future

    def drain(self) -> None:
        """Serve all that waits, take no more, and close the streams."""
        with self._changed:
            self._draining = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                work = self._choose()
                while work is None:
                    if self._draining and not self._queues and not self._tasks:
                        self.pool.close()
                        return
                    self._changed.wait(self._until_due())
                    work = self._choose()
            work()

    def _choose(self) -> Callable[[], None] | None:
        if self._tasks:
            do, future = self._tasks.popleft()
            return lambda: _settle(future, do)
        now, size = time.monotonic(), self.settings.batch_size
        due = [
            (queue[0].since, key)
            for key, queue in self._queues.items()
            if self._draining
            or now - queue[0].since >= self.settings.max_wait
            or sum(len(w.images) for w in queue) >= size
        ]
        if not due:
            return None
        key = min(due)[1]
        queue, chosen, images = self._queues[key], list[_Waiting](), 0
        while queue and (not chosen or images + len(queue[0].images) <= size):
            images += len(queue[0].images)
            chosen.append(queue.popleft())
        self._images -= images
        if not queue:
            del self._queues[key]
        return lambda: self._serve(key, [w for w in chosen if w.future.set_running_or_notify_cancel()])

    def _until_due(self) -> float | None:
        if not self._queues:
            return None
        oldest = min(queue[0].since for queue in self._queues.values())
        return max(0.0, oldest + self.settings.max_wait - time.monotonic())

    def _serve(self, key: Key, requests: list[_Waiting]) -> None:
        if not requests:
            return
        try:
            batch = self._predict(key, requests)
        except Exception as error:
            if len(requests) == 1:
                requests[0].future.set_exception(error)
            else:  # so that only the request whose images are at fault fails
                for request in requests:
                    self._serve(key, [request])
            return
        for request, answer in zip(requests, batch.answers, strict=True):
            request.future.set_result(answer)

    def _predict(self, key: Key, requests: list[_Waiting]) -> Batch:
        start = time.perf_counter()
        stream = self.pool.get(key.stream)
        images = torch.cat([r.images for r in requests])
        result = stream(images, adapt=key.adapt)
        output, given = result.logits.detach().float().cpu().numpy(), stream.method.probabilities
        answers, row = [], 0
        for request in requests:
            rows = slice(row, row + len(request.images))
            answers.append(Answer(secrets.token_hex(8), output[rows], result.adapted, given))
            row = rows.stop
        seconds = time.perf_counter() - start
        self._seconds_per_image = 0.9 * self._seconds_per_image + 0.1 * seconds / len(images)
        batch = Batch(stream, key.stream, images, answers, result, seconds)
        self._on_batch(batch)
        return batch


def _settle(future: Future[Any], do: Callable[[], Any]) -> None:
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(do())
        except Exception as error:
            future.set_exception(error)
