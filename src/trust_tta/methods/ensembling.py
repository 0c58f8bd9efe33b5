"""Averages of predictions: over an image and its mirror image, and over the members of an ensemble."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from trust_tta.ops.segmentation_logits import CoarseLogits, Logits


def mirrored(predict: Callable[[Tensor], Logits], images: Tensor) -> Logits:
    """Log-probabilities (2, n, classes, ...) of images and of their mirror images, in one forward over both.

    `CoarseLogits` stay logits, (n, 2, classes, h', w').
    """
    logits = predict(torch.cat([images, images.flip(-1)]))
    if isinstance(logits, CoarseLogits):
        plain, other = logits.coarse.chunk(2)
        return CoarseLogits(torch.stack([plain, other.flip(-1)], 1), logits.size)
    plain, other = _log_probability(logits).chunk(2)
    return torch.stack([plain, other.flip(-1) if other.dim() == 4 else other])


def single(logits: Logits) -> Logits:
    """The log-probabilities of one view, in the shape of those of `mirrored`: (1, n, classes, ...)."""
    if isinstance(logits, CoarseLogits):
        return replace(logits, coarse=logits.coarse[:, None])
    return _log_probability(logits)[None]


def _log_probability(logits: Tensor) -> Tensor:
    """Log-softmax in at least float32, also under autocast, which on a CPU keeps half precision."""
    return logits.log_softmax(1, dtype=torch.promote_types(logits.dtype, torch.float32))


def log_mean_probability(logits: Logits, *, least: float = -math.inf) -> Logits:
    """Log of the mean of K softmaxes of (K, n, classes, ...), or coarse (n, K, classes, h', w'); at least `least`."""
    if isinstance(logits, CoarseLogits):
        return replace(logits, combine=partial(_log_mean_probability, dim=1, least=least))
    return _log_mean_probability(logits, dim=0, least=least)


def _log_mean_probability(logits: Tensor, *, dim: int, least: float) -> Tensor:
    mean = logits.log_softmax(2).logsumexp(dim) - math.log(logits.shape[dim])
    return mean if least == -math.inf else mean.clamp_min(least)


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
