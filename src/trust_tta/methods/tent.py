"""Tent: minimize the entropy of the predictions over the affine parameters of the normalization layers.

Wang et al., "Tent: Fully Test-Time Adaptation by Entropy Minimization", ICLR 2021.
"""

from __future__ import annotations

from torch import Tensor

from trust_tta.methods.base import Learner, LearningOptions
from trust_tta.methods.losses import ENTROPIES, EntropyKind
from trust_tta.ops.segmentation_logits import Logits


class TentOptions(LearningOptions):
    entropy: EntropyKind = "softmax"


class Tent(Learner):
    """One gradient step per batch on the mean entropy of its predictions."""

    Options = TentOptions
    options: TentOptions
    chunked_loss = True

    def loss(self, logits: Logits) -> Tensor:
        return ENTROPIES[self.options.entropy](logits).mean()
