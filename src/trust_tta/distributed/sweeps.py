"""Sweeps on a Ray cluster: each sequence of cells is a task, a generator that yields finished cells to the driver.

Only the driver opens the store. If a worker or node dies, Ray repeats its task and yields the cells that the driver has
not received.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import torch

from trust_tta.bench.config import RunConfig
from trust_tta.bench.environment import collect_provenance
from trust_tta.bench.experiment import CellSequence, Experiment, ExperimentPlan, fingerprints
from trust_tta.bench.processes import EXPERIMENT_ERRORS
from trust_tta.bench.sweep import (
    POLL_SECONDS,
    CellWriter,
    FinishedCell,
    check_sequence,
    failure_text,
    run_sequence,
    unfinished,
)
from trust_tta.distributed.cluster import versions
from trust_tta.errors import ConfigError, DataError, TrustError, one_line
from trust_tta.progress import SILENT, Progress
from trust_tta.results.record import CellKey, Provenance
from trust_tta.results.store import ResultStore

MAX_ATTEMPTS = 8  # at a sequence whose workers die: one that never fits into memory must come to an end
SPARE_TASKS = 1  # queued at the cluster, so that no worker is idle

Outcome: TypeAlias = FinishedCell | TrustError | str
"""A finished cell, an error that prevents the experiment on a worker, or the message of a failed cell."""


@dataclass(frozen=True)
class TaskResources:
    """The resources of one task."""

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


# On a worker


@dataclass(frozen=True, eq=False)
class ExperimentPayload:
    config: RunConfig  # with absolute paths
    plan: ExperimentPlan
    versions: Mapping[str, str]


def run_task(payloads: list[Any], number: int, threads: int) -> Iterator[Outcome]:
    """Run a sequence as a task. `payloads` is a list of one reference, which each worker process resolves once."""
    torch.set_num_threads(threads)
    try:
        experiment, provenance = _open(payloads[0])
        sequence = experiment.plan.sequences[number]
        data, cells = experiment.config.data, experiment.domains_of(sequence)
        if list(fingerprints(experiment.plan, cells)) != [key.fingerprint for key in sequence.keys]:
            names = ", ".join(dict.fromkeys(cell.name for cell in cells))
            differing = f"the images of {data.dataset} ({names}) on a worker differ from those of the driver"
            raise DataError(f"{differing}; put the same files under {data.root} on every node")
        check_sequence(experiment, sequence)
    except EXPERIMENT_ERRORS as error:
        yield error
        return
    try:
        yield from run_sequence(experiment, sequence, provenance)
    except Exception as error:  # the other sequences are still worth running
        yield failure_text(error)


@lru_cache(maxsize=1)
def _open(reference: Any) -> tuple[Experiment, Provenance]:
    import ray

    payload: ExperimentPayload = ray.get(reference)
    pairs = [(name, found, payload.versions.get(name)) for name, found in versions().items()]
    other = [f"{name} {found} instead of {wanted}" for name, found, wanted in pairs if found != wanted]
    if other:
        raise ConfigError(f"a worker has {', '.join(other)}; install the same versions on every node")
    experiment = Experiment(payload.config, plan=payload.plan)
    config = payload.plan.config  # as it was given, without absolute paths
    return experiment, collect_provenance(device=experiment.device, dtype=config.dtype, config=config.to_json())


# On the driver


@dataclass(eq=False)
class _SequenceTask:
    number: int  # of its experiment
    index: int  # of the sequence in the plan
    unfinished: list[CellKey]


def run_on_cluster(
    plans: Mapping[int, ExperimentPlan],
    *,
    ray: ModuleType,
    resources_per_task: TaskResources,
    sequences: int,
    max_tasks: int | None = None,
    progress: Progress = SILENT,
) -> dict[int, TrustError]:
    """Run experiments on the connected cluster; returns the errors of those that could not be run, by number."""
    del sequences  # the number of workers is that of the cluster
    with ExitStack() as stack:
        paths = dict.fromkeys(plan.config.store for plan in plans.values())
        stores = {path: stack.enter_context(ResultStore(path)) for path in paths}
        driver = _Driver(ray, plans, stores, resources_per_task, progress)
        try:
            driver.run(max_tasks)
        finally:
            for task in driver.running:
                ray.cancel(task, force=True)
        return driver.refused


class _Driver:
    """Submits tasks and writes the cells that they yield."""

    def __init__(
        self,
        ray: ModuleType,
        plans: Mapping[int, ExperimentPlan],
        stores: Mapping[str, ResultStore],
        resources_per_task: TaskResources,
        progress: Progress,
    ) -> None:
        self.ray, self.plans, self.progress = ray, plans, progress
        self.resources_per_task = resources_per_task
        self.stores = {number: stores[plan.config.store] for number, plan in plans.items()}
        self.writers = {
            number: CellWriter(plan, self.stores[number], progress, several=len(plans) > 1)
            for number, plan in plans.items()
        }
        self.payloads = {number: ray.put(make_payload(plan)) for number, plan in plans.items()}
        self.refused: dict[int, TrustError] = {}
        self.running: dict[Any, _SequenceTask] = {}  # by the generator of their outcomes
        self.waiting: deque[tuple[int, int]] = deque()
        self.claimed_elsewhere: set[tuple[int, int]] = set()
        options = {"num_cpus": resources_per_task.cpus, "num_gpus": resources_per_task.gpus}
        self.task = ray.remote(**options, num_returns="streaming", max_retries=MAX_ATTEMPTS - 1)(run_task)

    def run(self, max_tasks: int | None) -> None:
        self.waiting.extend(self._unfinished_sequences())
        announced, last_checked = False, 0.0
        while self.waiting or self.running or self.claimed_elsewhere:
            slots = max_tasks or self.resources_per_task.slots(self.ray.cluster_resources()) + SPARE_TASKS
            while self.waiting and len(self.running) < slots:
                number, index = self.waiting.popleft()
                if wanted := self.stores[number].claim(self._sequence(number, index).keys):
                    task = self.task.remote([self.payloads[number]], index, self.resources_per_task.cpus)
                    self.running[task] = _SequenceTask(number, index, list(wanted))
                else:
                    self.claimed_elsewhere.add((number, index))  # by another process, unless that has finished it
            if self.running:
                self._poll()
            else:
                if self.claimed_elsewhere and not announced:
                    cells = sum(len(self._sequence(*place).keys) for place in self.claimed_elsewhere)
                    self.progress.note(f"waiting for cells that another process runs: {cells}")
                    announced = True
                time.sleep(POLL_SECONDS)
            if self.claimed_elsewhere and time.monotonic() - last_checked >= POLL_SECONDS:
                self.waiting.extend(place for place in self._unfinished_sequences() if place in self.claimed_elsewhere)
                self.claimed_elsewhere, last_checked = set(), time.monotonic()
            self.progress.advance(0)
            for store in self.stores.values():
                store.heartbeat()

    def _unfinished_sequences(self) -> Iterator[tuple[int, int]]:
        for number, plan in self.plans.items():
            if number not in self.refused:
                left = {id(sequence) for sequence in unfinished(plan.sequences, self.stores[number])}
                yield from ((number, i) for i, sequence in enumerate(plan.sequences) if id(sequence) in left)

    def _sequence(self, number: int, index: int) -> CellSequence:
        return self.plans[number].sequences[index]

    def _poll(self) -> None:
        """Handle the next outcome of a task that has one."""
        ready, _ = self.ray.wait(list(self.running), num_returns=1, timeout=POLL_SECONDS, fetch_local=False)
        for task in ready:
            run = self.running[task]
            sequence, writer = self._sequence(run.number, run.index), self.writers[run.number]
            try:
                outcome: Outcome = self.ray.get(next(task))
            except StopIteration:
                del self.running[task]
            except self.ray.exceptions.RayTaskError as error:  # not the cell failed: the worker lacks something
                self._refuse(run.number, worker_error(error))
            except self.ray.exceptions.RayError as error:
                del self.running[task]
                message = f"its worker died {MAX_ATTEMPTS} times ({type(error).__name__}); has the node enough memory?"
                writer.fail(sequence, run.unfinished, message)
            else:
                if isinstance(outcome, TrustError):
                    self._refuse(run.number, outcome)
                elif isinstance(outcome, str):
                    writer.fail(sequence, run.unfinished, outcome)
                else:
                    self.progress.advance(sequence.batches[sequence.keys.index(outcome.key)] * sequence.cost)
                    if outcome.key in run.unfinished:  # the others were recorded before
                        writer.finish(sequence, outcome)
                        run.unfinished.remove(outcome.key)

    def _refuse(self, number: int, error: TrustError) -> None:
        self.refused.setdefault(number, error)
        self.waiting = deque(place for place in self.waiting if place[0] != number)
        self.claimed_elsewhere = {place for place in self.claimed_elsewhere if place[0] != number}
        for task in [task for task, run in self.running.items() if run.number == number]:
            del self.running[task]
            self.ray.cancel(task, force=True)


def make_payload(plan: ExperimentPlan) -> ExperimentPayload:
    """The experiment with absolute paths, for processes in other working directories."""
    data = plan.config.data
    given = {name: getattr(data, name) for name in ("root", "images", "labels")}
    absolute = {name: path and os.path.abspath(path) for name, path in given.items()}
    checkpoints = {d: replace(c, file=c.file and Path(os.path.abspath(c.file))) for d, c in plan.checkpoints.items()}
    config = plan.config.changed(data=data.changed(**absolute))
    return ExperimentPayload(config, replace(plan, checkpoints=checkpoints), versions())


def worker_error(error: Exception) -> TrustError:
    """The error of a task as a TrustError of one line."""
    cause = getattr(error, "cause", None) or error
    if isinstance(cause, TrustError):
        return cause
    if isinstance(cause, ImportError):
        return ConfigError(f"a worker cannot import what it needs ({cause}); install trust-tta on every node")
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return TrustError(f"a worker cannot run the cells: {one_line(lines[-1] if lines else repr(cause), longest=400)}")
