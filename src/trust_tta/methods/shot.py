"""SHOT, online: information maximization and confident own labels under a fixed classifier.

Liang et al., "Do We Really Need to Access the Source Data? Source Hypothesis Transfer for Unsupervised Domain
Adaptation", ICML 2020. The paper runs many epochs over the whole target set and labels it by class centroids.
An online stream has no such set, and the online versions in use differ. This is the one of TTAB (Zhao et al., "On
Pitfalls of Test-Time Adaptation", ICML 2023): the labels are the network's own where it is more than 90 % sure.
"""

from __future__ import annotations

from torch import Tensor

from trust_tta.methods.base import Learner, LearningOptions
from trust_tta.methods.losses import chosen_label_loss, entropy, mean_entropy, own_labels
from trust_tta.methods.parameters import ParameterSet
from trust_tta.ops.segmentation_logits import Logits
from trust_tta.schema import Rate


class ShotOptions(LearningOptions):
    parameters: ParameterSet = "all"
    beta: Rate = 0.3
    confidence: Rate = 0.9


class Shot(Learner):
    """Mean entropy - entropy of the mean prediction + `beta` * cross-entropy to own labels above `confidence`.

    The last linear layer is always fixed. `beta=0` is information maximization alone.
    """

    Options = ShotOptions
    options: ShotOptions
    chunked_loss = True

    def loss(self, logits: Logits) -> Tensor:
        loss = entropy(logits).mean() - mean_entropy(logits)
        confidence, labels = own_labels(logits.detach())
        sure = confidence > self.options.confidence
        if self.options.beta and bool(sure.any()):
            loss = loss + self.options.beta * chosen_label_loss(logits, labels, sure)
        return loss
