"""ETA: Tent on the predictions that are sure and new, each weighted by how sure it is.

Niu et al., "Efficient Test-Time Model Adaptation without Forgetting", ICML 2022; EATA without its Fisher term.
"""

from __future__ import annotations

import math
from typing import Annotated, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from trust_tta.errors import StateError
from trust_tta.methods.base import Learner, LearningOptions
from trust_tta.methods.losses import ENTROPIES, EntropyKind, by_class
from trust_tta.methods.state import Array, Spec

MOMENTUM = 0.9  # of the moving mean of the predictions

Margin = Annotated[float, Field(ge=0)]  # may be infinite


class EtaOptions(LearningOptions):
    """`margin`: of the entropy, as a part of ln(classes). `d_margin`: largest cosine to the mean prediction; None
    takes 0.4 for up to 10 classes, 0.2 for up to 100 and the paper's 0.05 above, since the fewer the classes, the
    more alike any two predictions are."""

    margin: Margin = 0.4
    d_margin: Margin | None = None
    weighting: bool = True
    entropy: EntropyKind = "softmax"

    @model_validator(mode="after")
    def _finite_weights(self) -> Self:
        if self.weighting and math.isinf(self.margin):
            raise ValueError("an infinite margin gives infinite weights; set weighting=False or a finite margin")
        return self


class Eta(Learner):
    """Entropy of the predictions below `margin` * ln(classes) that differ from the moving mean prediction.

    With `weighting`, a prediction of entropy H counts exp(margin - H). A batch without such a prediction changes
    nothing.
    """

    name = "eta"
    Options = EtaOptions
    options: EtaOptions

    def start(self) -> None:
        self.mean_prediction: Tensor | None = None

    def moving(self) -> dict[str, Spec]:
        return {"mean_prediction": Array((None,), least=0, most=1 + 1e-3)}

    def select(self, logits: Tensor) -> Tensor:
        """Which predictions are reliable and, once there is a mean prediction, not redundant."""
        reliable = ENTROPIES[self.options.entropy](logits) < self.margin(logits.shape[1])
        if self.mean_prediction is None:
            return reliable
        predictions = logits.softmax(1).movedim(1, -1)
        if len(self.mean_prediction) != logits.shape[1]:
            raise StateError(f"the state is of {len(self.mean_prediction)} classes and there are {logits.shape[1]}")
        similarity = torch.cosine_similarity(self.mean_prediction.to(predictions), predictions, dim=-1)
        return reliable & (similarity.abs() < self.d_margin(logits.shape[1]))

    def loss(self, logits: Tensor, chosen: Tensor | None) -> Tensor:
        entropies = ENTROPIES[self.options.entropy](logits)[chosen]
        if not self.options.weighting:
            return entropies.mean()
        return (torch.exp(self.margin(logits.shape[1]) - entropies.detach()) * entropies).mean()

    def learned(self, logits: Tensor, chosen: Tensor | None) -> None:
        """Move the mean prediction (classes,) towards that of the predictions just learned from."""
        prediction = by_class(logits, chosen).softmax(1).mean(0)
        if self.mean_prediction is not None:
            prediction = MOMENTUM * self.mean_prediction.to(prediction) + (1 - MOMENTUM) * prediction
        self.mean_prediction = prediction

    def margin(self, classes: int) -> float:
        """In nats."""
        return self.options.margin * math.log(classes)

    def d_margin(self, classes: int) -> float:
        """The default is what the ports of the method use for 10, 100 and 1000 classes."""
        if self.options.d_margin is not None:
            return self.options.d_margin
        return 0.4 if classes <= 10 else 0.2 if classes <= 100 else 0.05
