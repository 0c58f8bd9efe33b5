"""Augmented images in place of traversal orders: the paper's ablation of what makes TRUST's views differ.

The augmentations take a float batch (n, c, h, w), change every image in its own way, and draw from the generator
they are given.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trust_tta.methods.modes import check_count, check_number, choose
from trust_tta.methods.trust import Trust
from trust_tta.orders import DEFAULT_ORDER, OrderLike, ScanOrder

ANGLE = math.radians(15)
CROP = 0.2  # of the side, at most
JITTER = 0.4


def rotation(images: Tensor, generator: torch.Generator, strength: float = 1.0) -> Tensor:
    """Turn by up to 15 degrees times `strength`; what comes in at the border is its reflection."""
    angle = _uniform(images, generator) * ANGLE * strength
    zero = torch.zeros_like(angle)
    ratio = images.shape[2] / images.shape[3]  # a turn in pixels, not in the square that the grid spans
    rows = [angle.cos(), -angle.sin() * ratio, zero], [angle.sin() / ratio, angle.cos(), zero]
    return _sample(images, torch.stack([torch.stack(row, 1) for row in rows], 1))


def crop(images: Tensor, generator: torch.Generator, strength: float = 1.0) -> Tensor:
    """Enlarge a window whose side is shorter by up to 20 percent times `strength`."""
    scale = 1 - CROP * strength * (_uniform(images, generator) + 1) / 2
    zero = torch.zeros_like(scale)
    shift = [(1 - scale) * _uniform(images, generator) for _ in range(2)]
    rows = [scale, zero, shift[0]], [zero, scale, shift[1]]
    return _sample(images, torch.stack([torch.stack(row, 1) for row in rows], 1))


def jitter(images: Tensor, generator: torch.Generator, strength: float = 1.0) -> Tensor:
    """Scale saturation (about the grey), contrast (about the image's mean) and shift brightness, up to 0.4 each.

    The batch is taken as it comes, normalised: one unit is about one standard deviation of the pixels.
    """
    saturation, contrast, brightness = (
        _uniform(images, generator).mul(JITTER * strength).view(-1, 1, 1, 1) for _ in range(3)
    )
    images = images + saturation * (images - images.mean(1, keepdim=True))
    images = images + contrast * (images - images.mean((1, 2, 3), keepdim=True))
    return images + brightness


KINDS = {"rotation": rotation, "crop": crop, "jitter": jitter}


class Augmentation(Trust):
    """TRUST on augmented images: `k` views of the batch in the default order, or one for each of `orders`.

    `kind` is "rotation", "crop" or "jitter". With per="view" every view is drawn anew; with per="batch" all views
    of a batch are one. The final prediction is of the images as they came. The draws depend on `seed` and on
    how far the method has come, so a restored method draws what it would have drawn.
    """

    name = "augmentation"

    def __init__(
        self,
        model: nn.Module,
        *,
        kind: str = "jitter",
        strength: float = 1.0,
        per: str = "view",
        k: int = 6,
        orders: Sequence[OrderLike] | None = None,
        seed: int = 0,
        lr: float = 1e-4,
        steps: int = 1,
        parameters: str = "ss2d",
        episodic: bool = False,
        batch_statistics: bool = True,
    ) -> None:
        check_count("k", k)
        check_number("strength", strength)
        super().__init__(
            model,
            orders=[DEFAULT_ORDER] * k if orders is None else orders,
            lr=lr,
            steps=steps,
            parameters=parameters,
            episodic=episodic,
            batch_statistics=batch_statistics,
        )
        self.augment = choose("kind", kind, KINDS)
        self.per_view = choose("per", per, {"view": True, "batch": False})
        self.strength, self.seed = strength, seed

    def adapting_forward(self, images: Tensor, order: ScanOrder) -> Tensor:
        drawn = self.counters.forwards if self.per_view else self.counters.batches
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + drawn)
        return self.predict(self.augment(images, generator, self.strength), order=order)


def _uniform(images: Tensor, generator: torch.Generator) -> Tensor:
    """One number in [-1, 1) an image, drawn on the CPU so that every device sees the same."""
    return (2 * torch.rand(images.shape[0], generator=generator) - 1).to(images)


def _sample(images: Tensor, transforms: Tensor) -> Tensor:
    grid = F.affine_grid(transforms, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="reflection", align_corners=False)
