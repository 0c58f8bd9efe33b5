"""Recipes of training, declared once: files, flags, defaults and records derive from these schemas."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from trust_tta.data.registry import find_spec
from trust_tta.preprocessing import CIFAR10_MEAN, CIFAR10_STD, IMAGENET_MEAN, IMAGENET_STD
from trust_tta.schema import Count, Fraction, Natural, Positive, Rate, Schema, parse

BelowOne = Annotated[float, Field(ge=0, lt=1)]
Channels = tuple[float, float, float]


class Recipe(Schema):
    """Everything that determines a training run besides the data and the network."""

    epochs: Count = Field(default=100, description="passes over the training images")
    batch_size: Annotated[int, Field(ge=2)] = Field(
        default=512, description="images per step; BatchNorm needs at least 2"
    )
    lr: Positive = Field(default=3e-3, description="peak learning rate of AdamW")
    weight_decay: Rate = Field(default=0.05, description="on weights only: not on norms, biases and the scan's A and D")
    warmup_epochs: Rate = Field(default=5.0, description="epochs of linear warm-up, at most all of them")
    grad_clip: Rate = Field(default=1.0, description="largest norm of the gradient; 0 to disable")
    drop_path: BelowOne = Field(default=0.1, description="stochastic depth of the last block, rising linearly from 0")
    flip: bool = Field(default=True, description="mirror half of the images")
    plain_share: Fraction = Field(
        default=0.1,
        description="share of the epochs, the last ones, without cutout and cutmix, or without random scales",
    )
    ema_decay: BelowOne = Field(default=0.999, description="decay of the averaged weights; 0 keeps the last step")
    precision: Literal["float32", "bf16"] = Field(default="float32", description="number format of the forward pass")
    seed: Natural = Field(default=0, description="of weights, shuffling and augmentation")
    mean: Channels = Field(default=CIFAR10_MEAN, description="channel means subtracted from pixels in 0..1")
    std: tuple[Positive, Positive, Positive] = Field(default=CIFAR10_STD, description="channel deviations divided by")

    @field_validator("warmup_epochs")
    @classmethod
    def _within_epochs(cls, value: float, info: ValidationInfo) -> float:
        if "epochs" in info.data and value > info.data["epochs"]:
            raise ValueError(f"{value:g} is more than the {info.data['epochs']} epochs; give a value <= epochs")
        return value

    @property
    def plain_from(self) -> int:
        """The first of the last epochs, which use weaker augmentation."""
        return self.epochs - round(self.plain_share * self.epochs)

    def decay_lr(self, step: int, steps: int) -> float:
        """The factor of the learning rate, `step` of `steps` after the warm-up: half a cosine from 1 to 0."""
        return (1 + math.cos(math.pi * step / steps)) / 2


class TrainRecipe(Recipe):
    """Recipe for a classifier trained from scratch; the defaults fit CIFAR at 32 pixels."""

    label_smoothing: BelowOne = Field(default=0.1, description="share of the target spread over all classes")
    crop_padding: Natural = Field(default=4, description="pixels reflected at each border before a random crop")
    cutout: Natural = Field(default=8, description="side of the square set to the mean; 0 to disable")
    cutmix: Fraction = Field(default=0.5, description="share of the images that get a rectangle of another")


class SegmentationRecipe(Recipe):
    """Recipe for a segmentation network trained from scratch; the defaults fit CamVid at 240 x 180 pixels."""

    batch_size: Annotated[int, Field(ge=2)] = 16
    lr: Positive = 1e-3
    weight_decay: Rate = 0.01
    plain_share: Fraction = 0.0
    mean: Channels = IMAGENET_MEAN
    std: tuple[Positive, Positive, Positive] = IMAGENET_STD
    power: Positive = Field(default=1.0, description="of the polynomial by which the learning rate falls to 0")
    auxiliary_weight: Rate = Field(default=0.4, description="weight of the auxiliary head's loss")
    scales: tuple[Positive, Positive] = Field(default=(0.5, 2.0), description="smallest and largest scale of an image")
    balance: Fraction = Field(
        default=0.0, description="exponent of the classes' inverse frequencies in their weights; 0 weighs all alike"
    )

    @field_validator("scales")
    @classmethod
    def _ordered(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not value[0] <= value[1] <= 16:
            raise ValueError(f"{value} must be two numbers, the second at least the first and at most 16")
        return value

    def decay_lr(self, step: int, steps: int) -> float:
        """The factor of the learning rate, `step` of `steps` after the warm-up: a polynomial from 1 to 0."""
        return float((1 - step / steps) ** self.power)


class FinetuneRecipe(Schema):
    """Recipe for a classifier on a frozen backbone; the defaults are the paper's."""

    epochs: Count = Field(default=300, description="passes over the features")
    lr: Positive = Field(default=5e-4, description="learning rate of AdamW")
    batch_size: Count = Field(default=128, description="images per step")
    seed: Natural = Field(default=0, description="of the classifier's weights and the shuffling")
    weight_decay: Rate = Field(default=0.0, description="of the classifier")


def default_size(dataset: str) -> int:
    """The default side of the images of a data set, in pixels."""
    return 32 if _is_cifar(dataset) else 96


def recipe_for(
    dataset: str, given: Mapping[str, Any] | None = None, *, size: int | None = None, where: str = ""
) -> TrainRecipe:
    """The recipe `given`, with defaults for the data set and the image size; mistakes are reported at once.

    `where`: the origin of `given`, for messages.
    """
    pixels = size or default_size(dataset)
    values: dict[str, Any] = {"crop_padding": pixels // 8, "cutout": pixels // 4}
    if not _is_cifar(dataset):
        values |= {"mean": IMAGENET_MEAN, "std": IMAGENET_STD}
    return parse(TrainRecipe, values | _short_warmup(given or {}), where=where)


def segmentation_recipe(given: Mapping[str, Any] | None = None, *, where: str = "") -> SegmentationRecipe:
    """The recipe for segmentation; every mistake in `given` is reported at once."""
    return parse(SegmentationRecipe, _short_warmup(given or {}), where=where)


def _short_warmup(given: Mapping[str, Any]) -> dict[str, Any]:
    """`given`, with a shorter default warm-up for few epochs."""
    epochs = given.get("epochs")
    if isinstance(epochs, int) and 0 <= epochs < 4 * Recipe.defaults()["warmup_epochs"]:
        return {"warmup_epochs": epochs / 4, **given}
    return dict(given)


def is_segmentation(dataset: str) -> bool:
    return find_spec(dataset).layout == "segmentation"


def _is_cifar(dataset: str) -> bool:
    return dataset.lower().startswith("cifar")
