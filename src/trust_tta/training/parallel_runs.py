"""Run several trainings in parallel processes, such as one per held-out domain."""

from __future__ import annotations

import multiprocessing
import signal
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeAlias

import torch

from trust_tta.errors import TrustError
from trust_tta.progress import SILENT, Progress
from trust_tta.training.data import open_training_data
from trust_tta.training.recipe import SegmentationRecipe, TrainRecipe
from trust_tta.training.runs import TrainedFiles, train

Message: TypeAlias = str | TrainedFiles | TrustError


@dataclass(frozen=True)
class TrainingJob:
    """The arguments of one training, picklable for another process."""

    data: str
    root: str
    target: str | None
    out: str
    recipe: TrainRecipe | SegmentationRecipe
    model: str
    overrides: Mapping[str, Any]
    size: int | None
    share: float
    device: str
    threads: int | None = 1  # None: as many as there are

    def run(self, progress: Progress = SILENT) -> TrainedFiles:
        """Train, or continue an interrupted training in `out`."""
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        done = train(
            open_training_data(self.data, self.root, target=self.target, share=self.share, seed=self.recipe.seed),
            self.recipe,
            out=self.out,
            model=self.model,
            overrides=self.overrides,
            size=self.size,
            device=self.device,
            progress=progress,
        )
        return TrainedFiles(folder=done.folder, record=done.record)


def train_in_parallel(
    trainings: Sequence[TrainingJob], *, processes: int, progress: Progress = SILENT
) -> list[TrainedFiles | TrustError]:
    """Run the trainings, at most `processes` at once; returns the files or the error of each."""
    ended: dict[int, TrainedFiles | TrustError] = {}
    waiting, running = deque(range(len(trainings))), dict[Connection, tuple[int, BaseProcess]]()
    context = multiprocessing.get_context("spawn")
    progress.start(len(trainings), "networks")
    try:
        while waiting or running:
            while waiting and len(running) < processes:
                number = waiting.popleft()
                here, there = context.Pipe(duplex=False)
                started = context.Process(target=_run_worker, args=(there, trainings[number]), daemon=True)
                started.start()
                there.close()
                running[here] = number, started
            for ready in wait(list(running)):
                connection = next(c for c in running if c is ready)
                number, process = running[connection]
                message: Message
                try:
                    message = connection.recv()
                except (EOFError, OSError):
                    process.join()
                    message = TrustError(
                        f"the process that trained without {trainings[number].target} died with code "
                        f"{process.exitcode}; run the same command again to continue"
                    )
                if isinstance(message, str):
                    progress.note(f"{trainings[number].target}: {message}")
                else:
                    ended[number] = message
                    del running[connection]
                    process.join()
                    progress.advance()
    finally:
        for _, process in running.values():
            process.terminate()
            process.join()
    progress.finish()
    return [ended[number] for number in range(len(trainings))]


def _run_worker(connection: Connection, training: TrainingJob) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one ends it
    try:
        connection.send(training.run(Lines(connection.send)))
    except TrustError as error:
        connection.send(error)


class Lines(Progress):
    """Progress that forwards its notes and nothing else."""

    def __init__(self, send: Any) -> None:
        self.send = send

    def note(self, text: str) -> None:
        self.send(text)
