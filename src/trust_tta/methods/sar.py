"""SAR: sharpness-aware entropy minimization on reliable predictions, with a way back.

Niu et al., "Towards Stable Test-Time Adaptation in Dynamic Wild World", ICLR 2023.
"""

from __future__ import annotations

import math

from torch import Tensor, nn

from trust_tta.methods.base import Learner, LearningOptions
from trust_tta.methods.eta import Margin
from trust_tta.methods.losses import ENTROPIES, EntropyKind
from trust_tta.methods.parameters import select
from trust_tta.methods.state import Number, Spec
from trust_tta.ops.segmentation_logits import Logits
from trust_tta.schema import Rate

MOMENTUM = 0.9  # of the moving mean of the loss


class SarOptions(LearningOptions):
    """`reset_threshold` is the paper's for 1000 classes; 0 switches it off."""

    rho: Rate = 0.05
    margin: Margin = 0.4
    reset_threshold: Rate = 0.2
    skip_last: bool = True
    entropy: EntropyKind = "softmax"


class Sar(Learner):
    """Climb by `rho` along the gradient, and take the step that the gradient found there asks for.

    Predictions count below an entropy of `margin` * ln(classes), before the climb and after it. When the moving
    mean of the second loss falls below `reset_threshold` the predictions have collapsed: weights and optimizer
    return to the source, `counters.recoveries` counts it, and the mean starts anew. With `skip_last` the last stage
    and the last norm stay as they are.
    """

    Options = SarOptions
    options: SarOptions
    in_bands = True

    def start(self) -> None:
        self.mean_loss: float | None = None

    def moving(self) -> dict[str, Spec]:
        return {"mean_loss": Number(float, least=0)}

    def adapted_names(self, model: nn.Module) -> list[str]:
        return select(model, self.options.parameters, skip_last=self.options.skip_last)

    def learn(self, images: Tensor, logits: Logits) -> None:
        reliable = self.select(logits.detach())
        gradient = self.update.gradient(self.loss(logits, reliable)) if bool(reliable.any()) else None
        if gradient is None:
            return
        start = self.weights.read()
        self.weights.write(start + gradient * (self.options.rho / (gradient.norm() + 1e-12)))
        above = self.predict.coarse(images)
        still = reliable & self.select(above.detach())
        if not bool(still.any()):
            self.weights.write(start)
            return
        loss = self.loss(above, still)
        if self.update(loss, start=start):
            self.follow(loss.item())

    def select(self, logits: Logits) -> Tensor:
        margin = self.options.margin * math.log(logits.shape[1])
        return ENTROPIES[self.options.entropy](logits) < margin

    def loss(self, logits: Logits, chosen: Tensor | None) -> Tensor:
        return ENTROPIES[self.options.entropy](logits)[chosen].mean()

    def follow(self, loss: float) -> None:
        """Move the mean loss; when it says that the predictions have collapsed, start from the source again."""
        self.mean_loss = loss if self.mean_loss is None else MOMENTUM * self.mean_loss + (1 - MOMENTUM) * loss
        if self.mean_loss < self.options.reset_threshold:
            self.weights.restore_source()  # what the norms have seen of the stream is still right
            self.start()
            self.counters.recoveries += 1
