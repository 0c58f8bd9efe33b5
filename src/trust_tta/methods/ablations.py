"""The paper's ablations of TRUST: diversity without averaged weights, averaged weights without diversity, and augmented
images in place of orders.

An augmentation takes a float batch (n, c, h, w) and a generator, from which it draws for each image separately.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trust_tta.methods.base import Learner, LearningOptions
from trust_tta.methods.ensembling import log_mean_of_members
from trust_tta.methods.losses import pseudo_label_loss
from trust_tta.methods.parallel import OrderStep
from trust_tta.methods.parameters import ParameterSet
from trust_tta.methods.state import Array, Spec, clone
from trust_tta.methods.trust import WeightAveraging
from trust_tta.methods.trust_options import OrderNames, OrderOptions, require_orders, scan_orders_of
from trust_tta.ops.segmentation_logits import Logits
from trust_tta.orders import DEFAULT_ORDER, OrderLike, find_order
from trust_tta.schema import Count, Natural, Rate

ANGLE = math.radians(15)
CROP = 0.2  # of the side, at most
JITTER = 0.4


class Ensemble(Learner):
    """Diversity without averaged weights: K networks, each of one order, whose predictions are averaged.

    Each order has its own weights and optimizer state, and predicts in its own order. The output is the logarithm of
    the mean probability. `detach()` gives the source: there is no single adapted network.
    """

    Options = OrderOptions
    options: OrderOptions
    chunked_loss = True

    def reset_state(self) -> None:
        self.orders = self.options.chosen(scan_orders_of(self.model))
        source = {"weights": self.weights.source_vector}
        zeros = {name: torch.zeros_like(moment) for name, moment in self.weights.optimizer_state.items()}
        self.members: dict[str, dict[str, Tensor]] = {
            f"{i} {order}": clone({**source, **zeros}) for i, order in enumerate(self.orders)
        }

    def state_spec(self) -> dict[str, Spec]:
        moments = self.weights.state_spec()["optimizer"]
        vector = Array.like(self.weights.vector)
        member: dict[str, Spec] = {"weights": vector, **(moments if isinstance(moments, dict) else {})}
        members: dict[str, Spec] = {f"{i} {order}": member for i, order in enumerate(self.orders)}
        return {"members": members}

    def adapted_names(self, model: nn.Module) -> list[str]:
        require_orders(model)
        return super().adapted_names(model)

    def adapt(self, images: Tensor) -> Logits:
        before: list[Logits] = []
        after: list[Logits] = []
        for order, member in zip(self.orders, self.members.values(), strict=True):
            self.weights.load(member["weights"])
            self.weights.load_optimizer_state(member)
            for step in range(self.options.steps):
                logits = self.logits(images, order=order, stochastic_depth=self.options.stochastic_depth)
                if step == 0:
                    before.append(logits.detach())
                self.step(pseudo_label_loss(logits))
            member.update({"weights": self.weights.snapshot(), **clone(self.weights.optimizer_state)})
            done = self.options.predict == "before"
            after.append(logits.detach() if done else self.predict(images, order=order))
        self.weights.restore_source()
        self.prediction_before = log_mean_of_members(before)
        return log_mean_of_members(after)

    def infer(self, images: Tensor) -> Logits:
        logits: list[Logits] = []
        for order, member in zip(self.orders, self.members.values(), strict=True):
            self.weights.load(member["weights"])
            logits.append(self.frozen_logits(images, order=order))
        self.weights.restore_source()
        return log_mean_of_members(logits)


class RepetitionOptions(LearningOptions):
    parameters: ParameterSet = "ss2d"
    k: Count = 6


class Repetition(WeightAveraging):
    """Averaged weights without diversity: the default order `k` times, and the mean of the weights."""

    Options = RepetitionOptions
    options: RepetitionOptions

    def reset_state(self) -> None:
        self.orders = [DEFAULT_ORDER] * self.options.k


class AugmentationOptions(RepetitionOptions):
    """`kind` of augmentation, its `strength`, and whether it is drawn `per` view or once per batch."""

    kind: Literal["rotation", "crop", "jitter"] = "jitter"
    strength: Rate = 1.0
    per: Literal["view", "batch"] = "view"
    orders: OrderNames = None
    seed: Natural = 0


class Augmentation(WeightAveraging):
    """TRUST on augmented images: `k` views of the batch in the default order, or one for each of `orders`.

    The final prediction is of the original images. Draws are seeded by `seed` and the counters, so that a restored
    method continues with the same ones.
    """

    Options = AugmentationOptions
    options: AugmentationOptions
    reuses_first_logits = False  # they are of augmented images

    def reset_state(self) -> None:
        given, scan_orders = self.options.orders, scan_orders_of(self.model)
        self.orders = [find_order(order, scan_orders) for order in given or [DEFAULT_ORDER] * self.options.k]

    def adapt_under(
        self, order: OrderLike, images: Tensor, *, first: bool, augmented: Tensor | None = None
    ) -> OrderStep:
        drawn = self.counters.forwards if self.options.per == "view" else self.counters.batches
        generator = torch.Generator().manual_seed(self.options.seed * 1_000_003 + drawn)
        augmented = KINDS[self.options.kind](images, generator, self.options.strength)
        return super().adapt_under(order, images, first=first, augmented=augmented)


def rotation(images: Tensor, generator: torch.Generator, strength: float = 1.0) -> Tensor:
    """Rotate by up to 15 degrees times `strength`, with reflected borders."""
    angle = _uniform(images, generator) * ANGLE * strength
    zero = torch.zeros_like(angle)
    ratio = images.shape[2] / images.shape[3]  # rotates in pixels, not in the square that the grid spans
    rows = [angle.cos(), -angle.sin() * ratio, zero], [angle.sin() / ratio, angle.cos(), zero]
    return _sample(images, torch.stack([torch.stack(row, 1) for row in rows], 1))


def crop(images: Tensor, generator: torch.Generator, strength: float = 1.0) -> Tensor:
    """Crop to a window whose sides are shorter by up to 20 percent times `strength`, and resize it."""
    scale = 1 - CROP * strength * (_uniform(images, generator) + 1) / 2
    zero = torch.zeros_like(scale)
    shift = [(1 - scale) * _uniform(images, generator) for _ in range(2)]
    rows = [scale, zero, shift[0]], [zero, scale, shift[1]]
    return _sample(images, torch.stack([torch.stack(row, 1) for row in rows], 1))


def jitter(images: Tensor, generator: torch.Generator, strength: float = 1.0) -> Tensor:
    """Scale saturation (about the gray), contrast (about the image's mean) and shift brightness, up to 0.4 each.

    Images are normalized: one unit is about one standard deviation of the pixels.
    """
    saturation, contrast, brightness = (
        _uniform(images, generator).mul(JITTER * strength).view(-1, 1, 1, 1) for _ in range(3)
    )
    images = images + saturation * (images - images.mean(1, keepdim=True))
    images = images + contrast * (images - images.mean((1, 2, 3), keepdim=True))
    return images + brightness


KINDS: dict[str, Callable[[Tensor, torch.Generator, float], Tensor]] = {
    "rotation": rotation,
    "crop": crop,
    "jitter": jitter,
}


def _uniform(images: Tensor, generator: torch.Generator) -> Tensor:
    """One number in [-1, 1) for each image, drawn on the CPU so that every device sees the same."""
    return (2 * torch.rand(images.shape[0], generator=generator) - 1).to(images)


def _sample(images: Tensor, transforms: Tensor) -> Tensor:
    grid = F.affine_grid(transforms, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="reflection", align_corners=False)
