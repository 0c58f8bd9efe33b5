"""Tent: descend the entropy of the predictions in the affine weights of the normalizations.

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
    """The mean entropy of the batch."""

    Options = TentOptions
    options: TentOptions
    in_bands = True

    def loss(self, logits: Logits, chosen: Tensor | None) -> Tensor:
        return ENTROPIES[self.options.entropy](logits).mean()
