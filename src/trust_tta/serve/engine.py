"""The engine: one thread that runs queued requests in batches. Queues are bounded, and tasks run before batches."""

from __future__ import annotations

import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from trust_tta.live.session import Result
from trust_tta.live.stream import Stream
from trust_tta.preprocessing import Preprocessing
from trust_tta.serve.settings import RequestError, Settings
from trust_tta.serve.stream_cache import StreamCache

T = TypeVar("T")
STOPPING = "the service is stopping"


@dataclass(frozen=True, eq=False)
class RequestPrediction:
    """The prediction for one request; image i of it has the id `<id>-<i>`.

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


class BatchResult(NamedTuple):
    """One forward pass over the images of its requests, in order: their network input, ids and output."""

    stream: Stream
    name: str
    images: Tensor
    ids: list[str]
    output: Tensor
    result: Result
    seconds: float


@dataclass(eq=False)
class PredictRequest:
    """Images (n, ...) for a stream, and the future of their prediction."""

    stream: str
    images: Tensor
    adapt: bool
    future: Future[RequestPrediction] = field(default_factory=Future)
    since: float = field(default_factory=time.monotonic)


class Engine:
    """Runs the batch of the oldest request as soon as it is full, or has waited for `max_wait` seconds.

    `on_batch` is called with every batch before its requests are answered.
    """

    def __init__(
        self,
        streams: StreamCache,
        preprocessing: Preprocessing,
        settings: Settings,
        on_batch: Callable[[BatchResult], None],
    ) -> None:
        self.streams, self.normalize, self.settings = streams, preprocessing.normalize, settings
        self._on_batch = on_batch
        self._requests: deque[PredictRequest] = deque()  # the oldest comes first
        self._images = Counter[str]()  # of these requests, by stream
        self._tasks: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()  # guards the fields above
        self._seconds_per_image = 0.01
        self._draining = False
        self._worker = threading.Thread(target=self._run, name="engine", daemon=True)
        self._worker.start()

    @property
    def queued(self) -> int:
        """The number of images that wait."""
        return self._images.total()

    @property
    def alive(self) -> bool:
        return self._worker.is_alive() and not self._draining

    def submit(self, stream: str, images: Tensor, *, adapt: bool) -> Future[RequestPrediction]:
        """Queue images for a stream: pixels (n, size, size, 3) or network input (n, 3, size, size)."""
        request = PredictRequest(stream, images, adapt)
        with self._changed:
            if self._draining:
                raise RequestError(503, STOPPING, retry_after=5)
            queued, own = self._images.total(), self._images[stream]
            if queued + len(images) > self.settings.max_queued_total:
                raise self._full(503, f"{queued} images are queued")
            if own + len(images) > self.settings.max_queued:
                raise self._full(429, f"{own} images of the stream '{stream}' are queued")
            self._requests.append(request)
            self._images[stream] += len(images)
            self._changed.notify()
        return request.future

    def submit_task(self, function: Callable[[], T]) -> Future[T]:
        """Call a function before the next batch."""
        future: Future[T] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except Exception as error:
                    future.set_exception(error)

        with self._changed:
            if self._draining:
                raise RequestError(503, STOPPING, retry_after=5)
            self._tasks.append(run)
            self._changed.notify()
        return future

    def drain(self) -> None:
        """Run everything that is queued, accept no more, and close the streams."""
        with self._changed:
            self._draining = True
            self._changed.notify()
        self._worker.join()
        self.streams.close()

    def _full(self, status: int, reason: str) -> RequestError:
        """The refusal of a full queue, with the seconds after which to try again."""
        retry_after = 1 + int(self.queued * self._seconds_per_image)
        return RequestError(status, f"{reason}, and no more are accepted for now", retry_after=retry_after)

    def _run(self) -> None:
        """Run tasks and batches until everything is drained."""
        while (work := self._next()) is not None:
            work()

    def _next(self) -> Callable[[], None] | None:
        """Wait for a task or a batch; None once everything is drained.

        A batch: the oldest request with those that can share its pass, whole ones in order.
        """
        with self._changed:
            while not self._tasks:
                batch, images = list[PredictRequest](), 0
                for request in self._requests:
                    if not batch or (request.stream, request.adapt) == (batch[0].stream, batch[0].adapt):
                        images += len(request.images)
                        if batch and images > self.settings.batch_size:
                            break
                        batch.append(request)
                left = batch[0].since + self.settings.max_wait - time.monotonic() if batch else None
                if left is None and self._draining:
                    return None
                if left is not None and (self._draining or images >= self.settings.batch_size or left <= 0):
                    for request in batch:
                        self._requests.remove(request)
                        self._images -= Counter({request.stream: len(request.images)})
                    return partial(self._run_batch, [r for r in batch if r.future.set_running_or_notify_cancel()])
                self._changed.wait(left)
            return self._tasks.popleft()

    def _run_batch(self, requests: list[PredictRequest]) -> None:
        """Answer requests; if they fail together, one by one, so that only the one at fault fails."""
        try:
            predictions = self._predict(requests) if requests else []
        except Exception as error:
            if len(requests) == 1:
                requests[0].future.set_exception(error)
            else:
                for request in requests:
                    self._run_batch([request])
            return
        for request, prediction in zip(requests, predictions, strict=True):
            request.future.set_result(prediction)

    def _predict(self, requests: list[PredictRequest]) -> list[RequestPrediction]:
        start = time.perf_counter()
        name, adapt = requests[0].stream, requests[0].adapt
        stream = self.streams.open(name)
        parts = [r.images if r.images.is_floating_point() else self.normalize(r.images) for r in requests]
        images = torch.cat(parts)
        result = stream(images, adapt=adapt)
        output = result.logits.detach().float().cpu()
        predictions = [
            RequestPrediction(secrets.token_hex(8), part, result.adapted, stream.method.probabilities)
            for part in output.split([len(part) for part in parts])
        ]
        ids = [f"{prediction.id}-{row}" for prediction in predictions for row in range(len(prediction.output))]
        seconds = time.perf_counter() - start
        self._on_batch(BatchResult(stream, name, images, ids, output, result, seconds))
        self._seconds_per_image = 0.9 * self._seconds_per_image + 0.1 * seconds / len(images)
        return predictions
