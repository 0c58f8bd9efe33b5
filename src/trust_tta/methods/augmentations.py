"""The random augmentations that ROID, CoTTA and RoTTA learn from.

As in the official code, one draw serves the whole batch: color jitter in random order, rotation, translation and scale,
and a horizontal flip half of the time. Pixels are scaled to 0 to 1 before, and back afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MAX_ANGLE, MAX_SHIFT, MAX_SCALE = 15.0, 1 / 16, 0.1  # degrees, fraction of the side, fraction of the size
BLUR, NOISE = (0.001, 0.5), 0.005  # standard deviation of the Gaussian, in pixels, and of the noise
_GRAY = (0.299, 0.587, 0.114)


def random_augmentation(images: Tensor, model: nn.Module, *, seed: int, soft: bool) -> Tensor:
    """Augmented images (n, c, h, w); `soft` adds CoTTA's blur, noise and border replication."""
    generator = torch.Generator().manual_seed(seed)  # on the CPU: the same draws on every device, except for the noise
    lowest, span = pixel_range(images, model)
    x = ((images - lowest) / span).clamp(0, 1)
    x = affine(jitter(x, generator), generator, padding="border" if soft else "reflection")
    if soft:
        x = blur(x, _uniform(*BLUR, generator))
    if _uniform(0, 1, generator) < 0.5:
        x = x.flip(-1)
    if soft:
        # On the images' own device: drawing millions of numbers on a CPU is slower than a forward on a GPU.
        own = generator if x.device.type == "cpu" else torch.Generator(x.device).manual_seed(seed)
        x = x + NOISE * torch.randn(x.shape, generator=own, device=x.device).to(x)
    return x.clamp(0, 1) * span + lowest


def pixel_range(images: Tensor, model: nn.Module) -> tuple[Tensor, Tensor]:
    """Black level of the pixels and the range up to white: by the network's preprocessing, else those of the batch."""
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
    changes: list[Callable[[Tensor, float], Tensor]] = [torch.mul, _contrast, _saturation, _hue, _gamma]
    for i in torch.randperm(len(changes), generator=generator).tolist():
        x = changes[i](x, _uniform(*limits[i], generator)).clamp(0, 1)
    return x


def affine(x: Tensor, generator: torch.Generator, *, padding: str) -> Tensor:
    """Rotate, translate and scale about the center, bilinear."""
    angle = math.radians(_uniform(-MAX_ANGLE, MAX_ANGLE, generator))
    across, down = (2 * _uniform(-MAX_SHIFT, MAX_SHIFT, generator) for _ in range(2))  # the grid spans 2
    scale = _uniform(1 - MAX_SCALE, 1 + MAX_SCALE, generator)
    ratio = x.shape[2] / x.shape[3]  # rotates in pixels, not in the square that the grid spans
    cos, sin = math.cos(angle) / scale, math.sin(angle) / scale
    matrix = x.new_tensor([[cos, -sin * ratio, across], [sin / ratio, cos, down]])
    grid = F.affine_grid(matrix.expand(len(x), 2, 3), list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, mode="bilinear", padding_mode=padding, align_corners=False)


def blur(x: Tensor, deviation: float) -> Tensor:
    """Gaussian blur with a kernel of 5 x 5 pixels; images below 3 pixels are returned unchanged."""
    if min(x.shape[2:]) < 3:
        return x
    taps = torch.exp(-0.5 * (torch.arange(-2.0, 3.0) / deviation) ** 2)
    row = (taps / taps.sum()).to(x).expand(x.shape[1], 1, 1, 5)
    x = F.conv2d(F.pad(x, (2, 2, 0, 0), mode="reflect"), row, groups=x.shape[1])
    return F.conv2d(F.pad(x, (0, 0, 2, 2), mode="reflect"), row.transpose(2, 3), groups=x.shape[1])


def _contrast(x: Tensor, factor: float) -> Tensor:
    middle = _gray(x).mean((1, 2, 3), keepdim=True)
    return middle + factor * (x - middle)


def _saturation(x: Tensor, factor: float) -> Tensor:
    gray = _gray(x)
    return gray + factor * (x - gray)


def _hue(x: Tensor, turns: float) -> Tensor:
    """Rotate the colors about the gray axis; images without three channels are returned unchanged."""
    if x.shape[1] != 3:
        return x
    gray, angle = _gray(x), 2 * math.pi * turns
    red, green, blue = (x - gray).unbind(1)
    across = torch.stack([blue - green, red - blue, green - red], 1) / math.sqrt(3)
    return gray + math.cos(angle) * (x - gray) + math.sin(angle) * (across - _gray(across))


def _gamma(x: Tensor, exponent: float) -> Tensor:
    return x.clamp_min(1e-8) ** exponent


def _gray(x: Tensor) -> Tensor:
    """Luminance (n, 1, h, w); the mean where there are not three channels."""
    if x.shape[1] != 3:
        return x.mean(1, keepdim=True)
    return (x * x.new_tensor(_GRAY).view(1, 3, 1, 1)).sum(1, keepdim=True)


def _uniform(low: float, high: float, generator: torch.Generator) -> float:
    return low + (high - low) * float(torch.rand((), generator=generator))
