"""Source mixing: how much the stream's BatchNorm statistics count beside those of training.

Under noise the statistics of training mislead; on clean images, and in other styles, those of the stream do. The loss
of the adapting pass tells: its derivative along the share of the stream comes with the gradient of the weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from trust_tta.methods.state import StateModule
from trust_tta.methods.tide.constants import TIDE


class SourceMixing(StateModule):
    """Share of the stream's statistics, from 0 to 1; the rest is the source's.

    `value` (norms,): the share, which the norms read; one number for all of them, with a gradient from each. `slope`
    and `square` (): moving means of the loss's derivative along the share and of its square, over `images` () images.
    """

    MEMORY = ("value", "slope", "square", "images")
    LIMITS = {"value": {"least": 0, "most": 1}, "slope": {}}  # noqa: RUF012
    slope: Tensor
    square: Tensor
    images: Tensor

    def __init__(self, norms: int, like: Tensor) -> None:
        super().__init__()
        dtype = torch.promote_types(like.dtype, torch.float32)
        value = torch.full((norms,), TIDE.stream_share, dtype=dtype, device=like.device)
        self.value = nn.Parameter(value)
        for name in self.MEMORY[1:]:
            self.register_buffer(name, value.new_zeros(()), persistent=False)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """After a copy or a pickle: a tensor of its own, also where it came as shared memory."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.value.data = self.value.data.clone()

    @torch.no_grad()
    def restore_source(self) -> None:
        self.forget(self.value.new_zeros(()))

    @torch.no_grad()
    def forget(self, kept: Tensor) -> None:
        """Keep the fraction `kept` () of what was learned: the images may be of another domain."""
        self.value.copy_(TIDE.stream_share + (self.value - TIDE.stream_share) * kept)
        for memory in (self.slope, self.square, self.images):
            memory.mul_(kept)

    @torch.no_grad()
    def update(self, gradient: Tensor, images: int, *, finite: Tensor, pace: Tensor | float = 1.0) -> None:
        """Move against the gradient (norms,) of a batch, as far as its sign is steady from batch to batch.

        `finite` (): whether the gradient can be used. `pace`: relative length of the step.
        """
        slope = gradient.masked_fill(~finite, 0.0).to(self.slope).sum()
        fresh = finite * self.images.new_full((), 1 - 2 ** (-images / TIDE.domain_images))
        self.slope.lerp_(slope, fresh)
        self.square.lerp_(slope.square(), fresh)
        self.images.add_(finite, alpha=images)
        seen = (1 - torch.exp2(-self.images / TIDE.domain_images)).clamp_min(1e-6)
        mean, square = self.slope / seen, self.square / seen
        noise = (square - mean.square()).clamp_min(0) * images / TIDE.unit
        steadiness = mean / (mean.square() + noise).sqrt().clamp_min(1e-20)
        moved = (self.value - TIDE.mixing_rate * images / TIDE.unit * pace * steadiness).clamp(0, 1)
        self.value.copy_(torch.where(finite, moved, self.value))
