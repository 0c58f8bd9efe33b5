"""The losses of the methods. Logits are (n, classes); the result is one value a sample unless said otherwise."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def entropy(logits: Tensor) -> Tensor:
    """Shannon entropy of softmax(logits), (n,)."""
    log_p = logits.log_softmax(1)
    return -(log_p.exp() * log_p).sum(1)


def pseudo_label_loss(logits: Tensor, labels: Tensor | None = None) -> Tensor:
    """Mean cross-entropy to `labels`, or to the prediction's own most likely classes."""
    return F.cross_entropy(logits, logits.detach().argmax(1) if labels is None else labels)


def mean_entropy(logits: Tensor) -> Tensor:
    """Entropy of the mean prediction of the batch, a scalar: large when predictions are diverse."""
    mean = logits.softmax(1).mean(0)
    return -(mean * mean.clamp_min(1e-12).log()).sum()
