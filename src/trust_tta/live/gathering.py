"""Callers in several threads share a batch; none waits for the others longer than it allows."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
from torch import Tensor

R = TypeVar("R")


@dataclass(eq=False)
class _Request(Generic[R]):
    images: Tensor
    deadline: float
    result: R | None = None
    error: BaseException | None = None
    done: bool = field(default=False)


class Gatherer(Generic[R]):
    """Joins the images of waiting callers up to `size`, runs them as one batch, and splits the result.

    It has no thread of its own: the caller whose batch is full, or whose time is up, runs it for all. Requests that are
    larger than `size` run alone.
    """

    def __init__(self, run: Callable[[Tensor], R], cut: Callable[[R, int, int], R], *, size: int) -> None:
        self._run, self._cut, self._size = run, cut, size
        self._changed = threading.Condition()
        self._waiting: list[_Request[R]] = []
        self._busy = False

    def __call__(self, images: Tensor, max_wait: float) -> R:
        """The result for these images, which wait for others for at most `max_wait` seconds."""
        request: _Request[R] = _Request(images, time.monotonic() + max_wait)
        with self._changed:
            self._waiting.append(request)
            self._changed.notify_all()
        while not request.done:
            chosen = self._wait(request)
            if chosen:
                try:
                    self._serve(chosen)
                finally:
                    with self._changed:
                        self._busy = False
                        self._changed.notify_all()
        if request.error is not None:
            raise request.error
        return request.result  # type: ignore[return-value]

    def _wait(self, request: _Request[R]) -> list[_Request[R]]:
        """Wait until this request is done, or until this thread is to run a batch that is due."""
        with self._changed:
            while not request.done:
                if not self._busy and self._waiting:
                    chosen = self._choose()
                    now, due = time.monotonic(), min(r.deadline for r in self._waiting)
                    if sum(len(r.images) for r in chosen) >= self._size or now >= due:
                        self._busy = True
                        self._waiting = [r for r in self._waiting if r not in chosen]
                        return chosen
                    self._changed.wait(due - now)
                else:
                    self._changed.wait()
        return []

    def _choose(self) -> list[_Request[R]]:
        """The requests that fit into a batch with the one whose time is up first."""
        ordered = sorted(self._waiting, key=lambda r: r.deadline)
        chosen, images = [ordered[0]], len(ordered[0].images)
        for request in ordered[1:]:
            alike = request.images.shape[1:] == ordered[0].images.shape[1:]
            if alike and images + len(request.images) <= self._size:
                chosen.append(request)
                images += len(request.images)
        return chosen

    def _serve(self, requests: list[_Request[R]]) -> None:
        try:
            result, start = self._run(torch.cat([r.images for r in requests])), 0
            for request in requests:
                request.result = self._cut(result, start, start + len(request.images))
                start += len(request.images)
        except Exception as error:
            if len(requests) == 1:
                requests[0].error = error
            else:  # so that only the caller whose images are wrong gets the error
                for request in requests:
                    self._serve([request])
        except BaseException as interrupt:
            for request in requests:
                request.error = RuntimeError(f"the thread that ran this batch was ended by {type(interrupt).__name__}")
            raise
        finally:
            for request in requests:
                request.done = request.result is not None or request.error is not None
