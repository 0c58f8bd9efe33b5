"""What a stream is given, as a float batch; and images from which nothing should be learned."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from trust_tta.errors import ConfigError, ShapeError

LARGEST = 1e6  # values beyond this ruin the statistics of a whole batch


def prepare(images: Any, network: nn.Module) -> Tensor:
    """A float batch (n, c, h, w) of the network's dtype and device; anything else goes through its `preprocessing`."""
    like = next(network.parameters())
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


def usable(images: Tensor) -> Tensor:
    """Which images (n,) hold finite values of a sensible size alone."""
    return images.flatten(1).abs().amax(1) <= LARGEST  # NaN compares as false


def looks_broken(images: Tensor) -> str:
    """Why most of a batch (n, c, h, w) comes from no working camera; empty if it may."""
    flat = images.flatten(1)
    scale = flat.abs().amax(1).clamp_min(1e-6)
    pixels = images.flatten(2)
    blank = ((pixels.amax(2) - pixels.amin(2)).amax(1) <= 1e-3 * scale).sum()
    distinct = torch.unique(flat.double().sum(1)).numel()
    if 2 * int(blank) > len(images):
        return "most images are blank"
    if len(images) > 2 and 2 * distinct < len(images):
        return "most images are the same"
    return ""
