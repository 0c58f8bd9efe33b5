"""`train` and `finetune`: train a network on a data set and write its files."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trust_tta.data.dataset import Dataset
from trust_tta.data.file_io import hash_array
from trust_tta.data.segmentation import SegmentationDataset
from trust_tta.data.streams import Batches
from trust_tta.errors import ConfigError
from trust_tta.models.base import ScanNetwork
from trust_tta.models.checkpoint import Checkpoint
from trust_tta.models.networks import require_ours
from trust_tta.models.typed import create_model
from trust_tta.models.upernet import UPerNet
from trust_tta.preprocessing import Preprocessing
from trust_tta.progress import SILENT, Progress
from trust_tta.training import artifacts
from trust_tta.training.data import TrainingData, decoding_threads, read_arrays
from trust_tta.training.linear_probe import extract_features, fit_head, score_head
from trust_tta.training.loop import fit
from trust_tta.training.recipe import FinetuneRecipe, SegmentationRecipe, TrainRecipe, default_size, recipe_for
from trust_tta.training.segmentation import segmentation, segmentation_preprocessing
from trust_tta.training.tasks import Task, classification, evaluate, recalibrate

MIN_INITIALIZED = 0.5  # fraction of a network's weights that `init` must have
FEATURE_BATCH = 128  # images per forward pass of a frozen backbone

Arrays: TypeAlias = tuple[NDArray[np.uint8], NDArray[Any]]


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A trained network in evaluation mode, the folder of its files, and its training record (train.json)."""

    model: ScanNetwork | UPerNet
    folder: Path
    record: Mapping[str, Any]

    @property
    def weights(self) -> Path:
        return self.folder / artifacts.WEIGHTS

    @property
    def accuracy(self) -> float:
        return float(list(self.record["accuracy"].values())[-1])


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

    Without a size, images for segmentation keep theirs. Training starts from random weights, or from those of `init`
    whose names and shapes the network has.

    Writes model.safetensors, train.json and card.md into the folder `out`, and resumes a run that was stopped from the
    state kept there. The default recipe depends on the data and the size.

    >>> data = open_training_data("cifar10", "data")
    >>> train(data, TrainRecipe(epochs=50), out="runs/nano", device="cuda").accuracy
    """
    start_time = time.perf_counter()
    folder = Path(out)
    dense = isinstance(data.train, SegmentationDataset)
    recipe = recipe or (SegmentationRecipe() if dense else recipe_for(data.spec.name, size=size))
    torch.manual_seed(recipe.seed)
    network = _create_network(model, overrides or {}, data, init, progress).to(device)
    preprocessing, images, held_out, task = _prepare(data, recipe, size=size, progress=progress)
    network.preprocessing, network.classes = preprocessing, data.train.class_names
    batch_size = recipe.batch_size if dense else None
    mean, std = preprocessing.mean, preprocessing.std

    def score(candidate: nn.Module) -> float:
        return evaluate(candidate, *held_out, mean=mean, std=std, metric=task.metric, batch_size=batch_size)

    origin_hash, state = None if init is None else init.sha256, folder / artifacts.STATE
    fitted = fit(
        network, *images, recipe, task=task, init=origin_hash, state_path=state, evaluate=score, progress=progress
    )
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
    _announce(data, progress)
    torch.manual_seed(recipe.seed)
    loaded = checkpoint.load(device=device, num_classes=len(data.train.class_names), head=False)
    model = require_ours(loaded, by="fine-tuning")
    model.preprocessing, model.classes = preprocessing, data.train.class_names
    features = _extract_features(model, data.train, preprocessing, progress)
    result = fit_head(model, features, data.train.labels, recipe, progress=progress)
    held_out = _extract_features(model, data.held_out, preprocessing, progress)
    accuracy = {
        "classifier on its training images": result.accuracy,
        "classifier": score_head(model, held_out, data.held_out.labels),
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


def _create_network(
    model: str, overrides: Mapping[str, Any], data: TrainingData, init: Checkpoint | None, progress: Progress
) -> ScanNetwork | UPerNet:
    """The network for the task of `data`, with the weights of `init` that fit by name and shape."""
    created, found = create_model(model, num_classes=len(data.train.class_names), **overrides), data.spec.name
    if not isinstance(data.train, SegmentationDataset):
        network: ScanNetwork | UPerNet = require_ours(created, by=f"training on {found}")
    elif isinstance(created, UPerNet):
        network = created
    else:
        raise ConfigError(
            f"{found} has segmentation masks, but the network is a {type(created).__name__}; "
            "give one whose name starts with upernet_"
        )
    if init is not None:
        own = network.state_dict()
        fitting = {name: v for name, v in init.state.items() if name in own and own[name].shape == v.shape}
        share = sum(value.numel() for value in fitting.values()) / sum(value.numel() for value in own.values())
        if share < MIN_INITIALIZED:
            raise ConfigError(
                f"{init.origin} ({init.variant}) has {100 * share:.0f} % of the network's weights, by name and shape;"
                " start from a checkpoint of the same variant, or of one that differs in its norms or its classifier"
            )
        network.load_state_dict(fitting, strict=False)
        progress.note(f"{100 * share:.1f} % of the weights start from {init.origin}, the others at random")
    return network


def _extract_features(model: ScanNetwork, dataset: Dataset, preprocessing: Preprocessing, progress: Progress) -> Tensor:
    order, workers = np.arange(len(dataset)), decoding_threads(dataset)
    batches = Batches(dataset, order, FEATURE_BATCH, preprocessing=preprocessing, workers=workers)
    progress.start(len(dataset), "features")
    features = extract_features(model, (batch.images for batch in batches), progress=progress)
    progress.finish()
    return features


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
