"""Trainings as values, and several of them at once, each in a process of its own: one per domain that is left out."""

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
from trust_tta.progress import SILENT, Progress, Silent
from trust_tta.training.data import TrainingData, open_training_data
from trust_tta.training.recipe import SegmentationRecipe, TrainRecipe, is_segmentation
from trust_tta.training.runs import Written, train
from trust_tta.training.segmentation import SegmentationTrainingData, open_segmentation_data

Message: TypeAlias = str | Written | TrustError


@dataclass(frozen=True)
class Training:
    """One training, which can be sent to another process."""

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

    def run(self, progress: Progress = SILENT) -> Written:
        """Train, or continue what `out` holds."""
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        done = train(
            self._open_data(),
            self.recipe,
            out=self.out,
            model=self.model,
            overrides=self.overrides,
            size=self.size,
            device=self.device,
            progress=progress,
        )
        return Written(folder=done.folder, record=done.record)

    def _open_data(self) -> TrainingData | SegmentationTrainingData:
        seed = self.recipe.seed
        if is_segmentation(self.data):
            return open_segmentation_data(self.data, self.root, share=self.share, seed=seed)
        return open_training_data(self.data, self.root, target=self.target, share=self.share, seed=seed)


def train_side_by_side(
    trainings: Sequence[Training], *, processes: int, progress: Progress = SILENT
) -> list[Written | TrustError]:
    """Run trainings in at most `processes` at once; for each, what was written or why nothing was."""
    ended: dict[int, Written | TrustError] = {}
    waiting, running = deque(range(len(trainings))), dict[Connection, tuple[int, BaseProcess]]()
    progress.start(len(trainings), "networks")
    try:
        while waiting or running:
            while waiting and len(running) < processes:
                number = waiting.popleft()
                connection, process = _start(trainings[number])
                running[connection] = number, process
            for ready in wait(list(running)):
                connection = next(c for c in running if c is ready)
                number, process = running[connection]
                message = _hear(connection, process, trainings[number])
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


def _start(training: Training) -> tuple[Connection, BaseProcess]:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(there, training), daemon=True)
    process.start()
    there.close()
    return here, process


def _hear(connection: Connection, process: BaseProcess, training: Training) -> Message:
    try:
        message: Message = connection.recv()
    except (EOFError, OSError):
        process.join()
        return TrustError(
            f"the process that trained without {training.target} died with code {process.exitcode}; "
            "run the same command again to continue"
        )
    return message


def _work(connection: Connection, training: Training) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one ends it
    try:
        connection.send(training.run(Lines(connection.send)))
    except TrustError as error:
        connection.send(error)


class Lines(Silent):
    """Progress that passes on only the notes."""

    def __init__(self, tell: Any) -> None:
        self.tell = tell

    def note(self, text: str) -> None:
        self.tell(text)
