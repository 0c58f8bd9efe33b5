"""How a network is trained, declared once: files, flags, defaults and records derive from these two schemas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from trust_tta.preprocessing import CIFAR10_MEAN, CIFAR10_STD, IMAGENET_MEAN, IMAGENET_STD
from trust_tta.schema import Count, Fraction, Natural, Positive, Rate, Schema, parse

Seed = Annotated[int, Field(ge=0, lt=2**63)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
Channels = tuple[float, float, float]


class TrainRecipe(Schema):
    """Everything but the data and the network that decides a training run; the defaults fit CIFAR at 32 pixels."""

    epochs: Count = Field(100, description="passes over the training images")
    batch_size: Annotated[int, Field(ge=2)] = Field(512, description="images per step; BatchNorm needs at least 2")
    lr: Positive = Field(3e-3, description="peak learning rate of AdamW")
    weight_decay: Rate = Field(0.05, description="on weights only: not on norms, biases and the scan's A and D")
    warmup_epochs: Rate = Field(5.0, description="epochs of linear warm-up, at most all of them")
    grad_clip: Rate = Field(1.0, description="largest norm of the gradient; 0 to disable")
    label_smoothing: BelowOne = Field(0.1, description="share of the target spread over all classes")
    drop_path: BelowOne = Field(0.1, description="stochastic depth of the last block, rising linearly from 0")
    crop_padding: Natural = Field(4, description="pixels reflected at each border before a random crop")
    flip: bool = Field(True, description="mirror half of the images")
    cutout: Natural = Field(8, description="side of the square set to the mean; 0 to disable")
    mixup: Fraction = Field(0.0, description="share of the images blended with another")
    cutmix: Fraction = Field(0.5, description="share of the images that get a rectangle of another")
    plain_share: Fraction = Field(0.1, description="share of the epochs, the last, without cutout, mixup and cutmix")
    ema_decay: BelowOne = Field(0.999, description="decay of the averaged weights; 0 keeps the last step")
    precision: Literal["float32", "bf16"] = Field("float32", description="number format of the forward pass")
    compile: bool = Field(False, description="use torch.compile")
    seed: Seed = Field(0, description="of weights, shuffling and augmentation")
    mean: Channels = Field(CIFAR10_MEAN, description="channel means subtracted from pixels in 0..1")
    std: Channels = Field(CIFAR10_STD, description="channel deviations divided by")

    @field_validator("cutmix")
    @classmethod
    def _beside_mixup(cls, value: float, info: ValidationInfo) -> float:
        mixup = info.data.get("mixup", 0.0)
        if value > 1 - mixup:
            raise ValueError(f"{value:g} and mixup {mixup:g} are shares of the same images; their sum must be <= 1")
        return value

    @field_validator("warmup_epochs")
    @classmethod
    def _within_epochs(cls, value: float, info: ValidationInfo) -> float:
        if "epochs" in info.data and value > info.data["epochs"]:
            raise ValueError(f"{value:g} is more than the {info.data['epochs']} epochs; give a value <= epochs")
        return value

    @field_validator("std")
    @classmethod
    def _positive(cls, value: Channels) -> Channels:
        if min(value) <= 0:
            raise ValueError(f"{value} must be three numbers > 0")
        return value

    @property
    def plain_from(self) -> int:
        """The first epoch without cutout, mixup and cutmix."""
        return self.epochs - round(self.plain_share * self.epochs)


class FinetuneRecipe(Schema):
    """How a classifier is trained on a frozen backbone; the defaults are the paper's."""

    epochs: Count = Field(300, description="passes over the features")
    lr: Positive = Field(5e-4, description="learning rate of AdamW")
    batch_size: Count = Field(128, description="images per step")
    seed: Seed = Field(0, description="of the classifier's weights and the shuffling")
    weight_decay: Rate = Field(0.0, description="of the classifier")


def default_size(dataset: str) -> int:
    """The side in pixels to which the images of a data set are squashed if nothing else is said."""
    return 32 if _is_cifar(dataset) else 96


def recipe_for(
    dataset: str, given: Mapping[str, Any] | None = None, *, size: int | None = None, where: str = ""
) -> TrainRecipe:
    """The recipe for a data set at `size` pixels: what is not `given` and depends on these is filled in.

    Every mistake in `given` is reported at once, with `where` it was written.
    """
    pixels, given = size or default_size(dataset), given or {}
    values: dict[str, Any] = {"crop_padding": pixels // 8, "cutout": pixels // 4}
    if not _is_cifar(dataset):
        values |= {"mean": IMAGENET_MEAN, "std": IMAGENET_STD}
    epochs = given.get("epochs")
    if isinstance(epochs, int) and 0 <= epochs < 4 * TrainRecipe.defaults()["warmup_epochs"]:
        values["warmup_epochs"] = epochs / 4
    return parse(TrainRecipe, values | dict(given), where=where)


def _is_cifar(dataset: str) -> bool:
    return dataset.lower().startswith("cifar")
