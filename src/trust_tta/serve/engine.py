"""A few threads run the network, each a batch at a time, in the order that the schedule gives."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trust_tta.live.inputs import prepare
from trust_tta.live.session import Result
from trust_tta.live.stream import Stream
from trust_tta.serve.pool import Pool
from trust_tta.serve.schedule import Key, Request, Schedule, Task, Work
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

    @cached_property
    def probabilities(self) -> NDArray[np.float32]:
        return self.output if self.gives_probabilities else torch.from_numpy(self.output).softmax(1).numpy()

    @property
    def ids(self) -> list[str]:
        return [f"{self.id}-{row}" for row in range(len(self.output))]


class Batch(NamedTuple):
    """One pass of the network: the images of all its requests, in order, as `join` gives them."""

    stream: Stream
    name: str
    images: Tensor
    answers: list[Answer]
    result: Result
    seconds: float


class Engine:
    """Runs the batch that has waited longest among those that are full or due; tasks of `ask` come first.

    Several `workers` are for a CPU, whose cores they share: a batch that is alone gets all of them. Batches of a stream
    run one after the other, unless its method is fixed. `on_batch` is called with every batch, by the worker that ran
    it, before its requests are answered.
    """

    def __init__(self, pool: Pool, settings: Settings, on_batch: Callable[[Batch], None], *, workers: int = 1) -> None:
        self.pool, self._on_batch = pool, on_batch
        self._schedule = Schedule(settings, side_by_side=False)
        self._changed = threading.Condition()  # of the schedule and all below
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
        return self._schedule.images

    @property
    def alive(self) -> bool:
        return all(worker.is_alive() for worker in self._workers) and not self._draining

    def submit(self, stream: str, images: Tensor, *, adapt: bool) -> Future[Answer]:
        """Put images into the queue of a stream, pixels (n, h, w, 3) or network input (n, c, h, w).

        Refused where it is full.
        """
        request = Request(images)
        with self._changed:
            self._check_open()
            if self._schedule.add(Key(stream, adapt), request, seconds_per_image=self._seconds_per_image):
                self._changed.notify()
        return request.future

    def ask(self, do: Callable[[], T], *streams: str) -> Future[T]:
        """Run a task before the next batch of the streams; nothing else happens to these meanwhile."""
        task = Task(do, frozenset(streams))
        with self._changed:
            self._check_open()
            self._schedule.add_task(task)
            self._changed.notify()
        return task.future

    def _check_open(self) -> None:
        if self._draining:
            raise RequestError(503, "the service is stopping", retry_after=5)

    def drain(self) -> None:
        """Serve all that waits, take no more, and close the streams."""
        with self._changed:
            self._draining = self._schedule.everything = True
            self._changed.notify_all()
        for worker in self._workers:
            if worker.is_alive():
                worker.join()
        self.pool.close()

    def _run(self) -> None:
        """What a worker does, until the engine is drained."""
        while (chosen := self._next()) is not None:
            work, threads = chosen
            use_threads(threads)
            try:
                if isinstance(work, Task):
                    _settle(work)
                else:
                    requests = [r for r in work.requests if r.future.set_running_or_notify_cancel()]
                    self._serve(work.key, requests, threads)
            finally:
                with self._changed:
                    self._schedule.end(work)
        use_threads(self._cores)  # PyTorch gives threads that begin later what was set last

    def _next(self) -> tuple[Work, int] | None:
        """What to do, and on how many threads; None at the end."""
        schedule, workers = self._schedule, len(self._workers)
        with self._changed:
            while (work := schedule.begin()) is None:
                if self._draining and not schedule.waiting:
                    self._changed.notify_all()  # the others wait for this, too
                    return None
                self._changed.wait(schedule.until_due())
            if schedule.waiting:
                self._changed.notify()  # another worker keeps watch from here
            beside = min(workers, schedule.running + schedule.due()) if workers > 1 else 1
            return work, max(1, self._cores // beside)

    def _serve(self, key: Key, requests: list[Request], threads: int) -> None:
        if not requests:
            return
        try:
            batch = self._predict(key, requests, threads)
        except Exception as error:
            if len(requests) == 1:
                requests[0].future.set_exception(error)
            else:  # so that only the request whose images are at fault fails
                for request in requests:
                    self._serve(key, [request], threads)
            return
        for request, answer in zip(requests, batch.answers, strict=True):
            request.future.set_result(answer)

    def _predict(self, key: Key, requests: list[Request], threads: int) -> Batch:
        start = time.perf_counter()
        with self.pool.using(key.stream) as stream:
            images = join([request.images for request in requests], stream.method.model)
            result = stream(images, adapt=key.adapt)
            output, given = result.logits.detach().float().cpu().numpy(), stream.method.probabilities
            answers, row = [], 0
            for request in requests:
                rows = slice(row, row + len(request.images))
                answers.append(Answer(secrets.token_hex(8), output[rows], result.adapted, given))
                row = rows.stop
            seconds = time.perf_counter() - start
            batch = Batch(stream, key.stream, images, answers, result, seconds)
            self._on_batch(batch)
        with self._changed:
            each = seconds / len(images) * threads / self._cores
            self._seconds_per_image = 0.9 * self._seconds_per_image + 0.1 * each
        return batch


def join(parts: list[Tensor], network: nn.Module) -> Tensor:
    """One batch of several requests: pixels (n, h, w, 3) if all are, else network input (n, c, h, w)."""
    if len({part.is_floating_point() for part in parts}) > 1:
        parts = [prepare(part, network) for part in parts]
    return torch.cat(parts)


def use_threads(count: int) -> None:
    """Let PyTorch use so many threads for what the calling thread does."""
    if torch.get_num_threads() != count:
        torch.set_num_threads(count)


def _settle(task: Task) -> None:
    if task.future.set_running_or_notify_cancel():
        try:
            task.future.set_result(task.do())
        except Exception as error:
            task.future.set_exception(error)
