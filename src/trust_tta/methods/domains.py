"""Whether the images of a stream are of another domain than before, found in the images alone.

An image is described by the logarithms of what its brightness, colors and Haar details hold. These say how it was
taken, blurred, compressed or disturbed, and little about what it shows: a run of one class moves their mean by a
fraction of what images differ among themselves, a change of domain by a multiple of it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from trust_tta.methods.state import StateModule

FEATURES = 15
RECENT = 16.0  # images after which half of the recent description is new
HALF_LIFE = 10240.0  # images after which half of the reference is new
SPREAD = 0.1  # variance of a feature that is expected before images are seen
# Within a domain, by feature: the mean over the fifteen corruptions of CIFAR-10-C.
VARIANCES = (0.23, 0.11, 0.25, 0.09, 0.09, 0.08, 0.13, 0.12, 0.09, 0.19, 0.18, 0.15, 0.01, 0.18, 0.01)
SPREAD_WORTH, SPREAD_MOST = 64.0, 1024.0  # images that the expectation counts for, and that are remembered
LEAST_SPREAD = 0.01
CLASSES = 0.4  # squared distance, in variances, that other classes of the same domain may have
CHANGE = 0.15  # what beyond it is half a change
_COLOR = 2  # the place of the contrast of colors among the features
_FINEST = 4  # the place of the finest diagonal details among the contrasts
_FAINT = 1e-3  # contrast below which nothing is seen, in units of the network's input


class DomainWatch(StateModule):
    """Follows the descriptions of a stream's images.

    `reference` (features,): their mean in the present domain, of `images` images; `recent`: over the last few images,
    with the variance `noise` that chance alone gives it; `spread`: how images of one domain differ, from
    `spread_images` images. All numbers are ().
    """

    MEMORY = ("reference", "recent", "spread", "noise", "images", "spread_images")
    LIMITS = {"reference": {}, "recent": {}}  # noqa: RUF012
    reference: Tensor
    recent: Tensor
    spread: Tensor
    noise: Tensor
    images: Tensor
    spread_images: Tensor

    def __init__(self, like: Tensor) -> None:
        super().__init__()
        for name in self.MEMORY:
            shape = (FEATURES,) if name in self.MEMORY[:3] else ()
            dtype = torch.promote_types(like.dtype, torch.float32)
            self.register_buffer(name, like.new_zeros(shape, dtype=dtype), persistent=False)
        self.restore_source()

    @torch.no_grad()
    def restore_source(self) -> None:
        for name in self.MEMORY:
            getattr(self, name).zero_()
        self.spread.fill_(SPREAD)
        self.spread_images.fill_(SPREAD_WORTH)

    @property
    def variance(self) -> Tensor:
        """Of the descriptions, (), the mean without the contrast of colors: gray images are no domain of their own."""
        return (self.spread.sum() - self.spread[_COLOR]) / (FEATURES - 1)

    def describe(self, images: Tensor) -> Tensor:
        """Images (n, channels, h, w) -> (n, features)."""
        return describe(images.detach().to(self.reference.dtype))

    @torch.no_grad()
    def observe(self, features: Tensor) -> Tensor:
        """Take descriptions (n, features); how sure it is, (), from 0 to 1, that they belong to a new domain.

        Nothing here asks the device for a value or feeds it one: it is recorded.
        """
        count = len(features)
        first = self.images <= 0
        newer = torch.full_like(self.images, 1 - 2 ** (-count / RECENT)).masked_fill_(first, 1.0)
        self.recent.lerp_(features.mean(0), newer)
        self.noise.copy_((1 - newer).square() * self.noise + newer.square() / count)
        away = ((self.recent - self.reference).square() / self.spread.clamp_min(LEAST_SPREAD)).mean()
        chance = 2 * (self.noise + 1 / self.images.clamp_min(1))
        excess = (away - chance - CLASSES).clamp_min(0).masked_fill(first, 0.0)
        change = excess / (excess + CHANGE)
        share = (count / (self.images + count)).clamp_min(1 - 2 ** (-count / HALF_LIFE)).maximum(change)
        self.reference.lerp_(self.recent, share)
        self.images.copy_(count / share)
        apart = (features - self.recent).square().mean(0)
        self.spread.lerp_(apart, (1 - change) * count / (self.spread_images + count))
        self.spread_images.add_(count).clamp_max_(SPREAD_MOST)
        return change


def describe(images: Tensor) -> Tensor:
    """Images (n, channels, h, w) -> (n, features)."""
    gray = images.mean(1, keepdim=True)
    color = images - gray
    level = gray.mean((1, 2, 3))
    energies = [_energy(gray - level.view(-1, 1, 1, 1)), _energy(color)]
    smaller, finest = gray, gray
    for scale in range(3):
        smaller, *details = haar(smaller)
        energies += [_energy(detail) for detail in details]
        finest = details[-1] if scale == 0 else finest
    energies.append(_energy(diagonals(color)))
    energies.append(_energy(diagonals(F.pad(gray, (1, 0, 1, 0), mode="replicate"))))  # blocks of pixels show borders
    contrasts = (torch.stack(energies, 1) + _FAINT**2).log() / 2
    few = (finest.abs().mean((1, 2, 3)) + _FAINT).log()  # a few strong ones, or many weak ones
    diagonal = contrasts[:, _FINEST]
    last = [few - diagonal, contrasts[:, -2], contrasts[:, -1] - diagonal]
    return torch.cat([level[:, None], contrasts[:, :-2], torch.stack(last, 1)], 1)


def haar(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Averages and horizontal, vertical and diagonal differences of blocks of 2 x 2 pixels, each (..., h/2, w/2)."""
    x = _even(x) / 4
    left, right = x[..., 0::2] + x[..., 1::2], x[..., 0::2] - x[..., 1::2]
    top, bottom = slice(0, None, 2), slice(1, None, 2)
    sums = left[..., top, :] + left[..., bottom, :], left[..., top, :] - left[..., bottom, :]
    differences = right[..., top, :] + right[..., bottom, :], right[..., top, :] - right[..., bottom, :]
    return sums[0], differences[0], sums[1], differences[1]


def diagonals(x: Tensor) -> Tensor:
    """The last of `haar` alone."""
    x = _even(x)
    right = x[..., 0::2] - x[..., 1::2]
    return (right[..., 0::2, :] - right[..., 1::2, :]) / 4


def _even(x: Tensor) -> Tensor:
    """(..., h, w) with its last row and column repeated where their number is odd."""
    if x.shape[-1] % 2 or x.shape[-2] % 2:
        return F.pad(x, (0, x.shape[-1] % 2, 0, x.shape[-2] % 2), mode="replicate")
    return x


def _energy(x: Tensor) -> Tensor:
    """(n, ...) -> (n,): the mean square."""
    return x.square().mean((1, 2, 3))
