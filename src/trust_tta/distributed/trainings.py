"""Several trainings on a Ray cluster: each is a task, which continues from its folder when its worker dies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

from trust_tta.bench.environment import choose_device
from trust_tta.bench.sweep import POLL_SECONDS
from trust_tta.distributed.sweeps import MAX_ATTEMPTS, QUEUE_SECONDS, MessageQueue, TaskResources, worker_error
from trust_tta.errors import TrustError
from trust_tta.progress import SILENT, Progress
from trust_tta.training.parallel_runs import Lines, TrainingJob
from trust_tta.training.runs import TrainedFiles


def run_training(training: TrainingJob, queue: Any) -> TrainedFiles | TrustError:
    """Run a training as a task, on a device of its node."""

    def send(line: str) -> None:
        queue.post.remote(f"{training.target}: {line}")

    try:
        return replace(training, device=str(choose_device(training.device))).run(Lines(send))
    except TrustError as error:
        return error


def train_on_cluster(
    trainings: Sequence[TrainingJob], *, ray: ModuleType, resources: TaskResources, progress: Progress = SILENT
) -> list[TrainedFiles | TrustError]:
    """Run trainings on the cluster that `ray` is connected to; returns the files or the error of each."""
    queue = ray.remote(num_cpus=0, max_restarts=-1)(MessageQueue).remote()
    task = ray.remote(num_cpus=resources.cpus, num_gpus=resources.gpus, max_retries=0)(run_training)

    def start(training: TrainingJob) -> Any:
        return task.remote(replace(training, threads=resources.cpus), queue)

    ended: dict[int, TrainedFiles | TrustError] = {}
    running = {start(training): (number, 1) for number, training in enumerate(trainings)}
    progress.start(len(trainings), "networks")
    try:
        while running:
            ready, _ = ray.wait(list(running), num_returns=1, timeout=POLL_SECONDS)
            _show_messages(ray, queue, progress)
            for done in ready:
                number, attempts = running.pop(done)
                found = _result(ray, done, last=attempts >= MAX_ATTEMPTS)
                if found is None:
                    progress.note(f"the worker that trained without {trainings[number].target} died; another continues")
                    running[start(trainings[number])] = number, attempts + 1
                    continue
                ended[number] = found
                progress.advance()
    finally:
        for left in running:
            ray.cancel(left, force=True)
        ray.kill(queue)
    progress.finish()
    return [ended[number] for number in range(len(trainings))]


def _show_messages(ray: ModuleType, queue: Any, progress: Progress) -> None:
    try:
        for (line,) in ray.get(queue.take.remote(), timeout=QUEUE_SECONDS):
            progress.note(line)
    except ray.exceptions.RayError:  # it is restarting, or the machine is busy
        pass


def _result(ray: ModuleType, done: Any, *, last: bool) -> TrainedFiles | TrustError | None:
    """The result of a task; None if it should be tried again."""
    try:
        found: TrainedFiles | TrustError = ray.get(done)
        return found
    except ray.exceptions.RayTaskError as error:
        return worker_error(error)
    except ray.exceptions.RayError as error:
        return TrustError(f"its worker died {MAX_ATTEMPTS} times ({type(error).__name__})") if last else None
