"""Several trainings on a Ray cluster, each a task: repeated if its worker dies, it continues from its folder."""

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
from trust_tta.training.runs import Lines, TrainedFiles, TrainingJob

QUEUE_SECONDS = 10.0  # for the message queue to answer


class MessageQueue:
    """An actor that holds lines of workers until the driver takes them."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def post(self, line: str) -> None:
        self.lines.append(line)

    def take(self) -> list[str]:
        taken, self.lines = self.lines, []
        return taken


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
    options = {"num_cpus": resources.cpus, "num_gpus": resources.gpus, "max_retries": MAX_ATTEMPTS - 1}
    task = ray.remote(**options)(run_training)
    ended: dict[int, TrainedFiles | TrustError] = {}
    running = {task.remote(replace(each, threads=resources.cpus), queue): i for i, each in enumerate(trainings)}
    progress.start(len(trainings), "networks")
    try:
        while running:
            ready, _ = ray.wait(list(running), num_returns=1, timeout=POLL_SECONDS)
            try:
                for line in ray.get(queue.take.remote(), timeout=QUEUE_SECONDS):
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
        ray.kill(queue)
    progress.finish()
    return [ended[number] for number in range(len(trainings))]
