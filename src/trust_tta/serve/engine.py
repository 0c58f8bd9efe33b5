"""Worker threads that run the network, each one batch at a time, in the scheduler's order."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from trust_tta.live.session import Result
from trust_tta.live.stream import Stream
from trust_tta.preprocessing import Preprocessing
from trust_tta.serve.scheduler import PredictRequest, QueueKey, Scheduler, Task, Work
from trust_tta.serve.settings import RequestError, Settings
from trust_tta.serve.stream_cache import StreamCache

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Prediction:
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
    predictions: list[Prediction]
    result: Result
    seconds: float


class Engine:
    """Runs the due batch that has waited longest; tasks of `submit_task` come first.

    Several `workers` are for a CPU, whose cores they share: a batch that runs alone gets all of them. Batches of one
    stream run one after the other. `on_batch` is called with every batch before its requests are answered.
    """

    def __init__(
        self,
        streams: StreamCache,
        preprocessing: Preprocessing,
        settings: Settings,
        on_batch: Callable[[BatchResult], None],
        *,
        workers: int = 1,
    ) -> None:
        self.streams, self.preprocessing, self._on_batch = streams, preprocessing, on_batch
        self._scheduler = Scheduler(settings)
        self._changed = threading.Condition()  # guards the scheduler and the fields below
        self._seconds_per_image = 0.01  # with all cores
        self._draining = False
        self._cores = torch.get_num_threads()
        self._workers = [
            threading.Thread(target=self._run, name=f"engine-{number}", daemon=True) for number in range(workers)
        ]

    def start(self) -> None:
        for worker in self._workers:
            worker.start()

    @property
    def queued(self) -> int:
        """The number of queued images."""
        return self._scheduler.images

    @property
    def alive(self) -> bool:
        return all(worker.is_alive() for worker in self._workers) and not self._draining

    def submit(self, stream: str, images: Tensor, *, adapt: bool) -> Future[Prediction]:
        """Queue images for a stream: pixels (n, size, size, 3) or network input (n, 3, size, size)."""
        request = PredictRequest(images)
        with self._changed:
            self._check_open()
            if self._scheduler.add(QueueKey(stream, adapt), request, seconds_per_image=self._seconds_per_image):
                self._changed.notify()
        return request.future

    def submit_task(self, function: Callable[[], T], *streams: str) -> Future[T]:
        """Call a function before the next batch of the streams, while nothing else uses them."""
        task = Task(function, frozenset(streams))
        with self._changed:
            self._check_open()
            self._scheduler.add_task(task)
            self._changed.notify()
        return task.future

    def _check_open(self) -> None:
        if self._draining:
            raise RequestError(503, "the service is stopping", retry_after=5)

    def drain(self) -> None:
        """Run everything that is queued, accept no more, and close the streams."""
        with self._changed:
            self._draining = self._scheduler.flush = True
            self._changed.notify_all()
        for worker in self._workers:
            if worker.is_alive():
                worker.join()
        self.streams.close()

    def _run(self) -> None:
        while (chosen := self._next()) is not None:
            work, threads = chosen
            if torch.get_num_threads() != threads:
                torch.set_num_threads(threads)  # of this thread
            try:
                if isinstance(work, Task):
                    _run_task(work)
                else:
                    requests = [r for r in work.requests if r.future.set_running_or_notify_cancel()]
                    self._run_batch(work.key, requests, threads)
            finally:
                with self._changed:
                    self._scheduler.end(work)
        torch.set_num_threads(self._cores)  # threads that start later inherit what was set last

    def _next(self) -> tuple[Work, int] | None:
        """The next work and its number of threads; None once everything is drained."""
        scheduler, workers = self._scheduler, len(self._workers)
        with self._changed:
            while (work := scheduler.begin()) is None:
                if self._draining and not scheduler.waiting:
                    self._changed.notify_all()  # the other workers are to end, too
                    return None
                self._changed.wait(scheduler.until_due())
            if scheduler.waiting:
                self._changed.notify()  # another worker waits for the next batch to be due
            active = min(workers, scheduler.running + scheduler.due()) if workers > 1 else 1
            return work, max(1, self._cores // active)

    def _run_batch(self, key: QueueKey, requests: list[PredictRequest], threads: int) -> None:
        if not requests:
            return
        try:
            batch = self._predict(key, requests, threads)
        except Exception as error:
            if len(requests) == 1:
                requests[0].future.set_exception(error)
            else:  # one by one, so that only the request whose images are at fault fails
                for request in requests:
                    self._run_batch(key, [request], threads)
            return
        for request, prediction in zip(requests, batch.predictions, strict=True):
            request.future.set_result(prediction)

    def _predict(self, key: QueueKey, requests: list[PredictRequest], threads: int) -> BatchResult:
        start = time.perf_counter()
        with self.streams.using(key.stream) as stream:
            images = self.join([request.images for request in requests])
            result = stream(images, adapt=key.adapt)
            parts = result.logits.detach().float().cpu().split([len(request.images) for request in requests])
            predictions = [
                Prediction(secrets.token_hex(8), part, result.adapted, stream.method.probabilities) for part in parts
            ]
            seconds = time.perf_counter() - start
            batch = BatchResult(stream, key.stream, images, predictions, result, seconds)
            self._on_batch(batch)
        with self._changed:
            per_image = seconds / len(images) * threads / self._cores
            self._seconds_per_image = 0.9 * self._seconds_per_image + 0.1 * per_image
        return batch

    def join(self, parts: list[Tensor]) -> Tensor:
        """The network input (n, 3, size, size) of several requests; pixels alone are normalized as one batch."""
        if not any(part.is_floating_point() for part in parts):
            return self.preprocessing.normalize(torch.cat(parts))
        return torch.cat([part if part.is_floating_point() else self.preprocessing.normalize(part) for part in parts])


def _run_task(task: Task) -> None:
    if task.future.set_running_or_notify_cancel():
        try:
            task.future.set_result(task.function())
        except Exception as error:
            task.future.set_exception(error)
