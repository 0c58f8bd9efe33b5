"""Sweeps on a Ray cluster: sequences of cells are its tasks, and only the driver writes results.

A task runs a sequence and returns what the store keeps of it; no worker opens the store. Work lost with a worker or a
node is submitted again by the driver, which alone knows what is recorded.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Any, TypeAlias

import torch

from trust_tta.bench.config import RunConfig
from trust_tta.bench.experiment import CellSequence, Experiment, fingerprints
from trust_tta.bench.processes import REFUSALS, PlannedExperiment
from trust_tta.bench.sweep import (
    POLL_SECONDS,
    CellWriter,
    FinishedCell,
    SequenceRunner,
    failure_text,
    unfinished_sequences,
)
from trust_tta.distributed.cluster import versions
from trust_tta.distributed.file_transfer import FileBundle, pack, with_absolute_paths
from trust_tta.errors import ConfigError, DataError, TrustError, one_line
from trust_tta.progress import SILENT, Progress, Silent
from trust_tta.results.record import CellKey
from trust_tta.results.store import ResultStore

MAX_ATTEMPTS = 8  # at a sequence whose workers die: one that never fits into memory must come to an end
REPORT_SECONDS = 0.5  # between two reports of progress
QUEUE_SECONDS = 10.0  # for the message queue to answer
SPARE_TASKS = 1  # queued at the cluster, so that no worker is idle


@dataclass(frozen=True)
class TaskResources:
    """The resources of one task, which runs a sequence of cells."""

    cpus: int = 1
    gpus: float = 0.0

    def slots(self, resources: Mapping[str, float]) -> int:
        """The number of tasks that a cluster can run at once."""
        slots = int(resources.get("CPU", 0) / self.cpus)
        return min(slots, int(resources.get("GPU", 0) / self.gpus)) if self.gpus else slots


def choose_resources(
    device: str, resources: Mapping[str, float], *, cpus: int = 1, gpus: float | None = None
) -> TaskResources:
    """The resources of each task: a whole GPU if the device is cuda, or if it is auto and the cluster has one."""
    present = resources.get("GPU", 0.0)
    if gpus is None:
        gpus = 1.0 if device.startswith("cuda") or (device == "auto" and present) else 0.0
    if ":" in device:
        raise ConfigError(f"device {device}: the cluster chooses the GPU; give cuda, auto or cpu with --engine ray")
    if device == "cpu" and gpus:
        raise ConfigError(f"--gpus {gpus:g} with the device cpu: omit it, or give --device cuda")
    resources_per_task = TaskResources(cpus, gpus)
    if resources_per_task.slots(resources) < 1:
        there = f"{resources.get('CPU', 0):g} CPUs and {present:g} GPUs in all"
        raise ConfigError(f"a cell asks for {cpus} CPUs and {gpus:g} GPUs, and the cluster has {there}; ask for less")
    return resources_per_task


# Messages


@dataclass(frozen=True, eq=False)
class ExperimentPayload:
    """An experiment as it is sent to a worker: once, however many of its sequences run there."""

    config: RunConfig
    planned: PlannedExperiment
    files: FileBundle
    versions: Mapping[str, str]


@dataclass(frozen=True)
class Refused:
    """The reason why a worker cannot run an experiment."""

    error: TrustError


@dataclass(frozen=True)
class Failed:
    """The failure of the cell that a sequence had reached."""

    message: str


Outcome: TypeAlias = FinishedCell | Failed | Refused
Message: TypeAlias = int | FinishedCell  # int: batches


class MessageQueue:
    """An actor that holds messages of workers until the driver takes them; results repeat lost messages."""

    def __init__(self) -> None:
        self.messages: list[tuple[Any, ...]] = []

    def post(self, *message: Any) -> None:
        self.messages.append(message)

    def take(self) -> list[tuple[Any, ...]]:
        taken, self.messages = self.messages, []
        return taken


# On a worker


def run_sequence(payloads: list[Any], number: int, threads: int, send: Callable[[Message], None]) -> list[Outcome]:
    """Run the sequence with this number as a task. `payloads` holds a reference, resolved once per worker process."""
    torch.set_num_threads(threads)
    try:
        runner = _open(payloads[0])
        sequence = runner.experiment.plan.sequences[number]
        _check_data(runner.experiment, sequence)
        runner.check(sequence)
    except REFUSALS as error:
        return [Refused(error)]
    outcomes: list[Outcome] = []
    reporter = _ProgressReporter(send)
    try:
        for found in runner.results(sequence, reporter):
            reporter.send_now()
            send(found)
            outcomes.append(found)
    except Exception as error:  # the other sequences are still worth running
        outcomes.append(Failed(failure_text(error)))
    return outcomes


class MessageSender:
    """Sends the messages of one task without blocking."""

    def __init__(self, queue: Any, run: int) -> None:
        self.queue, self.run = queue, run

    def __call__(self, message: Message) -> None:
        self.queue.post.remote(self.run, message)


@lru_cache(maxsize=1)
def _open(payload: Any) -> SequenceRunner:
    import ray

    return open_payload(ray.get(payload))


def open_payload(payload: ExperimentPayload) -> SequenceRunner:
    """Open the experiment with this machine's files."""
    mine = versions()
    other = [
        f"{name} {mine[name]} instead of {wanted}" for name, wanted in payload.versions.items() if mine[name] != wanted
    ]
    if other:
        raise ConfigError(f"a worker has {', '.join(other)}; install the same versions on every node")
    config, plan = payload.files.unpack(payload.config, payload.planned.plan)
    return SequenceRunner(Experiment(config, plan=plan), recorded=payload.planned.config.to_json())


def _check_data(experiment: Experiment, sequence: CellSequence) -> None:
    """Refuse images other than those that the keys of the sequence name."""
    config, cells = experiment.config, experiment.domains_of(sequence)
    found = list(fingerprints(config, cells, experiment.plan.preprocessing))
    if found != [key.fingerprint for key in sequence.keys]:
        names = ", ".join(dict.fromkeys(cell.name for cell in cells))
        raise DataError(
            f"the images of {config.data.dataset} ({names}) on a worker differ from those of the driver; "
            f"put the same files under {config.data.root} on every node"
        )


class _ProgressReporter(Silent):
    """Sends the number of finished batches, at most twice a second."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        self.send, self.batches, self.last = send, 0, time.monotonic()

    def advance(self, n: int = 1) -> None:
        self.batches += n
        if time.monotonic() - self.last >= REPORT_SECONDS:
            self.send_now()

    def send_now(self) -> None:
        self.send(self.batches)
        self.batches, self.last = 0, time.monotonic()


# On the driver


@dataclass(eq=False)
class _SequenceTask:
    """A submitted sequence; each attempt has a new id."""

    id: int
    number: int  # of its experiment
    index: int  # of the sequence in the plan
    unfinished: list[CellKey]
    attempts: int = 1
    reported: int = 0  # batches, in this attempt
    shown: int = 0  # batches, in any


def run_on_cluster(
    experiments: Mapping[int, PlannedExperiment],
    *,
    ray: ModuleType,
    resources_per_task: TaskResources,
    sequences: int,
    max_tasks: int | None = None,
    progress: Progress = SILENT,
) -> dict[int, TrustError]:
    """Run experiments on the cluster that `ray` is connected to; returns the errors of those that could not run."""
    with ExitStack() as stack:
        paths = dict.fromkeys(each.config.store for each in experiments.values())
        stores = {path: stack.enter_context(ResultStore(path)) for path in paths}
        del sequences  # the number of workers is that of the cluster
        driver = _Driver(ray, experiments, stores, resources_per_task, progress)
        try:
            driver.run(max_tasks)
        finally:
            driver.end()
        return driver.refused


class _Driver:
    """Submits tasks, handles their messages, and writes results."""

    def __init__(
        self,
        ray: ModuleType,
        experiments: Mapping[int, PlannedExperiment],
        stores: Mapping[str, ResultStore],
        resources_per_task: TaskResources,
        progress: Progress,
    ) -> None:
        self.ray, self.experiments, self.resources_per_task, self.progress = (
            ray,
            experiments,
            resources_per_task,
            progress,
        )
        self.stores = {number: stores[each.config.store] for number, each in experiments.items()}
        self.writers = {
            number: CellWriter(each.config, each.plan, self.stores[number], progress, prefix=each.prefix)
            for number, each in experiments.items()
        }
        self.payloads = {number: ray.put(_make_payload(each)) for number, each in experiments.items()}
        self.refused: dict[int, TrustError] = {}
        self.running: dict[Any, _SequenceTask] = {}
        self.waiting: deque[tuple[int, int]] = deque()
        self.to_retry: deque[_SequenceTask] = deque()
        self.claimed_elsewhere: set[tuple[int, int]] = set()
        self.last_checked = 0.0
        options = {"num_cpus": resources_per_task.cpus, "num_gpus": resources_per_task.gpus, "max_retries": 0}
        self.task = ray.remote(**options)(run_sequence)
        self.queue = ray.remote(num_cpus=0)(MessageQueue).remote()
        self.ids = itertools.count()

    def run(self, max_tasks: int | None) -> None:
        self.waiting.extend(self._unsettled())
        announced = False
        while self.waiting or self.running or self.to_retry or self.claimed_elsewhere:
            self._submit_tasks(max_tasks or self.resources_per_task.slots(self.ray.cluster_resources()) + SPARE_TASKS)
            if self.running:
                self._poll()
            else:
                if self.claimed_elsewhere and not announced:
                    cells = sum(len(self._sequence(*place).keys) for place in self.claimed_elsewhere)
                    self.progress.note(f"waiting for cells that another process runs: {cells}")
                    announced = True
                time.sleep(POLL_SECONDS)
            if self.claimed_elsewhere and time.monotonic() - self.last_checked >= POLL_SECONDS:
                self.waiting.extend(place for place in self._unsettled() if place in self.claimed_elsewhere)
                self.claimed_elsewhere, self.last_checked = set(), time.monotonic()
            self.progress.advance(0)
            for store in self.stores.values():
                store.heartbeat()

    def end(self) -> None:
        for task in self.running:
            self.ray.cancel(task, force=True)
        self.running.clear()
        self.ray.kill(self.queue)

    def _unsettled(self) -> Iterator[tuple[int, int]]:
        for number, each in self.experiments.items():
            if number not in self.refused:
                left = {id(sequence) for sequence in unfinished_sequences(each.plan.sequences, self.stores[number])}
                yield from ((number, i) for i, sequence in enumerate(each.plan.sequences) if id(sequence) in left)

    def _sequence(self, number: int, index: int) -> CellSequence:
        return self.experiments[number].plan.sequences[index]

    def _submit_tasks(self, max_tasks: int) -> None:
        while self.to_retry and len(self.running) < max_tasks:
            self._submit(self.to_retry.popleft())
        while self.waiting and len(self.running) < max_tasks:
            number, index = self.waiting.popleft()
            wanted = self.stores[number].claim_all(self._sequence(number, index).keys)
            if wanted:
                self._submit(_SequenceTask(0, number, index, list(wanted)))
            else:
                self.claimed_elsewhere.add((number, index))  # by another process, unless that has finished it

    def _submit(self, run: _SequenceTask) -> None:
        run.id = next(self.ids)
        teller = MessageSender(self.queue, run.id)
        self.running[self.task.remote([self.payloads[run.number]], run.index, self.resources_per_task.cpus, teller)] = (
            run
        )

    def _poll(self) -> None:
        ready, _ = self.ray.wait(list(self.running), num_returns=1, timeout=POLL_SECONDS)
        self._read_messages()
        for task in ready:
            run = self.running.pop(task, None)
            if run is None:  # its experiment was refused a moment ago
                continue
            try:
                outcomes: list[Outcome] = self.ray.get(task)
            except self.ray.exceptions.RayTaskError as error:  # not the cell failed: the worker lacks something
                self._refuse(run.number, worker_error(error))
            except self.ray.exceptions.RayError as error:
                self._retry(run, error)
            else:
                for message in outcomes:
                    self._handle(run, message)
                if not run.unfinished:  # whatever messages are still on their way
                    self._handle(run, sum(self._sequence(run.number, run.index).batches) - run.reported)

    def _read_messages(self) -> None:
        """Handle the messages so far; a message queue that died is replaced."""
        runs = {run.id: run for run in self.running.values()}
        try:
            messages: list[tuple[int, Message]] = self.ray.get(self.queue.take.remote(), timeout=QUEUE_SECONDS)
        except self.ray.exceptions.RayActorError:
            self.queue = self.ray.remote(num_cpus=0)(MessageQueue).remote()
        except self.ray.exceptions.GetTimeoutError:  # a busy machine
            return
        else:
            for number, message in messages:
                if number in runs:
                    self._handle(runs[number], message)

    def _handle(self, run: _SequenceTask, message: Message | Outcome) -> None:
        sequence, writer = self._sequence(run.number, run.index), self.writers[run.number]
        if isinstance(message, int):
            run.reported += message
            self.progress.advance(max(0, run.reported - run.shown) * sequence.cost)
            run.shown = max(run.shown, run.reported)
        elif isinstance(message, Refused):
            self._refuse(run.number, message.error)
        elif isinstance(message, Failed):
            writer.fail(sequence, run.unfinished, message.message)
        elif message.key in run.unfinished:  # the others were recorded before
            writer.finish(sequence, message)
            run.unfinished.remove(message.key)

    def _retry(self, run: _SequenceTask, error: Exception) -> None:
        """Submit the sequence of a worker that died again, up to a number of attempts."""
        if run.attempts >= MAX_ATTEMPTS:
            sequence = self._sequence(run.number, run.index)
            message = f"its worker died {MAX_ATTEMPTS} times ({type(error).__name__}); has the node enough memory?"
            self.writers[run.number].fail(sequence, run.unfinished, message)
            return
        self.progress.note(f"a worker died ({type(error).__name__}); its cells are run again")
        run.attempts, run.reported = run.attempts + 1, 0
        self.to_retry.append(run)

    def _refuse(self, number: int, error: TrustError) -> None:
        self.refused.setdefault(number, error)
        self.waiting = deque(place for place in self.waiting if place[0] != number)
        self.claimed_elsewhere = {place for place in self.claimed_elsewhere if place[0] != number}
        self.to_retry = deque(run for run in self.to_retry if run.number != number)
        for task in [task for task, run in self.running.items() if run.number == number]:
            del self.running[task]
            self.ray.cancel(task, force=True)


def _make_payload(planned: PlannedExperiment) -> ExperimentPayload:
    config, plan = with_absolute_paths(planned.config, planned.plan)
    whole = PlannedExperiment(planned.config, plan, planned.prefix)
    return ExperimentPayload(config, whole, pack(config, plan), versions())


def worker_error(error: Exception) -> TrustError:
    """The error that a task raised, in one line."""
    cause = getattr(error, "cause", None) or error
    if isinstance(cause, TrustError):
        return cause
    if isinstance(cause, ImportError):
        return ConfigError(f"a worker cannot import what it needs ({cause}); install trust-tta on every node")
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return TrustError(f"a worker cannot run the cells: {one_line(lines[-1] if lines else repr(cause), longest=400)}")
