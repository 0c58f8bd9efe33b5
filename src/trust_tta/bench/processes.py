"""Run experiments in several processes, each with its own store connection, data and network."""

from __future__ import annotations

import multiprocessing
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Protocol, TypeAlias

import torch

from trust_tta.bench.config import RunConfig
from trust_tta.bench.data import ExperimentData
from trust_tta.bench.experiment import CellSequence, Experiment, ExperimentPlan, make_plan
from trust_tta.bench.sweep import CellWriter, check_sequence, run_sequences, sequences_to_run, unfinished
from trust_tta.errors import CheckpointError, ConfigError, DataError, StateError, TrustError
from trust_tta.progress import SILENT, Progress
from trust_tta.results.record import CellKey
from trust_tta.results.store import ResultStore

GRACE_SECONDS = 10.0  # for a worker to release its cells before it is killed
EXPERIMENT_ERRORS = (CheckpointError, ConfigError, DataError, StateError)  # they end one experiment, not the others

# Messages of a worker: steps of progress, a line to print, or the error of an experiment (by number).
Message: TypeAlias = int | str | tuple[int, TrustError]


class SweepEngine(Protocol):
    """Runs planned experiments; returns the errors of those that could not be run, by number."""

    def __call__(
        self, plans: Mapping[int, ExperimentPlan], *, sequences: int, progress: Progress
    ) -> dict[int, TrustError]: ...


def sweep_parallel(
    configs: Sequence[RunConfig], engine: SweepEngine, *, retry: bool = False, progress: Progress = SILENT
) -> list[tuple[CellKey, ...] | TrustError]:
    """Run experiments side by side with an engine; returns the keys of each, or the error that prevented it.

    All workers have ended when this returns or raises.
    """
    plans: dict[int, ExperimentPlan] = {}
    refused: dict[int, TrustError] = {}
    left: list[CellSequence] = []
    data: dict[str, ExperimentData] = {}  # data shared by several experiments are hashed once
    for number, config in enumerate(configs):
        try:
            plan = make_plan(config, data.setdefault(repr(config.data), ExperimentData(config.data)))
            with ResultStore(config.store) as store:
                left += sequences_to_run(plan, store, retry=retry)
                store.plan(plan.keys, labels=plan.labels)
            plans[number] = plan
        except EXPERIMENT_ERRORS as error:
            refused[number] = error
    for text in dict.fromkeys(text for plan in plans.values() for text in plan.warnings):
        progress.note(f"warning: {text}")
    if left:
        progress.start(sum(sequence.cost * sum(sequence.batches) for sequence in left), "")
        refused |= engine(plans, sequences=len(left), progress=progress)
        progress.finish()
    return [refused[number] if number in refused else plans[number].keys for number in range(len(configs))]


def run_in_processes(
    plans: Mapping[int, ExperimentPlan], *, processes: int, sequences: int, progress: Progress = SILENT
) -> dict[int, TrustError]:
    """Run planned experiments in at most `processes` workers; returns the errors of those that could not be run.

    When a worker dies, the others run its cells.
    """
    refused: dict[int, TrustError] = {}
    with _workers(plans, min(processes, sequences)) as workers:
        while workers:
            for ready in wait(list(workers)):
                connection = next(c for c in workers if c is ready)
                try:
                    message: Message = connection.recv()
                except (EOFError, OSError):
                    process = workers.pop(connection)
                    process.join()
                    if process.exitcode:
                        ended = f"worker {process.pid} died with code {process.exitcode}"
                        progress.note(f"{ended}; the others take over its cells")
                    continue
                if isinstance(message, int):
                    progress.advance(message)
                elif isinstance(message, str):
                    progress.note(message)
                else:
                    refused.setdefault(*message)
    return refused


@contextmanager
def _workers(plans: Mapping[int, ExperimentPlan], processes: int) -> Iterator[dict[Connection, BaseProcess]]:
    """Started workers by their connection; all have ended when the context ends."""
    context = multiprocessing.get_context("spawn")
    workers: dict[Connection, BaseProcess] = {}
    started: list[BaseProcess] = []
    try:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited by the workers, which this process ends
        try:
            for number in range(processes):
                here, there = context.Pipe()
                worker = context.Process(target=run_worker, args=(there, processes, number), daemon=True)
                worker.start()
                there.close()
                started.append(worker)
                workers[here] = worker
        finally:
            signal.signal(signal.SIGINT, before)
        for connection in workers:  # once all have started: a worker reads this only after its imports
            with suppress(OSError):  # a worker that has died is noticed when its messages are read
                connection.send(dict(plans))
        yield workers
    finally:
        for process in started:
            process.terminate()
        deadline = time.monotonic() + GRACE_SECONDS
        for process in started:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.exitcode is None:
                process.kill()
                process.join()


def run_worker(connection: Connection, processes: int, number: int) -> None:
    """Run the unclaimed cells of all experiments in a worker process, then wait for those of other workers.

    Every second worker begins with the last experiment: its cells may be the most expensive.
    """
    progress = _PipeProgress(connection)
    signal.signal(signal.SIGTERM, progress.exit_on_signal)
    torch.set_num_threads(max(1, torch.get_num_threads() // processes))
    plans: dict[int, ExperimentPlan] = connection.recv()
    several = len(plans) > 1
    for wait_for_others in (False, True):
        for experiment_number, plan in list(plans.items())[:: -1 if number % 2 else 1]:
            try:
                with ResultStore(plan.config.store) as store:
                    if left := unfinished(plan.sequences, store):
                        experiment = Experiment(plan.config, plan=plan)
                        check_sequence(experiment, left[0])
                        writer = CellWriter(plan, store, progress, several=several)
                        run_sequences(experiment, writer, left, wait=wait_for_others, announce=False)
            except EXPERIMENT_ERRORS as error:
                del plans[experiment_number]
                progress.send((experiment_number, error))


class _PipeProgress(Progress):
    """Sends the progress of a worker to its parent process; exits when the pipe is closed."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.code: int | None = None  # exit code, once an exit was requested

    def exit_on_signal(self, number: int, _frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)  # a second one must not disturb the cleanup
        self.code = 128 + number
        sys.exit(self.code)

    def advance(self, n: int = 1) -> None:
        self.send(n)  # also 0: a waiting worker must notice a closed pipe, too

    def note(self, text: str) -> None:
        self.send(text)

    def send(self, message: Message) -> None:
        if self.code is not None:
            sys.exit(self.code)  # the first exit was lost: Python drops what is raised inside a destructor
        try:
            self.connection.send(message)
        except OSError:
            sys.exit(1)  # no Exception: a cell must not be recorded as failed because of it
