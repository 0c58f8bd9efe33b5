"""Functions of image-sized logits, computed in bands of rows.

The logits of a batch of images may take hundreds of megabytes, and a loss makes several tensors of their size. In
bands, these have the size of a band; the backward pass computes each band again. A network that labels pixels gives
small maps of logits: bands are resized from these, so that image-sized logits need not exist at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

MOST_ELEMENTS = 1 << 22  # of a band's logits: 16 MiB in float32
LEAST_ELEMENTS = 1 << 16  # of which it is not worth making bands
BANDS = 4  # at least, of larger maps

PerPixel = Callable[..., Tensor]


@dataclass(frozen=True, eq=False)
class Pixels:
    """Logits (n, classes, h, w) of pixels, as the coarse ones of which they are the bilinear resize to `size`.

    `coarse`: (n, classes, h', w'), or (n, maps, classes, h', w') where `combine` makes one map of a band of several.
    """

    coarse: Tensor
    size: tuple[int, int]
    combine: Callable[[Tensor], Tensor] | None = None

    def __len__(self) -> int:
        return len(self.coarse)

    @property
    def shape(self) -> torch.Size:
        return torch.Size([len(self.coarse), self.coarse.shape[-3], *self.size])

    def dim(self) -> int:
        return 4

    def detach(self) -> Pixels:
        return replace(self, coarse=self.coarse.detach())

    def images(self, rows: slice) -> Pixels:
        """Those of some of the images."""
        return replace(self, coarse=self.coarse[rows])

    def band(self, rows: slice) -> Tensor:
        """The rows of all maps, (n, classes, rows, w), at least in float32."""
        inside = source_rows(rows, self.coarse.shape[-2], self.size[0])
        return self._band_of(_wide(self.coarse[..., inside, :]), inside, rows)

    def _band_of(self, part: Tensor, inside: slice, rows: slice) -> Tensor:
        band = resize_rows(part, inside, rows, heights=(self.coarse.shape[-2], self.size[0]), width=self.size[1])
        return band if self.combine is None else self.combine(band)

    def whole(self) -> Tensor:
        """The image-sized logits; without a gradient, nothing else of their size is made."""
        if torch.is_grad_enabled() and self.coarse.requires_grad:
            return self.band(slice(0, self.size[0])).to(self.coarse.dtype)
        logits = self.coarse.new_empty(self.shape)
        for rows in self.bands():
            logits[:, :, rows] = self.band(rows)
        return logits

    def bands(self) -> Iterator[slice]:
        """Which rows are computed together."""
        return _bands(self.coarse[..., 0, 0].numel(), self.size)


Logits: TypeAlias = Tensor | Pixels


def whole(logits: Logits) -> Tensor:
    """Logits as one tensor."""
    return logits.whole() if isinstance(logits, Pixels) else logits


@torch.no_grad()
def bands_at(logits: Logits, size: tuple[int, int]) -> Iterator[tuple[slice, Tensor]]:
    """Logits (n, classes, h, w) resized to `size` in bands, (n, classes, rows, width) each, without a gradient."""
    height = logits.shape[2]
    for rows in _bands(logits.shape[:2].numel(), size):
        inside = source_rows(rows, height, size[0])
        part = logits.band(inside) if isinstance(logits, Pixels) else _wide(logits[:, :, inside])
        yield rows, resize_rows(part, inside, rows, heights=(height, size[0]), width=size[1])


def _bands(maps: int, size: tuple[int, int]) -> Iterator[slice]:
    height, width = size
    row = max(1, maps * width)
    most = min(MOST_ELEMENTS, max(LEAST_ELEMENTS, row * height // BANDS))
    for start in range(0, height, max(1, most // row)):
        yield slice(start, min(start + max(1, most // row), height))


def by_bands(function: PerPixel, logits: Logits, *others: Tensor) -> Tensor:
    """`function(logits, *others)`: one value for each prediction, whatever its neighbors are.

    Logits (n, classes, h, w) and others (n, h, w) give (n, h, w), at least in float32; gradients flow to the logits.
    Logits (n, classes), and small maps, are computed at once.
    """
    return _apply(function, logits, others, summed=False)


def sum_by_bands(function: PerPixel, logits: Logits, *others: Tensor) -> Tensor:
    """`function(logits, *others)`, a sum over predictions of any shape, as the sum over bands.

    Shapes and gradients are as of `by_bands`.
    """
    return _apply(function, logits, others, summed=True)


def _apply(function: PerPixel, logits: Logits, others: tuple[Tensor, ...], *, summed: bool) -> Tensor:
    if isinstance(logits, Tensor):
        if logits.dim() != 4 or logits.numel() <= min(MOST_ELEMENTS, LEAST_ELEMENTS):
            return function(logits, *others)
        logits = Pixels(logits, (logits.shape[2], logits.shape[3]))
    values: Tensor = _Bands.apply(function, summed, logits, logits.coarse, *others)  # type: ignore[no-untyped-call]
    return values


class _Bands(torch.autograd.Function):
    """The values of all bands one below the other, or their sum; the backward pass computes each band again."""

    @staticmethod
    def forward(ctx: Any, function: PerPixel, summed: bool, pixels: Pixels, coarse: Tensor, *others: Tensor) -> Tensor:
        ctx.function, ctx.summed, ctx.pixels = function, summed, pixels.detach()
        ctx.save_for_backward(coarse, *others)
        result: Tensor | None = None
        with torch.autocast(coarse.device.type, enabled=False):
            for rows in pixels.bands():
                value = function(pixels.band(rows), *(o[:, rows] for o in others))
                if summed:
                    result = value if result is None else result + value
                    continue
                if result is None:
                    result = value.new_empty(*value.shape[:-2], *pixels.size)
                result[..., rows, :] = value
        return coarse.new_zeros(()) if result is None else result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        coarse, *others = ctx.saved_tensors
        pixels: Pixels = ctx.pixels
        result = coarse.new_zeros(coarse.shape, dtype=torch.promote_types(coarse.dtype, torch.float32))
        for rows in pixels.bands():
            inside = source_rows(rows, coarse.shape[-2], pixels.size[0])
            part = _wide(coarse[..., inside, :]).detach().requires_grad_()
            given = gradient if ctx.summed else gradient[..., rows, :]
            with torch.enable_grad(), torch.autocast(coarse.device.type, enabled=False):
                values = ctx.function(pixels._band_of(part, inside, rows), *(o[:, rows] for o in others))
                (found,) = torch.autograd.grad(values, part, given)
            result[..., inside, :] += found
        return None, None, None, result.to(coarse.dtype), *(None for _ in others)


# bilinear resizing


def source_rows(rows: slice, height: int, full: int) -> slice:
    """The rows of a map of `height` from which the given ones of its resize to `full` are made."""
    if height == full:
        return rows
    first, last = ((row + 0.5) * height / full - 0.5 for row in (rows.start, rows.stop - 1))
    return slice(max(int(first) - 1, 0), min(int(last) + 3, height))  # one more on each side, for rounding


def resize_rows(part: Tensor, inside: slice, rows: slice, *, heights: tuple[int, int], width: int) -> Tensor:
    """Some rows of a bilinear resize, of (..., inside, w') to (..., rows, width); corners are not aligned.

    `part` holds the rows `inside` of a map, of which `heights` are the height and that of its resize.
    """
    height, full = heights
    if height != full:
        place = torch.arange(rows.start, rows.stop, device=part.device, dtype=part.dtype)
        place = ((place + 0.5) * (height / full) - 0.5).clamp_min_(0)
        above = place.long()
        below = (above + 1).clamp_max_(height - 1)
        upper, lower = (part.index_select(-2, row - inside.start) for row in (above, below))
        part = torch.lerp(upper, lower, (place - above)[:, None])
    if part.shape[-1] == width:
        return part
    resized = F.interpolate(part.flatten(0, -4), (part.shape[-2], width), mode="bilinear", align_corners=False)
    return resized.view(*part.shape[:-1], width)


def _wide(part: Tensor) -> Tensor:
    return part if part.dtype == torch.float64 else part.float()
