"""The network as it is: with its running statistics, or with those of the batch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trust_tta.methods.base import Method


class Source(Method):
    """No adaptation: what the network was trained to do."""

    name = "source"

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, batch_statistics=False)

    def adapt(self, images: Tensor) -> Tensor:
        with torch.no_grad():
            logits = self.predict(images)
        self.logits_before = logits
        return logits


class BatchStatistics(Method):
    """Normalise with the statistics of the test batch; the paper's "source only". No weight changes."""

    name = "bn"

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, batch_statistics=True)

    def adapt(self, images: Tensor) -> Tensor:
        with torch.no_grad():
            logits = self.predict(images)
        self.logits_before = logits
        return logits
