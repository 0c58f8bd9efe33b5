"""Experiments shared by several processes of this machine, each with its own store, data and network."""

from __future__ import annotations

import multiprocessing
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Protocol, TypeAlias

import torch

from trust_tta.bench.config import DataConfig, RunConfig
from trust_tta.bench.data import ExperimentData
from trust_tta.bench.experiment import Experiment
from trust_tta.bench.plan import Chain, Plan, make_plan, weigh
from trust_tta.bench.sweep import CellRunner, Outcome, retry_failed, standing, unsettled
from trust_tta.errors import CheckpointError, ConfigError, DataError, StateError, TrustError
from trust_tta.progress import SILENT, Progress, Silent
from trust_tta.results.store import ResultStore

GRACE_SECONDS = 10.0  # for a worker to release its cells before it is killed
REFUSALS = (CheckpointError, ConfigError, DataError, StateError)  # end one experiment; the others are run

# Messages of a worker: steps of progress, a line to keep, or why an experiment (by number) cannot be run.
Message: TypeAlias = int | str | tuple[int, TrustError]


@dataclass(frozen=True, eq=False)
class Assignment:
    """An experiment with its plan, which workers need not make again; `prefix` begins the lines of its cells."""

    config: RunConfig
    plan: Plan
    prefix: str


class Engine(Protocol):
    """Runs assignments; returns why some could not be run, by number."""

    def __call__(
        self, assigned: Mapping[int, Assignment], *, chains: int, progress: Progress
    ) -> dict[int, TrustError]: ...


def sweep_together(
    configs: Sequence[RunConfig], engine: Engine, *, retry: bool = False, progress: Progress = SILENT
) -> list[Outcome | TrustError]:
    """Run experiments with an engine; for each, its outcome or why it could not be run.

    No experiment waits for the one before. However this ends, no worker is left behind.
    """
    assigned, refused = _assign(configs, retry=retry)
    for text in dict.fromkeys(text for each in assigned.values() for text in each.plan.warnings):
        progress.note(f"warning: {text}")
    left = [chain for each in assigned.values() for chain in _left(each)]
    if left:
        progress.start(sum(chain.passes for chain in left), "passes")
        refused |= engine(assigned, chains=len(left), progress=progress)
        progress.finish()
    ended: list[Outcome | TrustError] = []
    for number in range(len(configs)):
        if number in refused:
            ended.append(refused[number])
        else:
            with ResultStore(assigned[number].config.store, create=False) as store:
                ended.append(standing(assigned[number].plan, store))
    return ended


def _assign(configs: Sequence[RunConfig], *, retry: bool) -> tuple[dict[int, Assignment], dict[int, TrustError]]:
    """The plans of the experiments by number, recorded in their stores; and why some cannot be run."""
    assigned: dict[int, Assignment] = {}
    refused: dict[int, TrustError] = {}
    data: dict[DataConfig, ExperimentData] = {}  # data shared by several experiments are hashed once
    for number, config in enumerate(configs):
        prefix = f"{config.data.dataset} {config.stream.setting:<8}  " if len(configs) > 1 else ""
        try:
            plan = make_plan(config, data.setdefault(config.data, ExperimentData(config.data)))
            with ResultStore(config.store) as store:
                if retry:
                    retry_failed(plan, store)
                store.plan(plan.keys, labels=plan.labels)
                assigned[number] = Assignment(config, weigh(plan, store), prefix)
        except REFUSALS as error:
            refused[number] = error
    return assigned, refused


def _left(assignment: Assignment) -> list[Chain]:
    with ResultStore(assignment.config.store, create=False) as store:
        return unsettled(assignment.plan.chains, store)


def share(
    assigned: Mapping[int, Assignment], *, processes: int, chains: int, progress: Progress = SILENT
) -> dict[int, TrustError]:
    """Run assignments with so many chains in at most `processes`; returns why some could not be run, by number.

    When a worker dies, the others take over its cells.
    """
    refused: dict[int, TrustError] = {}
    with _workers(assigned, min(processes, chains)) as workers:
        while workers:
            for ready in wait(list(workers)):
                connection = next(c for c in workers if c is ready)
                try:
                    message: Message = connection.recv()
                except (EOFError, OSError):
                    _part_with(workers.pop(connection), progress)
                    continue
                if isinstance(message, int):
                    progress.advance(message)
                elif isinstance(message, str):
                    progress.note(message)
                else:
                    refused.setdefault(*message)
    return refused


def _part_with(process: BaseProcess, progress: Progress) -> None:
    process.join()
    if process.exitcode:
        progress.note(f"worker {process.pid} died with code {process.exitcode}; the others take over its cells")


@contextmanager
def _workers(assigned: Mapping[int, Assignment], processes: int) -> Iterator[dict[Connection, BaseProcess]]:
    """Workers that have their assignments, by their connection; all have ended when the context ends."""
    context = multiprocessing.get_context("spawn")
    workers: dict[Connection, BaseProcess] = {}
    started: list[BaseProcess] = []
    try:
        with _without_interrupts():  # inherited by the workers, which end when this process says so
            for _ in range(processes):
                here, there = context.Pipe()
                process = context.Process(target=work, args=(there, processes), daemon=True)
                process.start()
                there.close()
                started.append(process)
                workers[here] = process
        for connection in workers:  # once all have started: a worker reads this only after its imports
            with suppress(OSError):  # a worker that has died is noticed when its messages are read
                connection.send(dict(assigned))
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
    """Terminate the processes, and kill those that do not end in time."""
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + GRACE_SECONDS
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.exitcode is None:
            process.kill()
            process.join()


def work(connection: Connection, processes: int) -> None:
    """A worker: takes its share of the threads and runs experiments; free cells of any come before waiting."""
    teller = _Teller(connection)
    signal.signal(signal.SIGTERM, teller.leave)
    torch.set_num_threads(max(1, torch.get_num_threads() // processes))
    assigned: dict[int, Assignment] = connection.recv()
    for patient in (False, True):
        for number, assignment in list(assigned.items()):
            try:
                _take_part(assignment, teller, patient=patient)
            except REFUSALS as error:
                del assigned[number]
                teller.tell((number, error))


def _take_part(assignment: Assignment, teller: _Teller, *, patient: bool) -> None:
    with ResultStore(assignment.config.store, create=False) as reader:
        left = unsettled(assignment.plan.chains, reader)
    if left:
        with ResultStore(assignment.config.store) as store:
            experiment = Experiment(assignment.config, plan=assignment.plan)
            runner = CellRunner(experiment, store, teller, prefix=assignment.prefix)
            runner.chains.check(left[0])
            runner.run_all(left, wait=patient, announce=False)


class _Teller(Silent):
    """The progress of a worker, sent to the process that started it; exits when nobody listens any more."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.code: int | None = None  # exit code, once an exit was requested

    def leave(self, number: int, _frame: FrameType | None) -> None:
        """The handler of SIGTERM."""
        signal.signal(number, signal.SIG_IGN)  # a second one must not disturb the cleanup
        self.code = 128 + number
        sys.exit(self.code)

    def advance(self, n: int = 1) -> None:
        self.tell(n)  # also 0: a waiting worker must notice, too, when it is alone

    def note(self, text: str) -> None:
        self.tell(text)

    def tell(self, message: Message) -> None:
        if self.code is not None:
            sys.exit(self.code)  # the first exit was lost: Python drops what is raised inside a destructor
        try:
            self.connection.send(message)
        except OSError:
            sys.exit(1)  # no Exception: a cell must not be recorded as failed because of it
