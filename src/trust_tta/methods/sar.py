"""SAR: sharpness-aware entropy minimization on reliable predictions, with recovery from collapse.

Niu et al., "Towards Stable Test-Time Adaptation in Dynamic Wild World", ICLR 2023.
"""

from __future__ import annotations

import math

from torch import Tensor

from trust_tta.methods.base import Learner, LearningOptions
from trust_tta.methods.eta import Margin
from trust_tta.methods.losses import ENTROPIES, EntropyKind
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
    """Sharpness-aware step: the gradient at the weights moved by `rho` along their gradient.

    Only predictions with an entropy below `margin` * ln(classes) count, at both points. A moving mean of the second
    loss below `reset_threshold` means collapse: weights and optimizer are reset, which `counters.recoveries` counts.
    `skip_last` leaves out the last stage and the last norm.
    """

    Options = SarOptions
    options: SarOptions
    chunked_loss = True
    mean_loss: float | None

    def state_spec(self) -> dict[str, Spec]:
        return {"mean_loss": Number(float, least=0)}

    def update(self, images: Tensor, logits: Logits) -> None:
        entropies = ENTROPIES[self.options.entropy](logits)
        margin = self.options.margin * math.log(logits.shape[1])
        reliable = entropies.detach() < margin
        if not bool(reliable.any()):
            return
        self.counters.backwards += 1
        if not bool(self.weights.backward(entropies[reliable].mean())):
            self.counters.skipped += 1
            return
        start, gradient = self.weights.snapshot(), self.weights.gradient
        self.weights.load(start + gradient * (self.options.rho / (gradient.norm() + 1e-12)))
        entropies = ENTROPIES[self.options.entropy](self.logits(images))
        reliable &= entropies.detach() < margin
        if not bool(reliable.any()):
            self.weights.load(start)
            return
        loss = entropies[reliable].mean()
        if bool(self.step(loss, start=start)):
            self.update_mean_loss(loss.item())

    def update_mean_loss(self, loss: float) -> None:
        """Update the moving mean of the loss; reset to the source where it shows a collapse."""
        self.mean_loss = loss if self.mean_loss is None else MOMENTUM * self.mean_loss + (1 - MOMENTUM) * loss
        if self.mean_loss < self.options.reset_threshold:
            self.weights.restore_source()  # but not the statistics of the norms
            self.reset_state()
            self.counters.recoveries += 1
