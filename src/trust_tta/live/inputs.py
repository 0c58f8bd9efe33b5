"""The input of a stream as a float batch; images from which nothing should be learned; values that come to the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trust_tta.errors import ConfigError, ShapeError

# (n, 2 * channels + 1), on the host: the lowest and highest value of each channel, and the sum of each image.
Facts: TypeAlias = NDArray[np.float32]

LARGEST = 1e6  # values beyond this ruin the statistics of a whole batch
BLANK = 1e-3  # contrast of an image, relative to its largest value, up to which it is blank
TINY = 1e-6


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


@dataclass(frozen=True, eq=False)
class Fetched:
    """A tensor on its way to the host, so that whoever needs it later need not wait for what the device does after."""

    values: Tensor
    ready: torch.cuda.Event | None

    @classmethod
    def of(cls, values: Tensor) -> Self:
        if not values.is_cuda:
            return cls(values, None)
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        host.copy_(values, non_blocking=True)
        ready = torch.cuda.Event()
        ready.record(torch.cuda.current_stream(values.device))
        return cls(host, ready)

    def wait(self) -> Tensor:
        if self.ready is not None:
            self.ready.synchronize()
        return self.values


def examine(images: Tensor) -> Facts:
    """What `usable` and `looks_broken` need to know of images (n, c, h, w), in one transfer from the device."""
    return facts_of(images).cpu().numpy()


def facts_of(images: Tensor) -> Tensor:
    """The same where the images are."""
    pixels = images.float().flatten(2)
    lowest, highest = torch.aminmax(pixels, dim=2)
    return torch.cat([lowest, highest, pixels.sum((1, 2))[:, None]], 1)


def sound(facts: Facts) -> bool:
    """Whether all images are usable and none has a blank channel: the usual case, seen without asking which."""
    channels = facts.shape[1] // 2
    lowest, highest = facts[:, :channels], facts[:, channels:-1]
    largest = max(float(highest.max()), -float(lowest.min()))
    # NaN compares as false.
    return largest <= LARGEST and (highest - lowest).min() > BLANK * max(largest, TINY) and not _repeats(facts)


def usable(facts: Facts) -> NDArray[np.bool_]:
    """Which images (n,) hold only finite values of a sensible size."""
    fine: NDArray[np.bool_] = _scale(facts) <= LARGEST  # NaN compares as false
    return fine


def looks_broken(facts: Facts) -> str:
    """Why most of a batch cannot come from a working camera; empty if it can."""
    lowest, highest = np.split(facts[:, :-1], 2, axis=1)
    blank = (highest - lowest).max(1) <= BLANK * np.maximum(_scale(facts), TINY)
    if 2 * blank.sum() > len(facts):
        return "most images are blank"
    return "most images are the same" if _repeats(facts) else ""


def _repeats(facts: Facts) -> bool:
    """Whether most images have the sum of another one."""
    return len(facts) > 2 and 2 * len(set(facts[:, -1].tolist())) < len(facts)


def _scale(facts: Facts) -> NDArray[np.float32]:
    """The largest absolute value of each image, (n,)."""
    largest: NDArray[np.float32] = np.abs(facts[:, :-1]).max(1)
    return largest
