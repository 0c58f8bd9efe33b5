"""Class prior: corrects predictions for the network's bias and for labels that come in runs.

The mean prediction q of the stream, over many images, differs from even classes because the network is biased under
the present corruption; dividing by q removes the bias. The mean prediction over the neighbors of an image differs from
q beyond chance only where labels are correlated in time; then it is the prior of that image (Saerens et al., 2002).
Time tells the two apart: a bias stays, labels change.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trust_tta.methods.tide.constants import TIDE

_ROUNDS = 5  # of expectation maximization; more change nothing
_CAUTION = 2.0  # multiple of chance that is taken for chance
_MIN_P = 1e-12
_CHUNK = 512  # images whose neighborhoods are computed at once


class PriorMemory(NamedTuple):
    """`marginal` (classes,): decayed sum of predictions. `window` (2, classes): sums over the last images, of the
    predictions and of the corrected ones. `agreement` (3,): covariance of predictions with their neighbors, its value
    for equal neighbors, and the number of pairs."""

    marginal: Tensor
    window: Tensor
    agreement: Tensor

    @classmethod
    def empty(cls, p: Tensor) -> PriorMemory:
        """Without images, for predictions like p (n, classes)."""
        classes = p.shape[1]
        return cls(p.new_zeros(classes), p.new_zeros(2, classes), p.new_zeros(3))

    def fade(self, kept: Tensor | float) -> PriorMemory:
        """The fraction `kept` () of it: the images may be of another domain."""
        return PriorMemory(*(value * kept for value in self))


class Corrected(NamedTuple):
    """Corrected probabilities (n, classes), the memory with the batch, and the weight () of the local prior."""

    p: Tensor
    memory: PriorMemory
    weight: Tensor


def shrunk_marginal(marginal: Tensor) -> Tensor:
    """Mean prediction q (classes,) of the stream, shrunk to even classes as far as chance explains the difference.

    A positive-part James-Stein estimate: under even classes, chi-square is about the number of classes less one.
    """
    classes, images = len(marginal), marginal.sum().clamp_min(1e-6)
    difference = marginal / images - 1 / classes
    chi_square = images * classes * difference.square().sum()
    kept = (1 - _CAUTION * (classes - 1) / chi_square.clamp_min(1e-6)).clamp_min(0)
    return 1 / classes + kept * difference


def correct_prior(p: Tensor, memory: PriorMemory, *, samples: int = 1) -> Corrected:
    """Correct probabilities p (n, classes) of consecutive images; each stands for `samples` images of the stream."""
    parts = []
    weight = p.new_zeros(())
    for chunk in p.split(_CHUNK):
        corrected, memory, weight = _correct(chunk, memory, samples)
        parts.append(corrected)
    return Corrected(torch.cat(parts), memory, weight)


def _correct(p: Tensor, memory: PriorMemory, samples: int) -> Corrected:
    count = len(p)
    kept = 2 ** (-count * samples / TIDE.marginal_memory)
    marginal = memory.marginal * kept + samples * p.sum(0)
    mean = marginal / marginal.sum()
    index = torch.arange(count, device=p.device, dtype=p.dtype)
    near = torch.exp2(-(index[:, None] - index).abs() / TIDE.prior_window)  # (n, n)
    before = torch.exp2(-(index + 1) / TIDE.prior_window)[:, None]  # weight of the window of earlier images

    past = near.tril(-1) @ p + before * memory.window[0]
    pairs = past.sum(1, keepdim=True)
    covariance = ((past - pairs * mean) * p).sum()
    equal = (pairs * (p - mean) * p).sum()
    fade = 2 ** (-count / TIDE.domain_images)
    agreement = memory.agreement * fade + torch.stack([covariance, equal, pairs.sum()])
    chance = 4 * (2 * mean.square().sum() / agreement[2].clamp_min(1e-6)).sqrt()  # two standard errors, shared images
    correlation = (agreement[0] / agreement[1].clamp_min(1e-6)).clamp_max(1)
    excess = (correlation - chance).clamp_min(0)
    weight = excess / (excess + TIDE.correlation_scale)

    unbiased = p / shrunk_marginal(marginal).clamp_min(_MIN_P)
    unbiased = corrected = unbiased / unbiased.sum(1, keepdim=True)
    for _ in range(_ROUNDS):
        prior = near @ corrected + before * memory.window[1] + 2 / p.shape[1]
        corrected = unbiased * (prior / prior.sum(1, keepdim=True)).pow(weight)
        corrected = corrected / corrected.sum(1, keepdim=True)
    last = torch.exp2(-(count - 1 - index) / TIDE.prior_window)
    window = memory.window * 2 ** (-count / TIDE.prior_window) + torch.stack([last @ p, last @ corrected])
    return Corrected(corrected.clamp_min(_MIN_P), PriorMemory(marginal, window, agreement), weight)
