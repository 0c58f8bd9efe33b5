"""The engine: one thread that runs queued requests in batches. Queues are bounded, and tasks run before batches."""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from trust_tta.live.session import Result
from trust_tta.live.stream import Stream
from trust_tta.preprocessing import Preprocessing
from trust_tta.serve.settings import RequestError, Settings
from trust_tta.serve.stream_cache import StreamCache

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class RequestPrediction:
    """The prediction for one request; image i has the id `<id>-<i>`.

    `output` (n, classes, ...), on the CPU: logits, or probabilities where the method returns these.
    """

    id: str
    output: Tensor
    adapted: bool
    is_probability: bool = False

    @property
    def logits(self) -> Tensor:
        return self.output.clamp_min(1e-12).log() if self.is_probability else self.output

    @cached_property
    def probabilities(self) -> Tensor:
        return self.output if self.is_probability else self.output.softmax(1)

    @property
    def ids(self) -> list[str]:
        return [f"{self.id}-{row}" for row in range(len(self.output))]


class BatchResult(NamedTuple):
    """One forward pass: the network input of all its requests, in order, and what came of it."""

    stream: Stream
    name: str
    images: Tensor
    predictions: list[RequestPrediction]
    result: Result
    seconds: float


class QueueKey(NamedTuple):
    """Requests with the same key may share a batch."""

    stream: str
    adapt: bool


@dataclass(eq=False)
class PredictRequest:
    """Images (n, ...) and the future of their prediction."""

    images: Tensor
    future: Future[RequestPrediction] = field(default_factory=Future)
    since: float = field(default_factory=time.monotonic)


class Engine:
    """Runs the due batch that has waited longest: one that is full, or has waited for `max_wait` seconds.

    `on_batch` is called with every batch before its requests are answered.
    """

    def __init__(
        self,
        streams: StreamCache,
        preprocessing: Preprocessing,
        settings: Settings,
        on_batch: Callable[[BatchResult], None],
    ) -> None:
        self.streams, self.preprocessing, self.settings = streams, preprocessing, settings
        self._on_batch = on_batch
        self.queued = 0  # images
        self._queues: dict[QueueKey, deque[PredictRequest]] = {}
        self._tasks: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._changed = threading.Condition()  # guards the fields above
        self._seconds_per_image = 0.01
        self._draining = False
        self._worker = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._worker.start()

    @property
    def alive(self) -> bool:
        return self._worker.is_alive() and not self._draining

    def submit(self, stream: str, images: Tensor, *, adapt: bool) -> Future[RequestPrediction]:
        """Queue images for a stream: pixels (n, size, size, 3) or network input (n, 3, size, size)."""
        request = PredictRequest(images)
        with self._changed:
            self._check_open()
            self._check_room(stream, len(images))
            queue = self._queues.setdefault(QueueKey(stream, adapt), deque())
            queue.append(request)
            self.queued += len(images)
            if len(queue) == 1 or _images(queue) >= self.settings.batch_size:
                self._changed.notify()
        return request.future

    def submit_task(self, function: Callable[[], T]) -> Future[T]:
        """Call a function before the next batch."""
        future: Future[T] = Future()
        with self._changed:
            self._check_open()
            self._tasks.append((function, future))
            self._changed.notify()
        return future

    def drain(self) -> None:
        """Run everything that is queued, accept no more, and close the streams."""
        with self._changed:
            self._draining = True
            self._changed.notify()
        if self._worker.is_alive():
            self._worker.join()
        self.streams.close()

    def _check_open(self) -> None:
        if self._draining:
            raise RequestError(503, "the service is stopping", retry_after=5)

    def _check_room(self, stream: str, count: int) -> None:
        """Refuse images where a queue is full; the client is told when to try again."""
        retry_after = 1 + int(self.queued * self._seconds_per_image)
        if self.queued + count > self.settings.max_queued_total:
            reason = f"{self.queued} images are queued, and no more are accepted for now"
            raise RequestError(503, reason, retry_after=retry_after)
        own = sum(_images(queue) for key, queue in self._queues.items() if key.stream == stream)
        if own + count > self.settings.max_queued:
            reason = f"{own} images of the stream '{stream}' are queued, and no more are accepted for now"
            raise RequestError(429, reason, retry_after=retry_after)

    def _run(self) -> None:
        while (work := self._next()) is not None:
            if isinstance(work[0], QueueKey):
                self._run_batch(*work)
            else:
                _run_task(*work)

    def _next(self) -> Any:
        """Wait for a task (function, future) or a batch (key, requests); None once everything is drained."""
        settings = self.settings
        with self._changed:
            while not self._tasks:
                now = time.monotonic()
                due = [
                    (queue[0].since, key)
                    for key, queue in self._queues.items()
                    if self._draining
                    or queue[0].since + settings.max_wait <= now
                    or _images(queue) >= settings.batch_size
                ]
                if due:
                    key = min(due)[1]
                    return key, self._take(key)
                if self._draining:
                    return None
                oldest = min((queue[0].since for queue in self._queues.values()), default=None)
                self._changed.wait(None if oldest is None else max(0.0, oldest + settings.max_wait - now))
            return self._tasks.popleft()

    def _take(self, key: QueueKey) -> list[PredictRequest]:
        """Remove whole requests of one batch from a queue, in order; at least one."""
        queue, chosen, images = self._queues[key], list[PredictRequest](), 0
        while queue and (not chosen or images + len(queue[0].images) <= self.settings.batch_size):
            images += len(queue[0].images)
            chosen.append(queue.popleft())
        if not queue:
            del self._queues[key]
        self.queued -= images
        return [request for request in chosen if request.future.set_running_or_notify_cancel()]

    def _run_batch(self, key: QueueKey, requests: list[PredictRequest]) -> None:
        if not requests:
            return
        try:
            predictions = self._predict(key, requests)
        except Exception as error:
            if len(requests) == 1:
                requests[0].future.set_exception(error)
            else:  # one by one, so that only the request whose images are at fault fails
                for request in requests:
                    self._run_batch(key, [request])
            return
        for request, prediction in zip(requests, predictions, strict=True):
            request.future.set_result(prediction)

    def _predict(self, key: QueueKey, requests: list[PredictRequest]) -> list[RequestPrediction]:
        start = time.perf_counter()
        stream = self.streams.open(key.stream)
        images = self.join([request.images for request in requests])
        result = stream(images, adapt=key.adapt)
        parts = result.logits.detach().float().cpu().split([len(request.images) for request in requests])
        predictions = [
            RequestPrediction(secrets.token_hex(8), part, result.adapted, stream.method.probabilities) for part in parts
        ]
        seconds = time.perf_counter() - start
        self._on_batch(BatchResult(stream, key.stream, images, predictions, result, seconds))
        self._seconds_per_image = 0.9 * self._seconds_per_image + 0.1 * seconds / len(images)
        return predictions

    def join(self, parts: list[Tensor]) -> Tensor:
        """The network input (n, 3, size, size) of several requests; pixels alone are normalized as one batch."""
        if not any(part.is_floating_point() for part in parts):
            return self.preprocessing.normalize(torch.cat(parts))
        return torch.cat([part if part.is_floating_point() else self.preprocessing.normalize(part) for part in parts])


def _images(queue: deque[PredictRequest]) -> int:
    return sum(len(request.images) for request in queue)


def _run_task(function: Callable[[], Any], future: Future[Any]) -> None:
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(function())
        except Exception as error:
            future.set_exception(error)
