"""How much the statistics of a stream count beside those of training, learned by each norm.

Where images are disturbed, the statistics of training mislead; where they are drawn or painted, those of the stream do
too. The loss of an adapting pass tells: its slope along each norm's share comes with the gradient of the weights. A
share moves as steadily as its slope points one way, and only while the norms agree: under noise and blur they point
in all directions, and the stream counts alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from trust_tta.methods.state import StateModule

START = 1.0  # of the stream, at the beginning and in a new domain
RATE = 0.4  # a share moves by at most so much per 128 images
BATCH = 128  # images for which this is stated
HALF_LIFE = 1024.0  # images after which half of a slope is new
CHANCE, AGREED = 0.15, 0.3  # mean steadiness of all norms that chance gives, and with which they move at full rate


class Shares(StateModule):
    """The share of the stream in each of the norms, from 0 to 1; the rest is the source's.

    `value` (norms,) is what passes read. `slope` and `square` (norms,): moving means of its gradient and of the
    gradient's square, over `images` () images.
    """

    MEMORY = ("value", "slope", "square", "images")
    LIMITS = {"value": {"least": 0, "most": 1}, "slope": {}}  # noqa: RUF012
    slope: Tensor
    square: Tensor
    images: Tensor

    def __init__(self, norms: int, like: Tensor) -> None:
        super().__init__()
        zeros = like.detach().new_zeros(norms, dtype=torch.promote_types(like.dtype, torch.float32))
        self.value = nn.Parameter(zeros.clone())
        for name, value in (("slope", zeros), ("square", zeros.clone()), ("images", zeros.new_zeros(()))):
            self.register_buffer(name, value, persistent=False)
        self.restore_source()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """After a copy or a pickle: shares of its own, also where tensors came as shared memory."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.value.data = self.value.data.clone()

    @torch.no_grad()
    def restore_source(self) -> None:
        self.reopen(self.value.new_zeros(()))

    @torch.no_grad()
    def reopen(self, left: Tensor) -> None:
        """Keep what is `left` (), from 0 to 1, of what was learned: the images may be of another domain."""
        self.value.copy_(START + (self.value - START) * left)
        for memory in (self.slope, self.square, self.images):
            memory.mul_(left)

    @torch.no_grad()
    def learn(self, gradient: Tensor, images: int, *, finite: Tensor, pace: Tensor | float = 1.0) -> None:
        """Move along the gradient (norms,) of a batch, as far as `pace` allows; `finite` (): whether it can be used."""
        new = finite * self.images.new_full((), 1 - 2 ** (-images / HALF_LIFE))
        gradient = gradient.masked_fill(~finite, 0.0).to(self.slope)
        self.slope.lerp_(gradient, new)
        self.square.lerp_(gradient.square(), new)
        self.images.add_(finite, alpha=images)
        steady, agreement = self.evidence(images)
        moved = (self.value - RATE * images / BATCH * pace * agreement * steady).clamp(0, 1)
        self.value.copy_(torch.where(finite, moved, self.value))

    def evidence(self, images: int) -> tuple[Tensor, Tensor]:
        """How steady each slope (norms,) is in batches of so many images, from -1 to 1, and whether they agree ().

        1: in every batch of 128 images the same.
        """
        seen = (1 - torch.exp2(-self.images / HALF_LIFE)).clamp_min(1e-6)
        slope, square = self.slope / seen, self.square / seen
        chance = (square - slope.square()).clamp_min(0) * images / BATCH
        steady = slope / (slope.square() + chance).sqrt().clamp_min(1e-20)
        agreement = (steady.mean().abs() * seen.sqrt() - CHANCE) / (AGREED - CHANCE)
        return steady, agreement.clamp(0, 1)
