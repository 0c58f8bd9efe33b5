"""`train` and `finetune`: train a network on a data set and write its files, in one process or several."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from trust_tta.data.file_io import hash_array
from trust_tta.data.segmentation import SegmentationDataset
from trust_tta.errors import ConfigError, TrustError
from trust_tta.models.base import ScanNetwork
from trust_tta.models.checkpoint import Checkpoint
from trust_tta.models.networks import require_ours
from trust_tta.models.typed import create_model
from trust_tta.models.upernet import UPerNet
from trust_tta.preprocessing import Preprocessing
from trust_tta.progress import SILENT, Progress
from trust_tta.training import artifacts
from trust_tta.training.data import LazyImages, TrainingData, open_training_data, read_arrays
from trust_tta.training.linear_probe import fit_head, score_head
from trust_tta.training.loop import fit
from trust_tta.training.recipe import FinetuneRecipe, SegmentationRecipe, TrainRecipe, default_size, recipe_for
from trust_tta.training.segmentation import segmentation, segmentation_preprocessing
from trust_tta.training.tasks import Task, classification, evaluate, recalibrate

MIN_INITIALIZED = 0.5  # of a network's weights that a checkpoint to start from must have

Arrays: TypeAlias = tuple[NDArray[np.uint8], NDArray[Any]]


@dataclass(frozen=True, kw_only=True)
class TrainedFiles:
    """The folder and the training record of a trained network."""

    folder: Path
    record: Mapping[str, Any]  # of train.json

    @property
    def weights(self) -> Path:
        return self.folder / artifacts.WEIGHTS

    @property
    def accuracy(self) -> float:
        return float(list(self.record["accuracy"].values())[-1])


@dataclass(frozen=True, kw_only=True)
class Trained(TrainedFiles):
    """The same with the network itself, on its device in evaluation mode."""

    model: ScanNetwork | UPerNet


def train(
    data: TrainingData,
    recipe: TrainRecipe | SegmentationRecipe | None = None,
    *,
    out: str | PathLike[str],
    model: str = "vmamba_nano",
    overrides: Mapping[str, Any] | None = None,
    size: int | None = None,
    init: Checkpoint | None = None,
    device: str | torch.device = "cpu",
    progress: Progress = SILENT,
) -> Trained:
    """Train the variant `model`, with `overrides` of its fields, on images of `size` pixels.

    For segmentation, images keep their size where none is given. Training starts from random weights, or from those of
    `init` whose names and shapes the network has.

    Writes model.safetensors, train.json and card.md into the folder `out`; a run that was stopped is continued from
    the state kept there. Without a recipe, the default one for the data and the size is taken.

    >>> data = open_training_data("cifar10", "data")
    >>> train(data, TrainRecipe(epochs=50), out="runs/nano", device="cuda").accuracy
    """
    start_time = time.perf_counter()
    folder = Path(out)
    dense = isinstance(data.train, SegmentationDataset)
    recipe = recipe or (SegmentationRecipe() if dense else recipe_for(data.spec.name, size=size))
    torch.manual_seed(recipe.seed)
    created = create_model(model, num_classes=len(data.train.class_names), **dict(overrides or {}))
    network = _require_fit(created, data).to(device)
    if init is not None:
        progress.note(_initialize(network, init))
    preprocessing, images, held_out, task = _prepare(data, recipe, size=size, progress=progress)
    network.preprocessing, network.classes = preprocessing, data.train.class_names
    batch_size = recipe.batch_size if dense else None
    mean, std = preprocessing.mean, preprocessing.std

    def score(candidate: nn.Module) -> float:
        return evaluate(candidate, *held_out, mean=mean, std=std, metric=task.metric, batch_size=batch_size)

    start = None if init is None else init.sha256
    file = folder / artifacts.STATE
    fitted = fit(network, *images, recipe, task=task, init=start, state_path=file, evaluate=score, progress=progress)
    average = fitted.average
    accuracy = {"averaged weights": score(average)}
    recalibrate(average, images[0], mean=mean, std=std, forward=task.forward, batch_size=batch_size)
    accuracy["averaged weights, new statistics"] = score(average)
    origin = artifacts.TrainingProvenance(
        variant=model,
        overrides=dict(overrides or {}),
        data=data,
        hashes={"train": hash_array(images[0]), data.measured_on: hash_array(held_out[0])},
        preprocessing=preprocessing,
        recipe=recipe.model_dump() | _provenance("init", init),
        license=None if init is None else init.license,
    )
    history, seconds = [asdict(epoch) for epoch in fitted.history], time.perf_counter() - start_time
    record = artifacts.write_network(folder, average, origin, accuracy=accuracy, history=history, seconds=seconds)
    return Trained(model=average, folder=folder, record=record)


def finetune(
    checkpoint: Checkpoint,
    data: TrainingData,
    *,
    recipe: FinetuneRecipe | None = None,
    out: str | PathLike[str],
    device: str | torch.device = "cpu",
    progress: Progress = SILENT,
) -> Trained:
    """Train a new classifier for the classes of `data` on the frozen backbone of `checkpoint`, as the paper does.

    Writes the same files as `train`; a network that is in `out` already is not replaced.
    """
    start_time = time.perf_counter()
    folder, recipe = Path(out), recipe or FinetuneRecipe()
    if (folder / artifacts.WEIGHTS).exists():
        raise ConfigError(
            f"'{folder / artifacts.WEIGHTS}' exists and would be lost; give another folder (--out), or delete it"
        )
    preprocessing = checkpoint.preprocessing.for_layout(data.spec.layout)
    chosen, held_out = LazyImages(data.train), LazyImages(data.held_out)
    _announce(data, progress)
    torch.manual_seed(recipe.seed)
    loaded = checkpoint.load(device=device, num_classes=len(data.train.class_names), head=False)
    model = require_ours(loaded, by="fine-tuning")
    model.preprocessing, model.classes = preprocessing, data.train.class_names
    result = fit_head(model, chosen, data.train.labels, recipe, preprocess=preprocessing, progress=progress)
    accuracy = {
        "classifier on its training images": result.accuracy,
        "classifier": score_head(model, held_out, data.held_out.labels, preprocess=preprocessing, progress=progress),
    }
    origin = artifacts.TrainingProvenance(
        variant=checkpoint.variant,
        overrides=checkpoint.fields,
        data=data,
        hashes={data.description: data.train.fingerprint, data.measured_on: data.held_out.fingerprint},
        preprocessing=preprocessing,
        recipe=recipe.model_dump() | _provenance("backbone", checkpoint),
        license=checkpoint.license,
    )
    history, seconds = [{"epoch": i, "loss": x} for i, x in enumerate(result.losses)], time.perf_counter() - start_time
    record = artifacts.write_network(
        folder,
        model,
        origin,
        accuracy=accuracy,
        history=history,
        seconds=seconds,
        description=artifacts.FINETUNED,
    )
    return Trained(model=model, folder=folder, record=record)


def _provenance(role: str, checkpoint: Checkpoint | None) -> dict[str, str]:
    if checkpoint is None:
        return {}
    return {role: Path(checkpoint.file or checkpoint.variant).name, f"{role}_sha256": checkpoint.sha256}


def _initialize(network: nn.Module, checkpoint: Checkpoint) -> str:
    """Copy the weights that fit the network by name and shape; returns a sentence on their share."""
    own, state = network.state_dict(), checkpoint.state
    found = {name: value for name, value in state.items() if name in own and own[name].shape == value.shape}
    share = sum(value.numel() for value in found.values()) / sum(value.numel() for value in own.values())
    if share < MIN_INITIALIZED:
        raise ConfigError(
            f"{checkpoint.origin} ({checkpoint.variant}) has {100 * share:.0f} % of the network's weights, by name and"
            " shape; start from a checkpoint of the same variant, or of one that differs in its norms or its classifier"
        )
    network.load_state_dict(found, strict=False)
    return f"{100 * share:.1f} % of the weights start from {checkpoint.origin}, the others at random"


def _require_fit(network: nn.Module, data: TrainingData) -> ScanNetwork | UPerNet:
    """Check that the network fits the task of the data: segmentation or classification."""
    if not isinstance(data.train, SegmentationDataset):
        return require_ours(network, by=f"training on {data.spec.name}")
    if not isinstance(network, UPerNet):
        raise ConfigError(
            f"{data.spec.name} has segmentation masks, but the network is a {type(network).__name__}; "
            "give one whose name starts with upernet_"
        )
    return network


def _prepare(
    data: TrainingData, recipe: TrainRecipe | SegmentationRecipe, *, size: int | None, progress: Progress
) -> tuple[Preprocessing, Arrays, Arrays, Task[Any]]:
    """The preprocessing, the images and labels to train on and those held out, and the task."""
    dense = isinstance(data.train, SegmentationDataset)
    if dense != isinstance(recipe, SegmentationRecipe):
        wanted = "segmentation masks; give a SegmentationRecipe" if dense else "image labels; give a TrainRecipe"
        raise ConfigError(f"{data.spec.name} has {wanted}")
    if isinstance(recipe, SegmentationRecipe):
        preprocessing = segmentation_preprocessing(data.train, recipe, size)
    else:
        side = size or default_size(data.spec.name)
        preprocessing = Preprocessing(size=side, resize=None, crop=False, mean=recipe.mean, std=recipe.std)
    _announce(data, progress)
    progress.start(len(data.train) + len(data.held_out), "reading images")
    images, held_out = (read_arrays(part, preprocessing, progress) for part in (data.train, data.held_out))
    progress.finish()
    classes = len(data.train.class_names)
    if isinstance(recipe, SegmentationRecipe):
        return preprocessing, images, held_out, segmentation(classes, images[1], recipe)
    return preprocessing, images, held_out, classification(classes)


def _announce(data: TrainingData, progress: Progress) -> None:
    train, held_out = len(data.train), len(data.held_out)
    progress.note(f"{train} images of {data.description} to train on, {held_out} {data.measured_on} images")


# several trainings in processes, such as one for each left-out domain


@dataclass(frozen=True)
class TrainingJob:
    """The arguments of one training, which can be pickled."""

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
    init: str | None = None  # a checkpoint
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
            init=None if self.init is None else Checkpoint.open(self.init),
            device=self.device,
            progress=progress,
        )
        return TrainedFiles(folder=done.folder, record=done.record)


def train_in_parallel(
    trainings: Sequence[TrainingJob], *, processes: int, progress: Progress = SILENT
) -> list[TrainedFiles | TrustError]:
    """Run each training in its own process, at most `processes` at once; returns the files or the error of each."""
    context = multiprocessing.get_context("spawn")
    started: list[BaseProcess] = []

    def run(training: TrainingJob) -> TrainedFiles | TrustError:
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=_run_worker, args=(there, training), daemon=True)
        process.start()
        started.append(process)
        there.close()
        try:
            while isinstance(message := here.recv(), str):
                progress.note(f"{training.target}: {message}")
        except (EOFError, OSError):
            process.join()
            message = TrustError(
                f"the process that trained without {training.target} died with code {process.exitcode}; "
                "run the same command again to continue"
            )
        process.join()
        progress.advance()
        ended: TrainedFiles | TrustError = message
        return ended

    progress.start(len(trainings), "networks")
    with ThreadPoolExecutor(processes) as pool:
        try:
            ended = list(pool.map(run, trainings))
        except BaseException:  # an interrupt too: the threads wait for their processes
            pool.shutdown(wait=False, cancel_futures=True)
            for process in started:
                process.terminate()
            raise
    progress.finish()
    return ended


def _run_worker(connection: Connection, training: TrainingJob) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one ends it
    try:
        connection.send(training.run(NoteForwarder(connection.send)))
    except TrustError as error:
        connection.send(error)


class NoteForwarder(Progress):
    """Forwards notes and ignores steps."""

    def __init__(self, send: Callable[[str], object]) -> None:
        self.send = send

    def note(self, text: str) -> None:
        self.send(text)
