"""Trainings on a Ray cluster; a task that is repeated because its worker died continues from its saved epoch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

from trust_tta.bench.environment import choose_device
from trust_tta.bench.sweep import POLL_SECONDS
from trust_tta.distributed.sweeps import MAX_ATTEMPTS, TaskResources, worker_error
from trust_tta.errors import TrustError
from trust_tta.progress import SILENT, Progress
from trust_tta.training.runs import NoteForwarder, TrainedFiles, TrainingJob


def run_training(training: TrainingJob, queue: Any) -> TrainedFiles | TrustError:
    """Run a training as a task; the node chooses the device."""

    def send(line: str) -> None:
        queue.actor.put_nowait.remote(f"{training.target}: {line}")  # does not wait, and may be lost

    try:
        return replace(training, device=str(choose_device(training.device))).run(NoteForwarder(send))
    except TrustError as error:
        return error


def train_on_cluster(
    trainings: Sequence[TrainingJob], *, ray: ModuleType, resources: TaskResources, progress: Progress = SILENT
) -> list[TrainedFiles | TrustError]:
    """Run trainings on the connected cluster; returns the files or the error of each."""
    from ray.util.queue import Queue

    queue = Queue(actor_options={"num_cpus": 0, "max_restarts": -1})
    options = {"num_cpus": resources.cpus, "num_gpus": resources.gpus, "max_retries": MAX_ATTEMPTS - 1}
    task = ray.remote(**options)(run_training)
    ended: dict[int, TrainedFiles | TrustError] = {}
    running = {task.remote(replace(each, threads=resources.cpus), queue): i for i, each in enumerate(trainings)}
    progress.start(len(trainings), "networks")
    try:
        while running:
            ready, _ = ray.wait(list(running), num_returns=1, timeout=POLL_SECONDS)
            try:
                for line in queue.get_nowait_batch(queue.qsize()):
                    progress.note(line)
            except ray.exceptions.RayError:  # it is restarting, or the machine is busy
                pass
            for done in ready:
                number = running.pop(done)
                try:
                    ended[number] = ray.get(done)
                except ray.exceptions.RayTaskError as error:
                    ended[number] = worker_error(error)
                except ray.exceptions.RayError as error:
                    ended[number] = TrustError(f"its worker died {MAX_ATTEMPTS} times ({type(error).__name__})")
                progress.advance()
    finally:
        for left in running:
            ray.cancel(left, force=True)
        queue.shutdown(force=True)
    progress.finish()
    return [ended[number] for number in range(len(trainings))]
