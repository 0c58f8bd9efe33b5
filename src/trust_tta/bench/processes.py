"""Experiments shared by several processes of this machine, each with the store, the data and the network for itself."""

from __future__ import annotations

import multiprocessing
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import TypeAlias

import torch

from trust_tta.bench.config import RunConfig
from trust_tta.bench.plan import Plan
from trust_tta.bench.sources import DataSource
from trust_tta.bench.sweep import Bench, Observer, unsettled
from trust_tta.errors import CheckpointError, ConfigError, DataError, StateError, TrustError
from trust_tta.results.record import CellKey, CellResult, Course
from trust_tta.results.store import ResultStore

GRACE_SECONDS = 10.0  # for a worker to give back its cells before it is killed

# What a worker tells of a job: batches done, a finished cell, a failed one, or why the job cannot be run.
Message: TypeAlias = int | tuple[CellKey, CellResult] | tuple[CellKey, str] | TrustError


@dataclass(frozen=True, eq=False)
class Job:
    """An experiment and its plan, which no worker has to make again."""

    config: RunConfig
    plan: Plan


def share(
    jobs: Sequence[Job], observers: Sequence[Observer], *, processes: int, died: Callable[[int, int], None]
) -> dict[int, TrustError]:
    """Run the jobs in so many processes; gives what kept a job from being run, by its number.

    Each job's cells go to its observer, the progress of all jobs to the first. `died` hears the pid and exit code of a
    worker that broke off; the others take over its cells. However this ends, no worker is left behind.
    """
    refusals: dict[int, TrustError] = {}
    with _workers(jobs, processes) as workers:
        while workers:
            for ready in wait(list(workers)):
                connection = next(c for c in workers if c is ready)
                try:
                    number, message = connection.recv()
                except (EOFError, OSError):
                    _part_with(workers.pop(connection), died)
                else:
                    _hear(number, message, observers, refusals)
    return refusals


def _hear(number: int, message: Message, observers: Sequence[Observer], refusals: dict[int, TrustError]) -> None:
    match message:
        case int():
            observers[0].advance(message)
        case TrustError():
            refusals.setdefault(number, message)
        case (key, CellResult() as result):
            observers[number].finished(key, result)
        case (key, reason):
            observers[number].failed(key, reason)


def _part_with(process: BaseProcess, died: Callable[[int, int], None]) -> None:
    process.join()
    if process.exitcode:
        died(process.pid or 0, process.exitcode)


@contextmanager
def _workers(jobs: Sequence[Job], processes: int) -> Iterator[dict[Connection, BaseProcess]]:
    """Workers that have their jobs, by the connection on which they tell of them; all have ended afterwards."""
    context = multiprocessing.get_context("spawn")
    workers: dict[Connection, BaseProcess] = {}
    started: list[BaseProcess] = []
    try:
        with _without_interrupts():  # which workers inherit: they end when this process says so
            for _ in range(processes):
                here, there = context.Pipe()
                process = context.Process(target=work, args=(there, processes), daemon=True)
                process.start()
                there.close()
                started.append(process)
                workers[here] = process
        for connection in workers:  # after all have started: a worker reads this only when it has imported everything
            with suppress(OSError):  # one that died already is noticed when it is listened to
                connection.send(tuple(jobs))
        yield workers
    finally:
        _end(started)


@contextmanager
def _without_interrupts() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _end(processes: Sequence[BaseProcess]) -> None:
    """Ask those that still run to end, and kill those that do not in time."""
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + GRACE_SECONDS
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.exitcode is None:
            process.kill()
            process.join()


def work(connection: Connection, processes: int) -> None:
    """A worker: its share of the threads, then the jobs; what is free in any of them comes before any waiting."""
    signal.signal(signal.SIGTERM, _leave)
    torch.set_num_threads(max(1, torch.get_num_threads() // processes))
    jobs: Sequence[Job] = connection.recv()
    refused: set[int] = set()
    for patient in (False, True):
        for number, job in enumerate(jobs):
            if number in refused:
                continue
            teller = Teller(connection, number)
            try:
                _take_part(job, teller, patient=patient)
            except (CheckpointError, ConfigError, DataError, StateError) as error:
                refused.add(number)
                teller.tell(error)


def _leave(number: int, _frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # a second one must not disturb the clearing up
    sys.exit(128 + number)


def _take_part(job: Job, teller: Teller, *, patient: bool) -> None:
    with ResultStore(job.config.store, create=False) as store:
        left = unsettled(job.plan.chains, store)
        if left:
            bench = Bench(job.config, DataSource(job.config.data), job.plan, store, teller)
            bench.check(left[0])
            bench.run_all(left, wait=patient)


class Teller(Observer):
    """Hands on what a worker's sweep says; leaves when nobody listens any more."""

    def __init__(self, connection: Connection, number: int) -> None:
        self.connection, self.number = connection, number

    def advance(self, batches: int) -> None:
        self.tell(batches)

    def finished(self, key: CellKey, result: CellResult) -> None:
        self.tell((key, replace(result, course=Course(), predictions=(), confusion=None)))

    def failed(self, key: CellKey, message: str) -> None:
        self.tell((key, message))

    def waiting(self, cells: int) -> None:
        self.tell(0)  # nothing new; but a worker that waits must notice, too, that it is alone

    def tell(self, message: Message) -> None:
        try:
            self.connection.send((self.number, message))
        except OSError:
            sys.exit(1)  # no Exception: a cell must not be recorded as failed because of it
