"""Tasks of the training loop: checks, augmentation, loss and metric."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Generator, Tensor, nn

from trust_tta.errors import ConfigError, DataError
from trust_tta.training import augment
from trust_tta.training.recipe import Recipe, TrainRecipe

R = TypeVar("R", bound=Recipe)


@dataclass(frozen=True)
class Samples:
    """Training images uint8 (N, h, w, 3) and labels (N, ...) on the device, with the constants that normalize."""

    images: Tensor
    labels: Tensor
    scale: Tensor
    shift: Tensor


@dataclass(frozen=True)
class Task(Generic[R]):
    """The functions in which tasks differ.

    `check(images, labels, recipe)` refuses arrays that do not fit. `augment(samples, chosen, recipe, generator, plain)`
    draws inputs (n, 3, h, w) and targets for the images at `chosen` (n,); the last epochs are `plain`. `loss(outputs,
    targets, recipe)` is a scalar. `metric(predictions, labels)` scores class indices (n, ...) between 0 and 1.
    `forward(model, inputs)` returns the training outputs where they are not the predictions.
    """

    check: Callable[[NDArray[Any], NDArray[Any], R], None]
    augment: Callable[[Samples, Tensor, R, Generator, bool], tuple[Tensor, Tensor]]
    loss: Callable[[Any, Tensor, R], Tensor]
    metric: Callable[[Tensor, Tensor], float]
    forward: Callable[[nn.Module, Tensor], Any] | None = None
    score: str = "accuracy"  # the name of the metric


def classification(classes: int) -> Task[TrainRecipe]:
    """One label per image; targets (n, classes) are distributions, since mixed images belong to two classes."""

    def check(images: NDArray[Any], labels: NDArray[Any], recipe: TrainRecipe) -> None:
        check_images(images)
        check_labels(labels, len(images), classes=classes)
        if recipe.crop_padding >= min(images.shape[1:3]):
            raise ConfigError(
                f"images of {images.shape[1]}x{images.shape[2]} pixels with crop_padding {recipe.crop_padding}; "
                "give a padding smaller than the images"
            )

    def sample(
        samples: Samples, chosen: Tensor, recipe: TrainRecipe, generator: Generator, plain: bool
    ) -> tuple[Tensor, Tensor]:
        pixels = augment.crop_and_flip(
            samples.images, chosen, padding=recipe.crop_padding, flip=recipe.flip, generator=generator
        )
        inputs = augment.normalize(pixels, samples.scale, samples.shift)
        targets = F.one_hot(samples.labels[chosen], classes).float()
        if not plain and recipe.cutout:
            inputs = augment.cut_out(inputs, side=recipe.cutout, generator=generator)
        if not plain and recipe.mixup + recipe.cutmix > 0:
            shares = {"mixup": recipe.mixup, "cutmix": recipe.cutmix}
            inputs, targets = augment.mix(inputs, targets, **shares, generator=generator)
        return inputs, targets

    return Task(check, sample, _cross_entropy, accuracy)


def label_type(labels: NDArray[Any]) -> type[np.integer[Any]]:
    """The integer type of stored labels: uint8 for masks, int64 for image labels."""
    return np.uint8 if labels.ndim > 1 else np.int64


def accuracy(predictions: Tensor, labels: Tensor) -> float:
    """The fraction of correct predictions."""
    return float((predictions == labels).double().mean())


def check_images(images: NDArray[Any]) -> None:
    """Refuse arrays that are not uint8 (n, h, w, 3)."""
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[-1] != 3 or len(images) == 0:
        raise DataError(f"images are {images.dtype} {images.shape}; give uint8 (n, height, width, 3), n at least 1")


def check_labels(labels: NDArray[Any], images: int, *, classes: int | None = None) -> None:
    """Refuse labels that are not one integer below `classes` for each image."""
    if labels.dtype.kind not in "iu" or labels.shape != (images,) or not images:
        raise DataError(f"labels are {labels.dtype} {labels.shape}; give {images or 'some'} integers, one per image")
    if classes is not None and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        raise DataError(
            f"labels run from {labels.min()} to {labels.max()} but the network has {classes} classes; "
            f"create it with num_classes={int(labels.max()) + 1}"
        )


def _cross_entropy(logits: Tensor, targets: Tensor, recipe: TrainRecipe) -> Tensor:
    return F.cross_entropy(logits.float(), targets, label_smoothing=recipe.label_smoothing)
