"""Sweeps on a Ray cluster: sequences of cells are its tasks, and only the process that started them writes results.

A task runs a sequence and returns what the store keeps of it; no worker opens the store. Work lost with a worker or a
node is handed out again by the driver, which alone knows what is recorded.
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
from trust_tta.bench.experiment import Experiment
from trust_tta.bench.plan import CellSequence, fingerprints
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
from trust_tta.distributed.file_transfer import Parcel, pack, with_absolute_paths
from trust_tta.errors import ConfigError, DataError, TrustError, one_line
from trust_tta.progress import SILENT, Progress, Silent
from trust_tta.results.record import CellKey
from trust_tta.results.store import ResultStore

ATTEMPTS = 8  # at a sequence whose workers die: one that never fits into memory must come to an end
TELL_SECONDS = 0.5  # between two reports of progress
MAIL_SECONDS = 10.0  # for the mailbox to answer
SPARE = 1  # tasks that wait at the cluster, so that no worker waits for the driver


@dataclass(frozen=True)
class Share:
    """The resources of a node that a sequence of cells gets."""

    cpus: int = 1
    gpus: float = 0.0

    def slots(self, resources: Mapping[str, float]) -> int:
        """How many sequences a cluster can run at once."""
        slots = int(resources.get("CPU", 0) / self.cpus)
        return min(slots, int(resources.get("GPU", 0) / self.gpus)) if self.gpus else slots


def choose_share(device: str, resources: Mapping[str, float], *, cpus: int = 1, gpus: float | None = None) -> Share:
    """The share of each sequence: a whole GPU if the device is cuda, or if it is auto and the cluster has one."""
    present = resources.get("GPU", 0.0)
    if gpus is None:
        gpus = 1.0 if device.startswith("cuda") or (device == "auto" and present) else 0.0
    if ":" in device:
        raise ConfigError(f"device {device}: the cluster chooses the GPU; give cuda, auto or cpu with --engine ray")
    if device == "cpu" and gpus:
        raise ConfigError(f"--gpus {gpus:g} with the device cpu: omit it, or give --device cuda")
    share = Share(cpus, gpus)
    if share.slots(resources) < 1:
        there = f"{resources.get('CPU', 0):g} CPUs and {present:g} GPUs in all"
        raise ConfigError(f"a cell asks for {cpus} CPUs and {gpus:g} GPUs, and the cluster has {there}; ask for less")
    return share


# What is sent


@dataclass(frozen=True, eq=False)
class Job:
    """An experiment as it is sent to a worker: once, however many of its sequences run there."""

    config: RunConfig
    planned: PlannedExperiment
    parcel: Parcel
    versions: Mapping[str, str]


@dataclass(frozen=True)
class Refused:
    """Why a worker cannot run an experiment."""

    error: TrustError


@dataclass(frozen=True)
class Failed:
    """The failure of the cell that a sequence had reached."""

    message: str


Ending: TypeAlias = FinishedCell | Failed | Refused
Message: TypeAlias = int | FinishedCell  # int: batches


class Mailbox:
    """An actor that holds messages of workers until the driver takes them; results repeat what it loses."""

    def __init__(self) -> None:
        self.messages: list[tuple[Any, ...]] = []

    def post(self, *message: Any) -> None:
        self.messages.append(message)

    def take(self) -> list[tuple[Any, ...]]:
        taken, self.messages = self.messages, []
        return taken


# On a worker


def run_sequence(jobs: list[Any], number: int, threads: int, tell: Callable[[Message], None]) -> list[Ending]:
    """A task: run the sequence with this number. `jobs` holds a reference, resolved once per worker process."""
    torch.set_num_threads(threads)
    try:
        runner = _open(jobs[0])
        sequence = runner.experiment.plan.sequences[number]
        _check_data(runner.experiment, sequence)
        runner.check(sequence)
    except REFUSALS as error:
        return [Refused(error)]
    ended: list[Ending] = []
    pulse = _Pulse(tell)
    try:
        for found in runner.results(sequence, pulse):
            pulse.tell_now()
            tell(found)
            ended.append(found)
    except Exception as error:  # the other sequences are still worth running
        ended.append(Failed(failure_text(error)))
    return ended


class Teller:
    """Posts the messages of one run without waiting."""

    def __init__(self, mailbox: Any, run: int) -> None:
        self.mailbox, self.run = mailbox, run

    def __call__(self, message: Message) -> None:
        self.mailbox.post.remote(self.run, message)


@lru_cache(maxsize=1)
def _open(job: Any) -> SequenceRunner:
    import ray

    return open_job(ray.get(job))


def open_job(job: Job) -> SequenceRunner:
    """The experiment over this machine's files."""
    mine = versions()
    other = [
        f"{name} {mine[name]} instead of {wanted}" for name, wanted in job.versions.items() if mine[name] != wanted
    ]
    if other:
        raise ConfigError(f"a worker has {', '.join(other)}; install the same versions on every node")
    config, plan = job.parcel.unpack(job.config, job.planned.plan)
    return SequenceRunner(Experiment(config, plan=plan), recorded=job.planned.config.to_json())


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


class _Pulse(Silent):
    """Reports now and then how many batches are done."""

    def __init__(self, tell: Callable[[Message], None]) -> None:
        self.tell, self.batches, self.last = tell, 0, time.monotonic()

    def advance(self, n: int = 1) -> None:
        self.batches += n
        if time.monotonic() - self.last >= TELL_SECONDS:
            self.tell_now()

    def tell_now(self) -> None:
        self.tell(self.batches)
        self.batches, self.last = 0, time.monotonic()


# On the driver


@dataclass(eq=False)
class _Run:
    """A sequence that was handed out, under a new id each time."""

    id: int
    number: int  # of its experiment
    index: int  # of the sequence in the plan
    unfinished: list[CellKey]
    attempts: int = 1
    told: int = 0  # batches, in this attempt
    shown: int = 0  # batches, in any


def share_out(
    experiments: Mapping[int, PlannedExperiment],
    *,
    ray: ModuleType,
    share: Share,
    sequences: int,
    at_once: int | None = None,
    progress: Progress = SILENT,
) -> dict[int, TrustError]:
    """Run assignments on the cluster that `ray` is connected to; why some could not be run, by number."""
    with ExitStack() as stack:
        paths = dict.fromkeys(each.config.store for each in experiments.values())
        stores = {path: stack.enter_context(ResultStore(path)) for path in paths}
        del sequences  # the number of workers is that of the cluster
        driver = _Driver(ray, experiments, stores, share, progress)
        try:
            driver.run(at_once)
        finally:
            driver.end()
        return driver.refused


class _Driver:
    """Hands out sequences, listens, and writes."""

    def __init__(
        self,
        ray: ModuleType,
        experiments: Mapping[int, PlannedExperiment],
        stores: Mapping[str, ResultStore],
        share: Share,
        progress: Progress,
    ) -> None:
        self.ray, self.experiments, self.share, self.progress = ray, experiments, share, progress
        self.stores = {number: stores[each.config.store] for number, each in experiments.items()}
        self.writers = {
            number: CellWriter(each.config, each.plan, self.stores[number], progress, prefix=each.prefix)
            for number, each in experiments.items()
        }
        self.jobs = {number: ray.put(_job(each)) for number, each in experiments.items()}
        self.refused: dict[int, TrustError] = {}
        self.running: dict[Any, _Run] = {}
        self.waiting: deque[tuple[int, int]] = deque()
        self.lost: deque[_Run] = deque()
        self.held: set[tuple[int, int]] = set()
        self.looked = 0.0
        options = {"num_cpus": share.cpus, "num_gpus": share.gpus, "max_retries": 0}
        self.task = ray.remote(**options)(run_sequence)
        self.mailbox = ray.remote(num_cpus=0)(Mailbox).remote()
        self.ids = itertools.count()

    def run(self, at_once: int | None) -> None:
        self.waiting.extend(self._unsettled())
        announced = False
        while self.waiting or self.running or self.lost or self.held:
            self._fill(at_once or self.share.slots(self.ray.cluster_resources()) + SPARE)
            if self.running:
                self._listen()
            else:
                if self.held and not announced:
                    cells = sum(len(self._sequence(*place).keys) for place in self.held)
                    self.progress.note(f"waiting for cells that another process runs: {cells}")
                    announced = True
                time.sleep(POLL_SECONDS)
            if self.held and time.monotonic() - self.looked >= POLL_SECONDS:
                self.waiting.extend(place for place in self._unsettled() if place in self.held)
                self.held, self.looked = set(), time.monotonic()
            self.progress.advance(0)
            for store in self.stores.values():
                store.heartbeat()

    def end(self) -> None:
        for task in self.running:
            self.ray.cancel(task, force=True)
        self.running.clear()
        self.ray.kill(self.mailbox)

    def _unsettled(self) -> Iterator[tuple[int, int]]:
        for number, each in self.experiments.items():
            if number not in self.refused:
                left = {id(sequence) for sequence in unfinished_sequences(each.plan.sequences, self.stores[number])}
                yield from ((number, i) for i, sequence in enumerate(each.plan.sequences) if id(sequence) in left)

    def _sequence(self, number: int, index: int) -> CellSequence:
        return self.experiments[number].plan.sequences[index]

    def _fill(self, at_once: int) -> None:
        while self.lost and len(self.running) < at_once:
            self._hand_out(self.lost.popleft())
        while self.waiting and len(self.running) < at_once:
            number, index = self.waiting.popleft()
            wanted = self.stores[number].claim_all(self._sequence(number, index).keys)
            if wanted:
                self._hand_out(_Run(0, number, index, list(wanted)))
            else:
                self.held.add((number, index))  # by another process, unless that has finished it

    def _hand_out(self, run: _Run) -> None:
        run.id = next(self.ids)
        teller = Teller(self.mailbox, run.id)
        self.running[self.task.remote([self.jobs[run.number]], run.index, self.share.cpus, teller)] = run

    def _listen(self) -> None:
        ready, _ = self.ray.wait(list(self.running), num_returns=1, timeout=POLL_SECONDS)
        self._read_mail()
        for task in ready:
            run = self.running.pop(task, None)
            if run is None:  # its experiment was refused a moment ago
                continue
            try:
                ended: list[Ending] = self.ray.get(task)
            except self.ray.exceptions.RayTaskError as error:  # not the cell failed: the worker lacks something
                self._refuse(run.number, of_worker(error))
            except self.ray.exceptions.RayError as error:
                self._take_back(run, error)
            else:
                for message in ended:
                    self._hear(run, message)
                if not run.unfinished:  # whatever messages are still on their way
                    self._hear(run, sum(self._sequence(run.number, run.index).batches) - run.told)

    def _read_mail(self) -> None:
        """Handle the messages so far; a mailbox that died is replaced."""
        runs = {run.id: run for run in self.running.values()}
        try:
            mail: list[tuple[int, Message]] = self.ray.get(self.mailbox.take.remote(), timeout=MAIL_SECONDS)
        except self.ray.exceptions.RayActorError:
            self.mailbox = self.ray.remote(num_cpus=0)(Mailbox).remote()
        except self.ray.exceptions.GetTimeoutError:  # a busy machine
            return
        else:
            for number, message in mail:
                if number in runs:
                    self._hear(runs[number], message)

    def _hear(self, run: _Run, message: Message | Ending) -> None:
        sequence, writer = self._sequence(run.number, run.index), self.writers[run.number]
        if isinstance(message, int):
            run.told += message
            self.progress.advance(max(0, run.told - run.shown) * sequence.cost)
            run.shown = max(run.shown, run.told)
        elif isinstance(message, Refused):
            self._refuse(run.number, message.error)
        elif isinstance(message, Failed):
            writer.fail(sequence, run.unfinished, message.message)
        elif message.key in run.unfinished:  # the others were recorded before
            writer.finish(sequence, message)
            run.unfinished.remove(message.key)

    def _take_back(self, run: _Run, error: Exception) -> None:
        """A worker or a node died; run its sequence again, but not forever."""
        if run.attempts >= ATTEMPTS:
            sequence = self._sequence(run.number, run.index)
            message = f"its worker died {ATTEMPTS} times ({type(error).__name__}); has the node enough memory?"
            self.writers[run.number].fail(sequence, run.unfinished, message)
            return
        self.progress.note(f"a worker died ({type(error).__name__}); its cells are run again")
        run.attempts, run.told = run.attempts + 1, 0
        self.lost.append(run)

    def _refuse(self, number: int, error: TrustError) -> None:
        self.refused.setdefault(number, error)
        self.waiting = deque(place for place in self.waiting if place[0] != number)
        self.held = {place for place in self.held if place[0] != number}
        self.lost = deque(run for run in self.lost if run.number != number)
        for task in [task for task, run in self.running.items() if run.number == number]:
            del self.running[task]
            self.ray.cancel(task, force=True)


def _job(planned: PlannedExperiment) -> Job:
    config, plan = with_absolute_paths(planned.config, planned.plan)
    whole = PlannedExperiment(planned.config, plan, planned.prefix)
    return Job(config, whole, pack(config, plan), versions())


def of_worker(error: Exception) -> TrustError:
    """The error that a task raised, in one line."""
    cause = getattr(error, "cause", None) or error
    if isinstance(cause, TrustError):
        return cause
    if isinstance(cause, ImportError):
        return ConfigError(f"a worker cannot import what it needs ({cause}); install trust-tta on every node")
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return TrustError(f"a worker cannot run the cells: {one_line(lines[-1] if lines else repr(cause), longest=400)}")
