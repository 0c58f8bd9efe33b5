"""Shift detector: whether the images of a stream come from another domain than before.

Each image is described by 15 numbers: brightness and the logarithms of its contrasts, of its colors and of its Haar
details at three scales. They change with noise, blur, compression and weather, and little with the class. The mean
description of the last images is compared with that of the domain: a run of one class moves it by a fraction of the
variance within a domain, a shift by a multiple of it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from trust_tta.methods.state import StateModule
from trust_tta.methods.tide.constants import TIDE

FEATURES = 15
_COLOR = 2  # index of the color contrast among the features
_FINEST = 4  # index of the finest diagonal details among the contrasts
_RATIO = 3.0  # ratios of contrasts vary a third as much as contrasts do
_FAINT = 1e-3  # contrast below which nothing is seen, in units of the network's input
_MAX_NORMALIZED = 16.0  # no normalized pixel is beyond; networks that are, take pixels of 0 to 255
_PIXEL_DEVIATION = 64.0  # standard deviation of such pixels, roughly


class ShiftDetector(StateModule):
    """Running mean description of the present domain and of the last images.

    `reference` (features,): mean of the domain, from `images` () images. `recent` (features,): mean of the last
    images, with the sampling variance `noise` (), in units of `spread`. `spread` (features,): variance within the
    domain, from `spread_images` () images.
    """

    STATE = ("reference", "recent", "spread", "noise", "images", "spread_images")
    LIMITS = {"reference": {}, "recent": {}}  # noqa: RUF012
    reference: Tensor
    recent: Tensor
    spread: Tensor
    noise: Tensor
    images: Tensor
    spread_images: Tensor

    def __init__(self, like: Tensor) -> None:
        super().__init__()
        for name in self.STATE:
            shape = (FEATURES,) if name in self.STATE[:3] else ()
            dtype = torch.promote_types(like.dtype, torch.float32)
            self.register_buffer(name, like.new_zeros(shape, dtype=dtype), persistent=False)
        self.restore_source()

    @torch.no_grad()
    def restore_source(self) -> None:
        for name in self.STATE:
            getattr(self, name).zero_()
        self.spread.fill_(TIDE.feature_variance)
        self.spread_images.fill_(TIDE.unit)

    @property
    def variance(self) -> Tensor:
        """Mean variance () of the descriptions, without that of the color contrast, which gray images lack."""
        return (self.spread.sum() - self.spread[_COLOR]) / (FEATURES - 1)

    @torch.no_grad()
    def observe(self, features: Tensor) -> Tensor:
        """Update with descriptions (n, features); returns the probability () that a new domain has begun.

        No host synchronization: the call is captured in a CUDA graph.
        """
        count = len(features)
        first = self.images <= 0
        newer = torch.full_like(self.images, 1 - 2 ** (-count / TIDE.recent_images)).masked_fill_(first, 1.0)
        self.recent.lerp_(features.mean(0), newer)
        self.noise.copy_((1 - newer).square() * self.noise + newer.square() / count)
        away = ((self.recent - self.reference).square() / self.spread.clamp_min(TIDE.feature_variance / 10)).mean()
        chance = 2 * (self.noise + 1 / self.images.clamp_min(1))
        excess = (away - chance - TIDE.class_distance).clamp_min(0).masked_fill(first, 0.0)
        change = excess / (excess + TIDE.shift_distance)
        share = (count / (self.images + count)).clamp_min(1 - 2 ** (-count / TIDE.stream_memory)).maximum(change)
        self.reference.lerp_(self.recent, share)
        self.images.copy_(count / share)
        apart = (features - self.recent).square().mean(0)
        self.spread.lerp_(apart, (1 - change) * count / (self.spread_images + count))
        self.spread_images.add_(count).clamp_max_(TIDE.stream_memory)
        return change


def describe(images: Tensor) -> Tensor:
    """Descriptions (n, features) of images (n, channels, h, w), normalized or with pixels of 0 to 255."""
    takes_pixels = images.abs().amax() > _MAX_NORMALIZED
    images = images / (1 + (_PIXEL_DEVIATION - 1) * takes_pixels)  # `torch.where` of numbers would wait for the device
    gray = images.mean(1, keepdim=True)
    color = images - gray
    level = gray.mean((1, 2, 3))
    maps, smaller = [gray - level.view(-1, 1, 1, 1), color], gray
    for _ in range(3):
        smaller, *details = haar(smaller)
        maps += details
    shifted = F.pad(gray, (1, 0, 1, 0), mode="replicate")  # its blocks span the borders of the blocks of 2 x 2 pixels
    maps += [haar(color)[3], haar(shifted)[3]]
    contrasts = (torch.stack([x.square().mean((1, 2, 3)) for x in maps], 1) + _FAINT**2).log() / 2
    sparse = (maps[_FINEST].abs().mean((1, 2, 3)) + _FAINT).log()  # few strong details, or many weak ones
    diagonal = contrasts[:, _FINEST]
    last = [_RATIO * (sparse - diagonal), contrasts[:, -2], _RATIO * (contrasts[:, -1] - diagonal)]
    return torch.cat([level[:, None], contrasts[:, :-2], torch.stack(last, 1)], 1)


def haar(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Averages and horizontal, vertical and diagonal differences of blocks of 2 x 2 pixels, each (..., h/2, w/2)."""
    if x.shape[-1] % 2 or x.shape[-2] % 2:
        x = F.pad(x, (0, x.shape[-1] % 2, 0, x.shape[-2] % 2), mode="replicate")
    x = x / 4
    left, right = x[..., 0::2] + x[..., 1::2], x[..., 0::2] - x[..., 1::2]
    top, bottom = slice(0, None, 2), slice(1, None, 2)
    sums = left[..., top, :] + left[..., bottom, :], left[..., top, :] - left[..., bottom, :]
    differences = right[..., top, :] + right[..., bottom, :], right[..., top, :] - right[..., bottom, :]
    return sums[0], differences[0], sums[1], differences[1]
