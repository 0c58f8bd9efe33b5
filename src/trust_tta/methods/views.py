"""Views of a batch: mirror images, and the random views that ROID, CoTTA and RoTTA learn from.

As in the official code, a random view is one draw for the whole batch: colors in random order, a turn, shift and scale,
and a mirror half of the time. CoarseLogits are scaled to 0 to 1 before, and back afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trust_tta.errors import ConfigError
from trust_tta.ops.segmentation_logits import CoarseLogits, Logits

ANGLE, SHIFT, SCALE = 15.0, 1 / 16, 0.1  # at most: degrees, part of the side, part of the size
BLUR, NOISE = (0.001, 0.5), 0.005  # deviation of the Gaussian, in pixels, and of the noise
_GRAY = (0.299, 0.587, 0.114)


def mirrored(predict: Callable[[Tensor], Logits], images: Tensor) -> Logits:
    """Log-probabilities (2, n, classes, ...) of images and of their mirror images, in one pass over both.

    Those of pixels stay logits, (n, 2, classes, h', w').
    """
    logits = predict(torch.cat([images, images.flip(-1)]))
    if isinstance(logits, CoarseLogits):
        plain, other = logits.coarse.chunk(2)
        return CoarseLogits(torch.stack([plain, other.flip(-1)], 1), logits.size)
    plain, other = _log_probability(logits).chunk(2)
    return torch.stack([plain, other.flip(-1) if other.dim() == 4 else other])


def single(logits: Logits) -> Logits:
    """The log-probabilities of images alone, in the shape that those of `mirrored` have."""
    if isinstance(logits, CoarseLogits):
        return replace(logits, coarse=logits.coarse[:, None])
    return _log_probability(logits)[None]


def _log_probability(logits: Tensor) -> Tensor:
    """In at least float32, also under autocast, which on a CPU would leave half precision as it is."""
    return logits.log_softmax(1, dtype=torch.promote_types(logits.dtype, torch.float32))


def log_mean_probability(logits: Logits, *, least: float = -math.inf) -> Logits:
    """log of the mean of K softmaxes of (K, n, classes, ...), or of pixels (n, K, classes, h', w'), above `least`."""
    if isinstance(logits, CoarseLogits):
        return replace(logits, combine=partial(_log_mean_probability, dim=1, least=least))
    return _log_mean_probability(logits, dim=0, least=least)


def _log_mean_probability(logits: Tensor, *, dim: int, least: float) -> Tensor:
    mean = logits.log_softmax(2).logsumexp(dim) - math.log(logits.shape[dim])
    return mean if least == -math.inf else mean.clamp_min(least)


def mean_log_probability(logits: Logits) -> Logits:
    """The mean of log-probabilities (K, n, classes), or of those of pixels (n, K, classes, h', w')."""
    if isinstance(logits, CoarseLogits):
        return replace(logits, combine=lambda band: band.log_softmax(2).mean(1))
    return logits.mean(0)


class MeanProbability:
    """The mean of softmaxes that come one after the other, each as logits (n, classes, ...).

    Holds one of them, or the coarse ones of pixels.
    """

    def __init__(self) -> None:
        self.total: Tensor | None = None
        self.count = 0
        self.pixels: list[CoarseLogits] = []

    def add(self, logits: Logits) -> None:
        if isinstance(logits, CoarseLogits):
            self.pixels.append(logits)
            return
        log_p = logits.log_softmax(1)
        self.total = log_p if self.total is None else torch.logaddexp(self.total, log_p, out=self.total)
        self.count += 1

    def log(self) -> Logits:
        if self.pixels:
            coarse = torch.stack([one.coarse for one in self.pixels], 1)
            return log_mean_probability(CoarseLogits(coarse, self.pixels[0].size))
        if self.total is None:
            raise ConfigError("there is no prediction to average; add one first")
        return self.total.sub_(math.log(self.count))


def random_view(images: Tensor, model: nn.Module, *, seed: int, soft: bool) -> Tensor:
    """A view of images (n, c, h, w); `soft` adds the blur, the noise and the repeated border of CoTTA's."""
    generator = torch.Generator().manual_seed(seed)  # on the CPU, so that every device sees the same but for the noise
    lowest, span = pixel_range(images, model)
    x = ((images - lowest) / span).clamp(0, 1)
    x = move(jitter(x, generator), generator, padding="border" if soft else "reflection")
    if soft:
        x = blur(x, _between(*BLUR, generator))
    if _between(0, 1, generator) < 0.5:
        x = x.flip(-1)
    if soft:
        # On the images' own device: millions of numbers take a CPU longer than a GPU's pass over the images.
        own = generator if x.device.type == "cpu" else torch.Generator(x.device).manual_seed(seed)
        x = x + NOISE * torch.randn(x.shape, generator=own, device=x.device).to(x)
    return x.clamp(0, 1) * span + lowest


def pixel_range(images: Tensor, model: nn.Module) -> tuple[Tensor, Tensor]:
    """What black is in the images, and how far white is from it: the network's own, or those of the batch."""
    known: Any = getattr(model, "preprocessing", None)
    mean, std = getattr(known, "mean", ()), getattr(known, "std", ())
    if len(mean) == len(std) == images.shape[1]:
        deviation = images.new_tensor(std).view(1, -1, 1, 1)
        return -images.new_tensor(mean).view(1, -1, 1, 1) / deviation, 1 / deviation
    lowest, highest = images.aminmax()
    return lowest, (highest - lowest).clamp_min(1e-12)


def jitter(x: Tensor, generator: torch.Generator) -> Tensor:
    """Brightness, contrast, saturation, hue and gamma of pixels from 0 to 1, each once, in random order."""
    limits = ((0.6, 1.4), (0.7, 1.3), (0.5, 1.5), (-0.06, 0.06), (0.7, 1.3))
    changes: list[Callable[[Tensor, float], Tensor]] = [_brightness, _contrast, _saturation, _hue, _gamma]
    for i in torch.randperm(len(changes), generator=generator).tolist():
        x = changes[i](x, _between(*limits[i], generator)).clamp(0, 1)
    return x


def move(x: Tensor, generator: torch.Generator, *, padding: str) -> Tensor:
    """Turn, shift and scale about the middle, bilinear."""
    angle = math.radians(_between(-ANGLE, ANGLE, generator))
    across, down = (2 * _between(-SHIFT, SHIFT, generator) for _ in range(2))  # the grid spans 2
    scale = _between(1 - SCALE, 1 + SCALE, generator)
    ratio = x.shape[2] / x.shape[3]  # a turn in pixels, not in the square that the grid spans
    cos, sin = math.cos(angle) / scale, math.sin(angle) / scale
    matrix = x.new_tensor([[cos, -sin * ratio, across], [sin / ratio, cos, down]])
    grid = F.affine_grid(matrix.expand(len(x), 2, 3), list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, mode="bilinear", padding_mode=padding, align_corners=False)


def blur(x: Tensor, deviation: float) -> Tensor:
    """A Gaussian of five by five pixels; smaller images stay as they are."""
    if min(x.shape[2:]) < 3:
        return x
    taps = torch.exp(-0.5 * (torch.arange(-2.0, 3.0) / deviation) ** 2)
    row = (taps / taps.sum()).to(x).expand(x.shape[1], 1, 1, 5)
    x = F.conv2d(F.pad(x, (2, 2, 0, 0), mode="reflect"), row, groups=x.shape[1])
    return F.conv2d(F.pad(x, (0, 0, 2, 2), mode="reflect"), row.transpose(2, 3), groups=x.shape[1])


def _brightness(x: Tensor, factor: float) -> Tensor:
    return x * factor


def _contrast(x: Tensor, factor: float) -> Tensor:
    middle = _gray(x).mean((1, 2, 3), keepdim=True)
    return middle + factor * (x - middle)


def _saturation(x: Tensor, factor: float) -> Tensor:
    gray = _gray(x)
    return gray + factor * (x - gray)


def _hue(x: Tensor, turns: float) -> Tensor:
    """Turn the colors about the gray axis; images that are not of three colors have no hue."""
    if x.shape[1] != 3:
        return x
    gray, angle = _gray(x), 2 * math.pi * turns
    red, green, blue = (x - gray).unbind(1)
    across = torch.stack([blue - green, red - blue, green - red], 1) / math.sqrt(3)
    return gray + math.cos(angle) * (x - gray) + math.sin(angle) * (across - _gray(across))


def _gamma(x: Tensor, exponent: float) -> Tensor:
    return x.clamp_min(1e-8) ** exponent


def _gray(x: Tensor) -> Tensor:
    """Lightness (n, 1, h, w); the mean where there are not three colors."""
    if x.shape[1] != 3:
        return x.mean(1, keepdim=True)
    return (x * x.new_tensor(_GRAY).view(1, 3, 1, 1)).sum(1, keepdim=True)


def _between(low: float, high: float, generator: torch.Generator) -> float:
    return low + (high - low) * float(torch.rand((), generator=generator))
