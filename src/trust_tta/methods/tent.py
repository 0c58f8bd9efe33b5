"""Tent: descend the entropy of the predictions in the affine weights of the normalisations.

Wang et al., "Tent: Fully Test-Time Adaptation by Entropy Minimization", ICLR 2021.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trust_tta.methods.base import Method
from trust_tta.methods.losses import entropy
from trust_tta.methods.modes import choose
from trust_tta.methods.parameters import PARAMETER_SETS, select


class Tent(Method):
    """Mean entropy, one step a batch, then a prediction with the new weights."""

    name = "tent"

    def __init__(
        self,
        model: nn.Module,
        *,
        lr: float = 1e-4,
        steps: int = 1,
        parameters: str = "bn",
        optimizer: str = "adam",
        episodic: bool = False,
        batch_statistics: bool = True,
    ) -> None:
        super().__init__(
            model,
            adapted=select(model, choose("parameters", parameters, PARAMETER_SETS)),
            lr=lr,
            optimizer=optimizer,
            steps=steps,
            episodic=episodic,
            batch_statistics=batch_statistics,
        )

    def adapt(self, images: Tensor) -> Tensor:
        for _ in range(self.steps):
            logits = self.predict(images)
            if self.logits_before is None:
                self.logits_before = logits.detach()
            self.update(entropy(logits).mean())
        with torch.no_grad():
            return self.predict(images)
