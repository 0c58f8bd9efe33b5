"""Class prior: corrects predictions for the network's bias and for labels that come in runs.

Under a corruption a network prefers some classes. Its mean log-probabilities over many images show which, and are
subtracted, as far as neither chance nor the differences that clean images have explain them. The mean prediction over
the neighbors of an image differs from that of the stream beyond chance only where labels are correlated in time; then
it is the prior of that image (Saerens et al., 2002). A bias is constant in time, labels change. In a
mixed stream each domain has a bias of its own. Where BatchNorm statistics show no shift, a preference is the network's
own and stays.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from trust_tta.methods.tide.constants import TIDE

_ROUNDS = 5  # of expectation maximization; more change nothing
_MIN_P = 1e-12
_CHUNK = 512  # images whose neighborhoods are computed at once


class PriorMemory(NamedTuple):
    """Decayed sums over the images of the stream.

    `marginal` (classes,): of predictions. `scores` (1 + clusters, classes): of centered log-probabilities, of all
    images and of those of each domain of a mixed stream; `spread` (1 + clusters, 2): of their mean square and of
    images. `window` (2, classes): over the last images, of the predictions and of the corrected ones. `agreement` (3,):
    covariance of predictions with their neighbors, its value for equal neighbors, and the number of pairs.
    """

    marginal: Tensor
    scores: Tensor
    spread: Tensor
    window: Tensor
    agreement: Tensor

    @classmethod
    def empty(cls, p: Tensor) -> PriorMemory:
        """Without images, for predictions like p (n, classes)."""
        classes = p.shape[1]
        rows = 1 + TIDE.clusters
        return cls(*(p.new_zeros(shape) for shape in ((classes,), (rows, classes), (rows, 2), (2, classes), (3,))))


class Corrected(NamedTuple):
    """Corrected probabilities (n, classes), the memory with the batch, and the weight () of the local prior."""

    p: Tensor
    memory: PriorMemory
    weight: Tensor


def network_bias(scores: Tensor, spread: Tensor, shift: Tensor | float = 1.0, groups: Tensor | None = None) -> Tensor:
    """Bias (1 or n, classes) in the network's log-probabilities, from `scores` and `spread` of a `PriorMemory`.

    `shift` (): evidence that a preference is due to a shift, and not to the labels or the network's own. `groups` (n,):
    the domain of each image of a mixed stream.
    """
    mean = scores / spread[:, 1:].clamp_min(1e-6)
    bias = mean * (bias_share(scores, spread) * shift)[:, None]
    return bias[:1] if groups is None else bias[1 + groups]


def bias_share(scores: Tensor, spread: Tensor) -> Tensor:
    """Share (1 + clusters,) of the mean log-probabilities that is bias, by `scores` and `spread` of a `PriorMemory`.

    As in `source_mixing.py`: their mean square D is weighed against chance and against what clean images have, a
    fraction of the mean square of the log-probabilities.
    """
    square, images = spread.unbind(1)
    images = images.clamp_min(1e-6)
    distance = (scores / images[:, None]).square().mean(1)
    chance = (square / images - distance).clamp_min(0) / (images - 1).clamp_min(1e-6)
    expected = TIDE.standard_errors**2 * chance + TIDE.clean_bias * square / images
    return distance / (distance + expected).clamp_min(1e-12) * (images > 1)


def correct_prior(
    p: Tensor,
    memory: PriorMemory,
    *,
    shift: Tensor | float = 1.0,
    weight: Tensor | float = 1.0,
    groups: Tensor | None = None,
) -> Corrected:
    """Correct the probabilities p (n, classes) of consecutive images; `shift` and `groups` as in `network_bias`.

    `weight` (): of these images in the bias.
    """
    parts = []
    prior_weight = p.new_zeros(())
    domains = [None] * len(p) if groups is None else groups.split(_CHUNK)
    for chunk, domain in zip(p.split(_CHUNK), domains, strict=False):
        corrected, memory, prior_weight = _correct_chunk(chunk, memory, shift, weight, domain)
        parts.append(corrected)
    return Corrected(torch.cat(parts), memory, prior_weight)


def _correct_chunk(
    p: Tensor, memory: PriorMemory, shift: Tensor | float, image_weight: Tensor | float, groups: Tensor | None
) -> Corrected:
    count = len(p)
    kept = 2 ** (-count / TIDE.stream_memory)
    marginal = memory.marginal * kept + p.sum(0)
    mean = marginal / marginal.sum()
    log_p = p.clamp_min(_MIN_P).log()
    logits = log_p - log_p.mean(1, keepdim=True)
    rows = p.new_zeros(count, len(memory.scores))
    rows[:, 0] = 1
    if groups is not None:
        rows[:, 1:] = F.one_hot(groups, TIDE.clusters)
    rows = rows * image_weight
    kept_rows = kept * torch.cat([rows.new_ones(1), rows.new_full((TIDE.clusters,), float(groups is not None))])
    squares = logits.square().mean(1)
    scores = memory.scores * kept_rows[:, None] + rows.T @ logits
    spread = memory.spread * kept_rows[:, None] + rows.T @ torch.stack([squares, torch.ones_like(squares)], 1)
    index = torch.arange(count, device=p.device, dtype=p.dtype)
    near = torch.exp2(-(index[:, None] - index).abs() / TIDE.recent_images)  # (n, n)
    before = torch.exp2(-(index + 1) / TIDE.recent_images)[:, None]  # weight of the window of earlier images

    past = near.tril(-1) @ p + before * memory.window[0]
    pairs = past.sum(1, keepdim=True)
    covariance = ((past - pairs * mean) * p).sum()
    equal = (pairs * (p - mean) * p).sum()
    agreement = memory.agreement * kept + torch.stack([covariance, equal, pairs.sum()])
    chance = 4 * (2 * mean.square().sum() / agreement[2].clamp_min(1e-6)).sqrt()  # two standard errors, shared images
    correlation = (agreement[0] / agreement[1].clamp_min(1e-6)).clamp_max(1)
    excess = (correlation - chance).clamp_min(0)
    weight = excess / (excess + TIDE.correlation_scale)

    unbiased = corrected = (logits - network_bias(scores, spread, shift, groups)).softmax(1)
    for _ in range(_ROUNDS):
        prior = near @ corrected + before * memory.window[1] + 2 / p.shape[1]
        corrected = unbiased * (prior / prior.sum(1, keepdim=True)).pow(weight)
        corrected = corrected / corrected.sum(1, keepdim=True)
    last = torch.exp2(-(count - 1 - index) / TIDE.recent_images)
    window = memory.window * 2 ** (-count / TIDE.recent_images) + torch.stack([last @ p, last @ corrected])
    return Corrected(corrected.clamp_min(_MIN_P), PriorMemory(marginal, scores, spread, window, agreement), weight)
