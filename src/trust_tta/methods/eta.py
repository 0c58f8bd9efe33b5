"""ETA: Tent on the samples that are sure and new, each weighted by how sure it is.

Niu et al., "Efficient Test-Time Model Adaptation without Forgetting", ICML 2022; EATA without its Fisher term.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from trust_tta.errors import ConfigError
from trust_tta.methods.base import Method
from trust_tta.methods.losses import entropy
from trust_tta.methods.modes import check_number, choose
from trust_tta.methods.parameters import PARAMETER_SETS, select

MOMENTUM = 0.9  # of the moving mean of the predictions


class Eta(Method):
    """Entropy of the samples below `margin` * ln(classes) that differ from the moving mean prediction.

    `d_margin` is the largest cosine similarity to that mean; None takes 0.4 for up to 10 classes, 0.2 for up to
    100 and the paper's 0.05 above, since the fewer the classes, the more alike any two predictions are. With
    `weighting`, a sample of entropy H counts exp(margin - H). A batch without such a sample changes nothing.
    """

    name = "eta"

    def __init__(
        self,
        model: nn.Module,
        *,
        lr: float = 1e-4,
        steps: int = 1,
        margin: float = 0.4,
        d_margin: float | None = None,
        weighting: bool = True,
        parameters: str = "bn",
        optimizer: str = "adam",
        episodic: bool = False,
        batch_statistics: bool = True,
    ) -> None:
        check_number("margin", margin, infinite=True)
        check_number("d_margin", 0.0 if d_margin is None else d_margin, infinite=True)
        if weighting and math.isinf(margin):
            raise ConfigError("an infinite margin gives infinite weights; set weighting=False or a finite margin")
        super().__init__(
            model,
            adapted=select(model, choose("parameters", parameters, PARAMETER_SETS)),
            lr=lr,
            optimizer=optimizer,
            steps=steps,
            episodic=episodic,
            batch_statistics=batch_statistics,
        )
        self.margin, self.d_margin, self.weighting = margin, d_margin, weighting
        self.mean_prediction: Tensor | None = None

    def adapt(self, images: Tensor) -> Tensor:
        for _ in range(self.steps):
            logits = self.predict(images)
            if self.logits_before is None:
                self.logits_before = logits.detach()
            entropies = entropy(logits)
            chosen = self.choose_samples(entropies.detach(), logits.detach().softmax(1))
            if bool(chosen.any()) and self.update(self.loss(entropies[chosen], logits.shape[1])):
                self.follow(logits.detach()[chosen].softmax(1).mean(0))
        with torch.no_grad():
            return self.predict(images)

    def choose_samples(self, entropies: Tensor, predictions: Tensor) -> Tensor:
        """Which samples (n,) are reliable and, once there is a mean prediction, not redundant."""
        chosen = entropies < self.margin * math.log(predictions.shape[1])
        if self.mean_prediction is None:
            return chosen
        d_margin = default_d_margin(predictions.shape[1]) if self.d_margin is None else self.d_margin
        similarity = torch.cosine_similarity(self.mean_prediction[None].to(predictions), predictions, dim=1)
        return chosen & (similarity.abs() < d_margin)

    def loss(self, entropies: Tensor, classes: int) -> Tensor:
        """The mean of the chosen samples' entropies (m,), weighted."""
        if not self.weighting:
            return entropies.mean()
        return (torch.exp(self.margin * math.log(classes) - entropies.detach()) * entropies).mean()

    def follow(self, prediction: Tensor) -> None:
        """Move the mean prediction (classes,) towards that of the samples just learned from."""
        if self.mean_prediction is not None:
            prediction = MOMENTUM * self.mean_prediction.to(prediction) + (1 - MOMENTUM) * prediction
        self.mean_prediction = prediction

    def extra_state(self) -> dict[str, Any]:
        return {} if self.mean_prediction is None else {"mean_prediction": self.mean_prediction}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        self.mean_prediction = state.get("mean_prediction")


def default_d_margin(classes: int) -> float:
    """What the ports of the method use for 10, 100 and 1000 classes."""
    return 0.4 if classes <= 10 else 0.2 if classes <= 100 else 0.05
