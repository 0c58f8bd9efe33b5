"""The losses of the methods.

Logits are (n, classes) or, for dense predictions, (n, classes, h, w), also as `CoarseLogits`: classes are always
dimension 1. Results have one value for each prediction, (n,) or (n, h, w), unless said otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from trust_tta.ops.segmentation_logits import Logits, apply_in_chunks

EntropyKind: TypeAlias = Literal["softmax", "come"]


def entropy(logits: Logits) -> Tensor:
    """Shannon entropy of softmax(logits)."""
    return apply_in_chunks(_entropy, logits)


def _entropy(logits: Tensor) -> Tensor:
    log_p = logits.log_softmax(1)
    return -(log_p.exp() * log_p).sum(1)


def come_entropy(logits: Logits, *, uncertainty: float | None = None) -> Tensor:
    """Entropy of an opinion that keeps some mass, `uncertainty` (the number of classes), for not knowing.

    Zhang et al., "COME: Test-time Adaption by Conservatively Minimizing Entropy", ICLR 2025. The length of the logits
    is held fixed: no gradient flows along them.
    """
    return apply_in_chunks(partial(_come_entropy, uncertainty=uncertainty), logits)


def _come_entropy(logits: Tensor, *, uncertainty: float | None) -> Tensor:
    length = logits.norm(dim=1, keepdim=True)
    directed = logits / length.clamp_min(1e-12) * length.detach()
    mass = torch.full_like(logits[:, :1], uncertainty or logits.shape[1]).log()
    opinion = torch.cat([directed, mass], 1).softmax(1) + 1e-7
    return -(opinion * opinion.log()).sum(1)


ENTROPIES: dict[EntropyKind, Callable[[Logits], Tensor]] = {"softmax": entropy, "come": come_entropy}


def most_likely(logits: Logits) -> Tensor:
    """The class of each prediction."""
    return apply_in_chunks(lambda chunk: chunk.argmax(1), logits.detach())


def pseudo_label_loss(logits: Logits, labels: Tensor | None = None) -> Tensor:
    """Mean cross-entropy to `labels`, or to the prediction's own most likely classes; a scalar."""
    labels = most_likely(logits) if labels is None else labels
    if isinstance(logits, Tensor) and logits.dim() == 2:
        return F.cross_entropy(logits, labels)
    return apply_in_chunks(_cross_entropy, logits, labels).mean()


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="none")


def own_labels(logits: Logits) -> tuple[Tensor, Tensor]:
    """The highest probability of each prediction, and its class."""
    return apply_in_chunks(lambda chunk: chunk.softmax(1).amax(1), logits), most_likely(logits)


def chosen_label_loss(logits: Logits, labels: Tensor, chosen: Tensor) -> Tensor:
    """Mean cross-entropy to `labels` of the predictions `chosen` (n, ...); a scalar."""
    if isinstance(logits, Tensor) and logits.dim() == 2:
        return F.cross_entropy(logits[chosen], labels[chosen])
    return apply_in_chunks(_cross_entropy, logits, labels)[chosen].mean()


def mean_entropy(logits: Logits) -> Tensor:
    """Entropy of the mean prediction, a scalar: large when predictions are diverse."""
    mean = mean_prediction(logits)
    return -(mean * mean.clamp_min(1e-12).log()).sum()


def mean_prediction(logits: Logits, chosen: Tensor | None = None) -> Tensor:
    """The mean of softmax(logits) over the predictions, or over those `chosen` (n, ...), (classes,)."""
    if isinstance(logits, Tensor) and logits.dim() == 2:
        return by_class(logits, chosen).softmax(1).mean(0)
    if chosen is None:
        return apply_in_chunks(_summed, logits, summed=True) / (logits.shape.numel() // logits.shape[1])
    return apply_in_chunks(_summed, logits, chosen, summed=True) / chosen.sum()


def _summed(logits: Tensor, chosen: Tensor | None = None) -> Tensor:
    p = logits.softmax(1)
    return (p if chosen is None else p * chosen[:, None]).sum((0, 2, 3))


def soft_likelihood_ratio(logits: Tensor, *, clip: float = 0.99, eps: float = 1e-5) -> Tensor:
    """Negative expected log-odds of softmax(logits), probabilities cut at `clip`: unlike entropy, steep when sure."""
    p = logits.softmax(1).clamp(max=clip)
    return -(p * (p / (1 - p) + eps).log()).sum(1)


def cross_entropy_to(target: Tensor, logits: Tensor) -> Tensor:
    """Cross-entropy of softmax(logits) to softmax(target)."""
    return -(target.softmax(1) * logits.log_softmax(1)).sum(1)


def symmetric_cross_entropy(logits: Tensor, others: Tensor) -> Tensor:
    """Half the cross-entropy of each prediction to the other; gradients flow through both."""
    log_p, log_q = logits.log_softmax(1), others.log_softmax(1)
    return -(log_p.exp() * log_q + log_q.exp() * log_p).sum(1) / 2


def class_confusion(logits: Logits, *, temperature: float = 2.5) -> Tensor:
    """Class confusion matrix (classes, classes): joint probabilities of pairs of classes, weighted by confidence.

    Jin et al., "Minimum Class Confusion for Versatile Domain Adaptation", ECCV 2020.
    """

    def confusion(chunk: Tensor, weights: Tensor) -> Tensor:
        p = by_class((chunk / temperature).softmax(1))
        return (p * weights.reshape(-1, 1)).T @ p

    with torch.no_grad():
        weights = apply_in_chunks(lambda chunk: _confidence((chunk / temperature).softmax(1)), logits.detach())
        weights = weights * weights.numel() / weights.sum()
    return apply_in_chunks(confusion, logits, weights, summed=True)


def _confidence(p: Tensor) -> Tensor:
    """1 + exp(-entropy) of each prediction."""
    return 1 + torch.exp((p * (p + 1e-5).log()).sum(1))


def confusion_loss(confusion: Tensor) -> Tensor:
    """The share of confusions (classes, classes) that are with another class, as a mean over rows; a scalar."""
    rows = confusion / confusion.sum(1, keepdim=True).clamp_min(1e-12)
    return 1 - rows.diagonal().mean()


def by_class(values: Tensor, chosen: Tensor | None = None) -> Tensor:
    """(n, classes, ...) as one row for each prediction, (m, classes); with `chosen` (n, ...), of those alone."""
    rows = values.movedim(1, -1)
    return rows.reshape(-1, rows.shape[-1]) if chosen is None else rows[chosen]
