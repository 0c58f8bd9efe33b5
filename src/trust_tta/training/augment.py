"""Crop, flip, cutout, mixup and cutmix of whole batches on their device, drawn from one generator.

Nothing here resembles a corruption (no noise, blur, color or contrast), so that corrupted test images stay unseen.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Generator, Tensor


def channel_constants(mean: Sequence[float], std: Sequence[float], device: torch.device) -> tuple[Tensor, Tensor]:
    """Scale and shift (3, 1, 1) with which `pixels * scale - shift` is normalized."""
    deviation = torch.tensor(std, dtype=torch.float64)
    scale, shift = 1 / (255 * deviation), torch.tensor(mean, dtype=torch.float64) / deviation
    return tuple(t.float().view(3, 1, 1).to(device) for t in (scale, shift))  # type: ignore[return-value]


def normalize(images: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """uint8 (n, h, w, 3) to float32 (n, 3, h, w), channels last in memory."""
    return images.permute(0, 3, 1, 2).float().mul_(scale).sub_(shift)


def crop_and_flip(images: Tensor, chosen: Tensor, *, padding: int, flip: bool, generator: Generator) -> Tensor:
    """Random crops of the reflected images at `chosen` (n,), half of them mirrored: (N, h, w, 3) to (n, h, w, 3)."""
    height, width = images.shape[1:3]
    device, n = images.device, len(chosen)
    top, left = torch.randint(-padding, padding + 1, (2, n, 1), generator=generator, device=device)
    rows = _reflect(top + torch.arange(height, device=device), height)
    columns = _reflect(left + torch.arange(width, device=device), width)
    if flip:
        mirrored = torch.rand(n, 1, generator=generator, device=device) < 0.5
        columns = torch.where(mirrored, columns.flip(1), columns)
    return images[chosen[:, None, None], rows[:, :, None], columns[:, None, :]]


def cut_out(inputs: Tensor, *, side: int, generator: Generator) -> Tensor:
    """Set one square of each image (n, 3, h, w) to zero, the mean; it may stick out over the border."""
    n, _, height, width = inputs.shape
    sides = torch.full((n,), side, device=inputs.device)
    rows, columns = _spans(sides, height, generator), _spans(sides, width, generator)
    return inputs.masked_fill((rows[:, :, None] & columns[:, None, :])[:, None], 0)


def mix(inputs: Tensor, targets: Tensor, *, mixup: float, cutmix: float, generator: Generator) -> tuple[Tensor, Tensor]:
    """Blend a share `mixup` of the images with their neighbor, give a share `cutmix` a rectangle of it.

    inputs (n, 3, h, w), targets (n, classes), both float; targets follow the share of each image that is left.
    """
    n, _, height, width = inputs.shape
    kind, kept = torch.rand(2, n, generator=generator, device=inputs.device)
    side = (1 - kept).sqrt()
    rows = _spans((side * height).round().long(), height, generator)
    columns = _spans((side * width).round().long(), width, generator)
    columns = columns & ((kind >= mixup) & (kind < mixup + cutmix))[:, None]
    blended = torch.where(kind < mixup, kept, 1.0)[:, None, None]
    weight = torch.where(rows[:, :, None] & columns[:, None, :], 0.0, blended)  # (n, h, w), of the image itself
    mixed = torch.lerp(inputs.roll(1, 0), inputs, weight[:, None])
    return mixed, torch.lerp(targets.roll(1, 0), targets, weight.mean((1, 2))[:, None])


def _reflect(index: Tensor, size: int) -> Tensor:
    """Indices past either end, less than `size` away, mirrored at the outermost pixel."""
    return (size - 1) - ((size - 1) - index.abs()).abs()


def _spans(lengths: Tensor, size: int, generator: Generator) -> Tensor:
    """Masks (n, size) of spans with `lengths` (n,) around uniformly drawn places, cut at the ends."""
    center = torch.randint(0, size, lengths.shape, generator=generator, device=lengths.device)
    first = (center - lengths // 2)[:, None]
    place = torch.arange(size, device=lengths.device)
    return (place >= first) & (place < first + lengths[:, None])
