"""SAR: sharpness-aware entropy minimisation on reliable samples, with a way back.

Niu et al., "Towards Stable Test-Time Adaptation in Dynamic Wild World", ICLR 2023.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from trust_tta.methods.base import Method
from trust_tta.methods.losses import entropy
from trust_tta.methods.modes import check_number, choose
from trust_tta.methods.parameters import PARAMETER_SETS, select

MOMENTUM = 0.9  # of the moving mean of the loss


class Sar(Method):
    """Climb by `rho` along the gradient, and take the step that the gradient found there asks for.

    Samples count below an entropy of `margin` * ln(classes), before the climb and after it. When the moving
    mean of the second loss falls below `reset_threshold` the predictions have collapsed: weights and optimiser
    return to the source, `counters.recoveries` counts it, and the mean starts anew. The threshold is the paper's
    for 1000 classes; 0 switches it off. With `skip_last` the last stage and the last norm stay as they are.
    """

    name = "sar"

    def __init__(
        self,
        model: nn.Module,
        *,
        lr: float = 1e-4,
        steps: int = 1,
        rho: float = 0.05,
        margin: float = 0.4,
        reset_threshold: float = 0.2,
        skip_last: bool = True,
        parameters: str = "bn",
        optimizer: str = "adam",
        episodic: bool = False,
        batch_statistics: bool = True,
    ) -> None:
        check_number("rho", rho)
        check_number("margin", margin, infinite=True)
        check_number("reset_threshold", reset_threshold)
        super().__init__(
            model,
            adapted=select(model, choose("parameters", parameters, PARAMETER_SETS), skip_last=skip_last),
            lr=lr,
            optimizer=optimizer,
            steps=steps,
            episodic=episodic,
            batch_statistics=batch_statistics,
        )
        self.rho, self.margin, self.reset_threshold = rho, margin, reset_threshold
        self.mean_loss: float | None = None

    def adapt(self, images: Tensor) -> Tensor:
        for _ in range(self.steps):
            logits = self.predict(images)
            if self.logits_before is None:
                self.logits_before = logits.detach()
            loss = self.sharpness_aware_update(images, logits)
            if loss is not None:
                self.follow(loss)
        with torch.no_grad():
            return self.predict(images)

    def sharpness_aware_update(self, images: Tensor, logits: Tensor) -> float | None:
        """The second loss, or None where no sample was reliable or the update was refused."""
        first, reliable = self.reliable_entropies(logits)
        gradient = self.gradient(first.mean()) if len(first) else None
        if gradient is None:
            return None
        start = self.snapshot()
        self.load_snapshot(start + gradient * (self.rho / (gradient.norm() + 1e-12)))
        second, _ = self.reliable_entropies(self.predict(images)[reliable])
        if not len(second):
            self.load_snapshot(start)
            return None
        loss = second.mean()
        return loss.item() if self.update(loss, start=start) else None

    def reliable_entropies(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The entropies below the margin, (m,), and which of the samples they are, (n,)."""
        entropies = entropy(logits)
        reliable = entropies.detach() < self.margin * math.log(logits.shape[1])
        return entropies[reliable], reliable

    def follow(self, loss: float) -> None:
        """Move the mean loss; when it says that the predictions have collapsed, start from the source again."""
        self.mean_loss = loss if self.mean_loss is None else MOMENTUM * self.mean_loss + (1 - MOMENTUM) * loss
        if self.mean_loss < self.reset_threshold:
            self.restore_source()
            self.counters.recoveries += 1

    def extra_state(self) -> dict[str, Any]:
        return {} if self.mean_loss is None else {"mean_loss": self.mean_loss}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        self.mean_loss = state.get("mean_loss")
