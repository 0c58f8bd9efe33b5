"""Averages of predictions: over an image and its mirror image, and over the members of an ensemble."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from trust_tta.ops.segmentation_logits import CoarseLogits, Logits


def forward_views(forward: Callable[[Tensor], Logits], images: Tensor, *, mirror: bool) -> Logits:
    """Log-probabilities (views, n, classes, ...) of images and, with `mirror`, of their mirror images, in one forward.

    `CoarseLogits` stay logits, (n, views, classes, h', w').
    """
    logits = forward(torch.cat([images, images.flip(-1)]) if mirror else images)
    if isinstance(logits, CoarseLogits):
        views = list(logits.coarse.chunk(1 + mirror))
    else:  # at least float32, also under autocast, which on a CPU keeps half precision
        log_p = logits.log_softmax(1, dtype=torch.promote_types(logits.dtype, torch.float32))
        views = list(log_p.chunk(1 + mirror))
    if mirror and views[1].dim() == 4:
        views[1] = views[1].flip(-1)
    return CoarseLogits(torch.stack(views, 1), logits.size) if isinstance(logits, CoarseLogits) else torch.stack(views)


def log_mean_probability(logits: Logits, *, least: float = -math.inf) -> Logits:
    """Log of the mean of K softmaxes of (K, n, classes, ...), or coarse (n, K, classes, h', w'); at least `least`."""
    if isinstance(logits, CoarseLogits):
        return replace(logits, combine=partial(_log_mean_probability, dim=1, least=least))
    return _log_mean_probability(logits, dim=0, least=least)


def _log_mean_probability(logits: Tensor, *, dim: int, least: float) -> Tensor:
    return (logits.log_softmax(2).logsumexp(dim) - math.log(logits.shape[dim])).clamp_min(least)


def mean_log_probability(logits: Logits) -> Logits:
    """The mean of log-probabilities (K, n, classes), or of coarse ones (n, K, classes, h', w')."""
    if isinstance(logits, CoarseLogits):
        return replace(logits, combine=lambda chunk: chunk.log_softmax(2).mean(1))
    return logits.mean(0)


def log_mean_of_members(members: Sequence[Logits]) -> Logits:
    """Log of the mean of the softmaxes of each member's logits (n, classes, ...)."""
    first, tensors = members[0], [each.coarse if isinstance(each, CoarseLogits) else each for each in members]
    if isinstance(first, CoarseLogits):
        return log_mean_probability(CoarseLogits(torch.stack(tensors, 1), first.size))
    return log_mean_probability(torch.stack(tensors))
