"""Training for segmentation: random scales and crops, and the cross-entropy of both heads.

As in MMSegmentation, logits are resized to the labels, pixels labeled 255 are ignored, and the sum is divided by the
number of all pixels. There is no color augmentation: corruptions stay unseen.
"""

from __future__ import annotations

import functools
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Generator, Tensor, nn

from trust_tta.data.dataset import Dataset
from trust_tta.data.segmentation_metrics import IGNORED, count_confusion
from trust_tta.errors import DataError
from trust_tta.models.upernet import UPerNet
from trust_tta.ops.segmentation_logits import CoarseLogits, apply_in_chunks
from trust_tta.preprocessing import Preprocessing
from trust_tta.training.recipe import SegmentationRecipe
from trust_tta.training.tasks import Samples, Task, check_images, normalize

AUXILIARY_WEIGHT = 0.4
_EPSILON = 2.0**-23  # keeps the loss of a batch without labels at zero


def segmentation_preprocessing(dataset: Dataset, recipe: SegmentationRecipe, size: int | None) -> Preprocessing:
    """Resize to `size` x `size`; without a size, to the short side of the first image."""
    short = size or min(dataset.image(0).shape[:2])
    return Preprocessing(
        size=short,
        resize=None,
        crop=False,
        keep_ratio=size is None,
        mean=recipe.mean,
        std=recipe.std,
        interpolation="bilinear",
    )


def segmentation(classes: int, labels: NDArray[np.uint8], recipe: SegmentationRecipe) -> Task[SegmentationRecipe]:
    """The segmentation task; `labels` (n, h, w) are the masks from which class weights are computed."""
    weights = class_weights(labels, classes, recipe.balance) if recipe.balance else None

    def check(images: NDArray[Any], masks: NDArray[Any], _: SegmentationRecipe) -> None:
        check_images(images)
        if masks.dtype != np.uint8 or masks.shape != images.shape[:3]:
            raise DataError(f"labels are {masks.dtype} {masks.shape}; give uint8 {images.shape[:3]}")
        highest = int(masks[masks != IGNORED].max(initial=0))
        if highest >= classes:
            raise DataError(f"labels run up to {highest}, and the network has {classes} classes")

    def loss(outputs: tuple[Tensor, Tensor], targets: Tensor, recipe: SegmentationRecipe) -> Tensor:
        own = None if weights is None else weights.to(targets.device)
        return two_head_loss(*outputs, targets, auxiliary_weight=recipe.auxiliary_weight, weights=own)

    def mean_iou(predictions: Tensor, truth: Tensor) -> float:
        return count_confusion(predictions, truth, classes=classes).mean_iou

    def forward(model: nn.Module, inputs: Tensor) -> tuple[Tensor, Tensor]:
        return cast(UPerNet, model).forward_training(inputs)  # coarse logits of both heads

    return Task(check, scale_and_crop, loss, mean_iou, forward, "mean IoU")


def class_weights(labels: NDArray[np.uint8], classes: int, balance: float) -> Tensor:
    """Inverse frequencies to the power of `balance`, float32 (classes,), with a mean of 1 over the labeled pixels."""
    frequencies = torch.from_numpy(np.bincount(labels.reshape(-1), minlength=256)[:classes]).double()
    frequencies = frequencies / frequencies.sum().clamp_min(1)
    weights = torch.where(frequencies > 0, frequencies.clamp_min(1e-9) ** -balance, 0.0)
    return (weights / (weights * frequencies).sum().clamp_min(1e-9)).float()


def scale_and_crop(
    samples: Samples, chosen: Tensor, recipe: SegmentationRecipe, generator: Generator, plain: bool
) -> tuple[Tensor, Tensor]:
    """Windows of the images at `chosen` (n,), each scaled, half of them mirrored: (n, 3, h, w) and labels (n, h, w).

    Pixels outside of an image have the mean color and are ignored. `plain`: whole images at their own scale.
    """
    images, labels = normalize(samples.images[chosen], samples.scale, samples.shift), samples.labels[chosen]
    n, height, width = labels.shape
    low, high = (1.0, 1.0) if plain else recipe.scales
    draws = torch.rand(4, n, 1, generator=generator, device=labels.device)
    scale = low * (high / low) ** draws[0]  # as likely to halve an image as to double it
    rows, columns = _places(draws[1], scale, height), _places(draws[2], scale, width)
    if recipe.flip:
        columns = torch.where(draws[3] < 0.5, columns.flip(1), columns)
    grid = torch.stack(torch.broadcast_tensors(2 * columns[:, None] / width - 1, 2 * rows[:, :, None] / height - 1), -1)
    inputs = F.grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
    rows, columns = rows.floor().long()[:, :, None], columns.floor().long()[:, None]
    image = torch.arange(n, device=labels.device)[:, None, None]
    found = labels[image, rows.clamp(0, height - 1), columns.clamp(0, width - 1)]
    inside = (rows >= 0) & (rows < height) & (columns >= 0) & (columns < width)
    return inputs, torch.where(inside, found, torch.full_like(found, IGNORED))


def _places(draw: Tensor, scale: Tensor, size: int) -> Tensor:
    """Centers of the target pixels along one side of the image, (n, size), in source pixels."""
    start = draw * (scale * size - size)
    return (start + torch.arange(size, device=draw.device) + 0.5) / scale


def two_head_loss(
    main: Tensor,
    auxiliary: Tensor,
    labels: Tensor,
    *,
    auxiliary_weight: float = AUXILIARY_WEIGHT,
    weights: Tensor | None = None,
) -> Tensor:
    """The loss of the decoding head plus the weighted loss of the auxiliary head."""
    decoding, other = (segmentation_loss(logits, labels, weights=weights) for logits in (main, auxiliary))
    return decoding + auxiliary_weight * other


def segmentation_loss(logits: Tensor, labels: Tensor, *, weights: Tensor | None = None) -> Tensor:
    """Mean cross-entropy over all pixels, ignored ones too: coarse logits (n, classes, h', w'), labels (n, h, w)."""
    function = functools.partial(F.cross_entropy, weight=weights, ignore_index=IGNORED, reduction="none")
    pixels = CoarseLogits(logits, (labels.shape[1], labels.shape[2]))
    total = apply_in_chunks(function, pixels, labels.long()).sum()
    return total / (labels.numel() + _EPSILON)
