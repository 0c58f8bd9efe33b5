"""Segmentation logits: kept coarse, upsampled and reduced in chunks of rows.

The full-size logits of a batch may take hundreds of megabytes, and a loss allocates several tensors of their size. In
chunks of rows, these have the size of a chunk; the backward recomputes each chunk. Segmentation heads give coarse
logits: chunks are upsampled from these, so that full-size logits need not exist at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_CHUNK_ELEMENTS = 1 << 22  # logits of a chunk: 16 MiB in float32
MIN_CHUNK_ELEMENTS = 1 << 16  # smaller maps are not divided
MIN_CHUNKS = 4  # of larger maps

PerPixel = Callable[..., Tensor]


@dataclass(frozen=True, eq=False)
class CoarseLogits:
    """Logits (n, classes, h, w), stored as the coarse ones of which they are the bilinear resize to `size`.

    `coarse`: (n, classes, h', w'), or (n, maps, classes, h', w') where `combine` reduces the maps of a chunk to one.
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

    def detach(self) -> CoarseLogits:
        return replace(self, coarse=self.coarse.detach())

    def chunk(self, rows: slice) -> Tensor:
        """The rows of all maps, (n, classes, rows, w), at least in float32."""
        inside = source_rows(rows, self.coarse.shape[-2], self.size[0])
        return self._upsample_rows(_wide(self.coarse[..., inside, :]), inside, rows)

    def _upsample_rows(self, part: Tensor, inside: slice, rows: slice) -> Tensor:
        chunk = resize_rows(part, inside, rows, heights=(self.coarse.shape[-2], self.size[0]), width=self.size[1])
        return chunk if self.combine is None else self.combine(chunk)

    def upsample(self) -> Tensor:
        """The full-size logits; without gradients, nothing else of their size is allocated."""
        if torch.is_grad_enabled() and self.coarse.requires_grad:
            return self.chunk(slice(0, self.size[0])).to(self.coarse.dtype)
        logits = self.coarse.new_empty(self.shape)
        for rows in self.chunks():
            logits[:, :, rows] = self.chunk(rows)
        return logits

    def chunks(self) -> Iterator[slice]:
        """The rows of each chunk."""
        return _row_chunks(self.coarse[..., 0, 0].numel(), self.size)


Logits: TypeAlias = Tensor | CoarseLogits


def upsample(logits: Logits) -> Tensor:
    """Full-size logits as one tensor."""
    return logits.upsample() if isinstance(logits, CoarseLogits) else logits


@torch.no_grad()
def resized_chunks(logits: Logits, size: tuple[int, int]) -> Iterator[tuple[slice, Tensor]]:
    """Logits (n, classes, h, w) resized to `size` in chunks, (n, classes, rows, width) each, without a gradient."""
    height = logits.shape[2]
    for rows in _row_chunks(logits.shape[:2].numel(), size):
        inside = source_rows(rows, height, size[0])
        part = logits.chunk(inside) if isinstance(logits, CoarseLogits) else _wide(logits[:, :, inside])
        yield rows, resize_rows(part, inside, rows, heights=(height, size[0]), width=size[1])


def _row_chunks(maps: int, size: tuple[int, int]) -> Iterator[slice]:
    height, width = size
    row = max(1, maps * width)
    most = min(MAX_CHUNK_ELEMENTS, max(MIN_CHUNK_ELEMENTS, row * height // MIN_CHUNKS))
    for start in range(0, height, max(1, most // row)):
        yield slice(start, min(start + max(1, most // row), height))


def apply_in_chunks(function: PerPixel, logits: Logits, *others: Tensor, summed: bool = False) -> Tensor:
    """`function(logits, *others)`, which treats each pixel by itself, in chunks of rows.

    Logits (n, classes, h, w) and others (n, h, w) give (n, h, w), at least in float32; gradients flow to the logits.
    `summed`: the function returns a sum over the pixels that it is given, of any shape; the sums of the chunks are
    added. Logits (n, classes), and small maps, are computed at once.
    """
    if isinstance(logits, Tensor):
        if logits.dim() != 4 or logits.numel() <= min(MAX_CHUNK_ELEMENTS, MIN_CHUNK_ELEMENTS):
            return function(logits, *others)
        logits = CoarseLogits(logits, (logits.shape[2], logits.shape[3]))
    return _ChunkedFunction.apply(function, summed, logits, logits.coarse, *others)  # type: ignore[no-untyped-call]


class _ChunkedFunction(torch.autograd.Function):
    """The values of all chunks concatenated, or their sum; the backward recomputes each chunk."""

    @staticmethod
    def forward(
        ctx: Any, function: PerPixel, summed: bool, logits: CoarseLogits, coarse: Tensor, *others: Tensor
    ) -> Tensor:
        ctx.function, ctx.summed, ctx.logits = function, summed, logits.detach()
        ctx.save_for_backward(coarse, *others)
        result: Tensor | None = None
        with torch.autocast(coarse.device.type, enabled=False):
            for rows in logits.chunks():
                value = function(logits.chunk(rows), *(o[:, rows] for o in others))
                if summed:
                    result = value if result is None else result + value
                    continue
                if result is None:
                    result = value.new_empty(*value.shape[:-2], *logits.size)
                result[..., rows, :] = value
        return coarse.new_zeros(()) if result is None else result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        coarse, *others = ctx.saved_tensors
        logits: CoarseLogits = ctx.logits
        result = coarse.new_zeros(coarse.shape, dtype=torch.promote_types(coarse.dtype, torch.float32))
        for rows in logits.chunks():
            inside = source_rows(rows, coarse.shape[-2], logits.size[0])
            part = _wide(coarse[..., inside, :]).detach().requires_grad_()
            upstream = gradient if ctx.summed else gradient[..., rows, :]
            with torch.enable_grad(), torch.autocast(coarse.device.type, enabled=False):
                values = ctx.function(logits._upsample_rows(part, inside, rows), *(o[:, rows] for o in others))
                (found,) = torch.autograd.grad(values, part, upstream)
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
