"""The input of a stream as a float batch; images from which nothing should be learned; values that come to the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trust_tta.errors import ConfigError, ShapeError

# (3, n, channels), on the host: the lowest and highest value of each channel of each image, and its sum.
Facts: TypeAlias = NDArray[np.float32]

LARGEST = 1e6  # values beyond this ruin the statistics of a whole batch
BLANK = 1e-3  # contrast of an image, relative to its largest value, up to which it is blank
TINY = 1e-6


def prepare(images: Any, network: nn.Module, *, like: Tensor | None = None) -> Tensor:
    """A float batch (n, c, h, w) of the network's dtype and device; anything else goes through its `preprocessing`.

    `like`: one of its parameters, for callers that do not want it looked up.
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


@dataclass(frozen=True, eq=False)
class Fetched:
    """A tensor on its way to the host, so that whoever needs it later need not wait for what the device does after."""

    values: Tensor
    ready: torch.cuda.Event | None

    @classmethod
    def of(cls, values: Tensor, *, over: Self | None = None) -> Self:
        """Send for values; `over` an earlier tensor of the same device that nobody needs any more, if it is alike."""
        if not values.is_cuda:
            return cls(values, None)
        if over is None or over.values.shape != values.shape or over.values.dtype != values.dtype:
            host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            over = cls(host, torch.cuda.Event())
        over.values.copy_(values, non_blocking=True)
        if over.ready is not None:
            over.ready.record(torch.cuda.current_stream(values.device))
        return over

    def wait(self) -> Tensor:
        if self.ready is not None:
            self.ready.synchronize()
        return self.values


class Glances:
    """Looks at batches while the device works; those of one shape share the memory for what is found."""

    def __init__(self) -> None:
        self._facts = torch.empty(0)
        self._last: Fetched | None = None

    def send(self, images: Tensor) -> Fetched:
        """The facts of images (n, c, h, w), which are valid until the next ones are sent for."""
        n, channels = images.shape[:2]
        if self._facts.shape != (3, n, channels) or self._facts.device != images.device:
            self._facts, self._last = torch.empty(3, n, channels, device=images.device), None
        self._last = Fetched.of(facts_of(images, out=self._facts), over=self._last)
        return self._last


def examine(images: Tensor) -> Facts:
    """What `usable` and `looks_broken` need to know of images (n, c, h, w), in one transfer from the device."""
    return facts_of(images).cpu().numpy()


def facts_of(images: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The same where the images are, (3, n, c), in two kernels."""
    pixels = images.detach().float().flatten(2)
    facts = pixels.new_empty(3, *pixels.shape[:2]) if out is None else out
    lowest, highest, sums = facts.unbind()
    torch.aminmax(pixels, dim=2, out=(lowest, highest))
    torch.sum(pixels, 2, out=sums)
    return facts


def sound(facts: Facts) -> bool:
    """Whether all images are usable and none has a blank channel: the usual case, seen without asking which."""
    lowest, highest, _ = facts
    largest = max(float(highest.max()), -float(lowest.min()))
    # NaN compares as false.
    return largest <= LARGEST and (highest - lowest).min() > BLANK * max(largest, TINY) and not _repeats(facts)


def usable(facts: Facts) -> NDArray[np.bool_]:
    """Which images (n,) hold only finite values of a sensible size."""
    fine: NDArray[np.bool_] = _scale(facts) <= LARGEST  # NaN compares as false
    return fine


def looks_broken(facts: Facts) -> str:
    """Why most of a batch cannot come from a working camera; empty if it can."""
    lowest, highest, _ = facts
    blank = (highest - lowest).max(1) <= BLANK * np.maximum(_scale(facts), TINY)
    if 2 * blank.sum() > len(blank):
        return "most images are blank"
    return "most images are the same" if _repeats(facts) else ""


def _repeats(facts: Facts) -> bool:
    """Whether most images have the sum of another one."""
    sums = facts[2].sum(1).tolist()
    return len(sums) > 2 and 2 * len(set(sums)) < len(sums)


def _scale(facts: Facts) -> NDArray[np.float32]:
    """The largest absolute value of each image, (n,)."""
    largest: NDArray[np.float32] = np.abs(facts[:2]).max((0, 2))
    return largest
