"""SHOT, online: information maximisation and confident own labels under a fixed classifier.

Liang et al., "Do We Really Need to Access the Source Data? Source Hypothesis Transfer for Unsupervised Domain
Adaptation", ICML 2020. The paper runs many epochs over the whole target set and labels it by class centroids.
An online stream has no such set, and the online versions in use differ. This is the one of TTAB (Zhao et al., "On
Pitfalls of Test-Time Adaptation", ICML 2023): the labels are the network's own where it is more than 90 % sure.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trust_tta.methods.base import Method
from trust_tta.methods.losses import entropy, mean_entropy
from trust_tta.methods.modes import check_number, choose
from trust_tta.methods.parameters import PARAMETER_SETS, all_but_the_head, select


class Shot(Method):
    """Mean entropy - entropy of the mean prediction + `beta` * cross-entropy to confident own labels.

    The last linear layer is always fixed. `parameters`: "all" adapts everything before it, as the paper does;
    "ss2d" and "bn" less. `beta=0` is information maximisation alone.
    """

    name = "shot"

    def __init__(
        self,
        model: nn.Module,
        *,
        lr: float = 1e-4,
        steps: int = 1,
        beta: float = 0.3,
        confidence: float = 0.9,
        parameters: str = "all",
        optimizer: str = "adam",
        episodic: bool = False,
        batch_statistics: bool = True,
    ) -> None:
        check_number("beta", beta)
        check_number("confidence", confidence)
        kinds = choose("parameters", parameters, {"all": (), **PARAMETER_SETS})
        super().__init__(
            model,
            adapted=select(model, kinds) if kinds else all_but_the_head(model),
            lr=lr,
            optimizer=optimizer,
            steps=steps,
            episodic=episodic,
            batch_statistics=batch_statistics,
        )
        self.beta, self.confidence = beta, confidence

    def adapt(self, images: Tensor) -> Tensor:
        for _ in range(self.steps):
            logits = self.predict(images)
            if self.logits_before is None:
                self.logits_before = logits.detach()
            self.update(self.loss(logits))
        with torch.no_grad():
            return self.predict(images)

    def loss(self, logits: Tensor) -> Tensor:
        """A scalar from logits (n, classes)."""
        loss = entropy(logits).mean() - mean_entropy(logits)
        confidence, labels = logits.detach().softmax(1).max(1)
        sure = confidence > self.confidence
        if self.beta and bool(sure.any()):
            loss = loss + self.beta * F.cross_entropy(logits[sure], labels[sure])
        return loss
