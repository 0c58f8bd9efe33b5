"""Stream inputs: conversion to a float batch, and per-image checks for non-finite, blank and repeated images."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trust_tta.errors import ConfigError, ShapeError

# (3, n, channels), on the host: minimum, maximum and sum of each channel of each image.
ImageStats: TypeAlias = NDArray[np.float32]

MAX_MAGNITUDE = 1e6  # values beyond this ruin the statistics of a whole batch
MAX_BLANK_CONTRAST = 1e-3  # contrast of a blank image, relative to its largest value
TINY = 1e-6


def prepare(images: Any, network: nn.Module, *, like: Tensor | None = None) -> Tensor:
    """A float batch (n, c, h, w) of the network's dtype and device; anything else goes through its `preprocessing`.

    `like`: one of the network's parameters, to save the lookup.
    """
    like = next(network.parameters()) if like is None else like
    if isinstance(images, Tensor) and images.is_floating_point():
        if images.dim() not in (3, 4) or images.numel() == 0:
            raise ShapeError(f"images have shape {tuple(images.shape)}; give (n, channels, h, w) or (channels, h, w)")
        return (images if images.dim() == 4 else images[None]).to(like)
    preprocessing = getattr(network, "preprocessing", None)
    if preprocessing is None:
        raise ConfigError(
            f"images are {type(images).__name__} and this network has no preprocessing; give a float tensor "
            "(n, channels, h, w) as the network wants it, or a network from a checkpoint that states it"
        )
    batch: Tensor = preprocessing(images.numpy() if isinstance(images, Tensor) else images)
    return batch.to(like)


def image_stats(images: Tensor) -> ImageStats:
    """Minimum, maximum and sum (3, n, c) of each channel of images (n, c, h, w), in one transfer from the device."""
    pixels = images.detach().float().flatten(2)
    stats = pixels.new_empty(3, *pixels.shape[:2])
    lowest, highest, sums = stats.unbind()
    torch.aminmax(pixels, dim=2, out=(lowest, highest))
    torch.sum(pixels, 2, out=sums)
    return stats.cpu().numpy()


def find_broken(stats: ImageStats) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Masks (n,) of images with values that are not finite or beyond MAX_MAGNITUDE, and of others without contrast."""
    magnitude = np.abs(stats[:2]).max((0, 2))
    ruined = ~(magnitude <= MAX_MAGNITUDE)  # NaN compares as false
    lowest, highest, _ = np.where(ruined[:, None], 0, stats)
    blank = ~ruined & ((highest - lowest).max(1) <= MAX_BLANK_CONTRAST * np.maximum(magnitude, TINY))
    return ruined, blank


def mostly_repeated(stats: ImageStats) -> bool:
    """Whether most images have the same sum as another one, as a frozen camera's do."""
    sums = stats[2].sum(1).tolist()
    return len(sums) > 2 and 2 * len(set(sums)) < len(sums)
