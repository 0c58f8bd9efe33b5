"""Tasks of the training loop: checks, augmentation, loss and metric.

Augmentation (crop, flip, cutout, cutmix) works on whole batches on the device. It has no noise, blur, color or
contrast, so that the corruptions of the benchmarks stay unseen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Generator, Tensor, nn

from trust_tta.data.images import check_labels, check_pixels
from trust_tta.errors import ConfigError, DataError
from trust_tta.training.recipe import Channels, Recipe, TrainRecipe

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
    """The functions of a task.

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
        check_classes(labels, len(images), classes=classes)
        if recipe.crop_padding >= min(images.shape[1:3]):
            raise ConfigError(
                f"images of {images.shape[1]}x{images.shape[2]} pixels with crop_padding {recipe.crop_padding}; "
                "give a padding smaller than the images"
            )

    def sample(
        samples: Samples, chosen: Tensor, recipe: TrainRecipe, generator: Generator, plain: bool
    ) -> tuple[Tensor, Tensor]:
        pixels = crop_and_flip(
            samples.images, chosen, padding=recipe.crop_padding, flip=recipe.flip, generator=generator
        )
        inputs = normalize(pixels, samples.scale, samples.shift)
        targets = F.one_hot(samples.labels[chosen], classes).float()
        if not plain and recipe.cutout:
            inputs = cut_out(inputs, side=recipe.cutout, generator=generator)
        if not plain and recipe.cutmix:
            inputs, targets = cutmix(inputs, targets, share=recipe.cutmix, generator=generator)
        return inputs, targets

    def loss(logits: Tensor, targets: Tensor, recipe: TrainRecipe) -> Tensor:
        return F.cross_entropy(logits.float(), targets, label_smoothing=recipe.label_smoothing)

    return Task(check, sample, loss, accuracy)


def label_type(labels: NDArray[Any]) -> type[np.integer[Any]]:
    """The integer type of stored labels: uint8 for masks, int64 for image labels."""
    return np.uint8 if labels.ndim > 1 else np.int64


def accuracy(predictions: Tensor, labels: Tensor) -> float:
    return float((predictions == labels).double().mean())


def check_images(images: NDArray[Any]) -> None:
    """Refuse arrays that are not uint8 (n, h, w, 3), and empty ones."""
    if not len(check_pixels(images, "images are")):
        raise DataError("there are no images; give at least one")


def check_classes(labels: NDArray[Any], images: int, *, classes: int) -> None:
    """Refuse labels that are not one integer below `classes` for each image."""
    if not len(check_labels(labels, "labels are", count=images)):
        raise DataError("there are no images; give at least one")
    if not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        raise DataError(
            f"labels run from {labels.min()} to {labels.max()} but the network has {classes} classes; "
            f"create it with num_classes={int(labels.max()) + 1}"
        )


# augmentation


def channel_constants(mean: Sequence[float], std: Sequence[float], device: torch.device) -> tuple[Tensor, Tensor]:
    """Scale and shift (3, 1, 1) with which `pixels * scale - shift` is normalized."""
    deviation = torch.tensor(std, dtype=torch.float64)
    scale, shift = 1 / (255 * deviation), torch.tensor(mean, dtype=torch.float64) / deviation
    return tuple(t.float().view(3, 1, 1).to(device) for t in (scale, shift))  # type: ignore[return-value]


def normalize(images: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """uint8 (n, h, w, 3) to float32 (n, 3, h, w), channels last in memory."""
    return images.permute(0, 3, 1, 2).float().mul_(scale).sub_(shift)


def crop_and_flip(images: Tensor, chosen: Tensor, *, padding: int, flip: bool, generator: Generator) -> Tensor:
    """Random crops of the reflected images at `chosen` (n,), half of them mirrored: (N, h, w, 3) to (n, h, w, 3)."""
    height, width = images.shape[1:3]
    device, n = images.device, len(chosen)
    top, left = torch.randint(-padding, padding + 1, (2, n, 1), generator=generator, device=device)
    rows = _reflect(top + torch.arange(height, device=device), height)
    columns = _reflect(left + torch.arange(width, device=device), width)
    if flip:
        mirrored = torch.rand(n, 1, generator=generator, device=device) < 0.5
        columns = torch.where(mirrored, columns.flip(1), columns)
    return images[chosen[:, None, None], rows[:, :, None], columns[:, None, :]]


def cut_out(inputs: Tensor, *, side: int, generator: Generator) -> Tensor:
    """Set one square of each normalized image (n, 3, h, w) to zero; it may extend beyond the border."""
    n, _, height, width = inputs.shape
    sides = torch.full((n,), side, device=inputs.device)
    rows, columns = _spans(sides, height, generator), _spans(sides, width, generator)
    return inputs.masked_fill((rows[:, :, None] & columns[:, None, :])[:, None], 0)


def cutmix(inputs: Tensor, targets: Tensor, *, share: float, generator: Generator) -> tuple[Tensor, Tensor]:
    """Paste a rectangle of its neighbor into a `share` of the images, and mix the targets by area.

    inputs (n, 3, h, w), targets (n, classes), both float.
    """
    n, _, height, width = inputs.shape
    chance, kept = torch.rand(2, n, generator=generator, device=inputs.device)
    side = (1 - kept).sqrt()
    rows = _spans((side * height).round().long(), height, generator)
    columns = _spans((side * width).round().long(), width, generator) & (chance < share)[:, None]
    pasted = rows[:, :, None] & columns[:, None, :]
    mixed = torch.where(pasted[:, None], inputs.roll(1, 0), inputs)
    return mixed, torch.lerp(targets, targets.roll(1, 0), pasted.float().mean((1, 2))[:, None])


def _reflect(index: Tensor, size: int) -> Tensor:
    """Indices past either end, less than `size` away, mirrored at the outermost pixel."""
    return (size - 1) - ((size - 1) - index.abs()).abs()


def _spans(lengths: Tensor, size: int, generator: Generator) -> Tensor:
    """Masks (n, size) of spans with `lengths` (n,) around uniformly drawn places, cut at the ends."""
    center = torch.randint(0, size, lengths.shape, generator=generator, device=lengths.device)
    first = (center - lengths // 2)[:, None]
    place = torch.arange(size, device=lengths.device)
    return (place >= first) & (place < first + lengths[:, None])


# scores, and BatchNorm statistics of averaged weights


@torch.no_grad()
def evaluate(
    model: nn.Module,
    images: NDArray[np.uint8],
    labels: NDArray[Any],
    *,
    mean: Channels,
    std: Channels,
    metric: Callable[[Tensor, Tensor], float] = accuracy,
    batch_size: int | None = None,
) -> float:
    """The metric of the network's predictions for images uint8 (n, h, w, 3); leaves it in evaluation mode."""
    model.eval()
    truth = torch.from_numpy(np.array(labels, dtype=label_type(labels)))
    batches = _batches(model, images, mean, std, batch_size or evaluation_batch(images))
    predictions = torch.cat([model(inputs).argmax(1).to(truth.dtype) for inputs in batches])
    return metric(predictions, truth.to(predictions.device))


@torch.no_grad()
def recalibrate(
    model: nn.Module,
    images: NDArray[np.uint8],
    *,
    mean: Channels,
    std: Channels,
    forward: Callable[[nn.Module, Tensor], Any] | None = None,
    batch_size: int | None = None,
) -> None:
    """Replace the running statistics of every BatchNorm by their mean over whole batches of `images` (n, h, w, 3).

    `forward(model, inputs)` replaces the call of the model if a prediction does not pass through all of them. Batches
    are drawn at random, since files are sorted by class and statistics of one class differ from those of all.
    """
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    size = min(batch_size or evaluation_batch(images), len(images))
    model.eval()
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # a plain mean over batches
        norm.train()
    whole = len(images) // size * size  # a smaller last batch would weigh too much
    drawn = np.random.default_rng(0).permutation(len(images))[:whole]
    for inputs in _batches(model, images, mean, std, size, drawn):
        forward(model, inputs) if forward else model(inputs)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
        norm.eval()


def evaluation_batch(images: NDArray[np.uint8]) -> int:
    """The batch size without gradients: as many pixels as 1000 images of 32 x 32."""
    height, width = (int(side) for side in images.shape[1:3])
    return max(16, 1000 * 32 * 32 // (height * width))


def _batches(
    model: nn.Module,
    images: NDArray[np.uint8],
    mean: Channels,
    std: Channels,
    batch_size: int,
    order: NDArray[np.int64] | None = None,
) -> Iterator[Tensor]:
    """Normalized images of each batch, on the device of the network."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    scale, shift = channel_constants(mean, std, device)
    indices = np.arange(len(images)) if order is None else order
    for start in range(0, len(indices), batch_size):
        batch = torch.from_numpy(images[indices[start : start + batch_size]]).to(device)
        yield normalize(batch, scale, shift)
