"""Label shift: how far uneven predictions are due to the network, and not to the labels.

Under a covariate shift a network prefers some classes; where a stream has few classes, right predictions are as uneven.
Two signs tell them apart.

**Errors bound a preference.** Where the predictions of images and of their mirror images agree beyond chance, by
Cohen's kappa, few are wrong: the error rate is about e = 2 (1 - kappa). Let T be the total variation distance of the
predicted classes from even ones, less that of as many draws of even classes. Errors explain the share e / T of it.

**One class has one direction.** Let b be the mean of the centered log-probabilities z_i. For images of one class, b
points along the logits that a classifier's row, taken as features, would have, and the z_i - b point elsewhere. The
squared cosine of b with the nearest such logits, over the mean of those of the z_i - b, is then above 2, and below 1.6
under covariate shifts.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trust_tta.errors import ConfigError
from trust_tta.methods.features import class_rows
from trust_tta.methods.tide.constants import TIDE

_STEEPNESS = 16  # of the transition from a shift to one class: 0.1 to 0.9 between ratios of 1.6 and 2.1
_MIN_IMAGES = 8  # fewer have no mean direction


class LabelMemory(NamedTuple):
    """Decayed sums over the images of the stream.

    `votes` (2, classes): predicted classes of images and of mirror images. `log_p` (classes,): centered
    log-probabilities. `evidence` (3,): number of images, of those whose mirror image has the same class, and squared
    cosines of their z - b.
    """

    votes: Tensor
    log_p: Tensor
    evidence: Tensor

    @classmethod
    def empty(cls, p: Tensor) -> LabelMemory:
        """Without images, for predictions like p (n, classes)."""
        return cls(p.new_zeros(2, p.shape[1]), p.new_zeros(p.shape[1]), p.new_zeros(3))


def class_logits(model: nn.Module, classes: int) -> tuple[Tensor, Tensor]:
    """The classifier's rows (classes, d) less their mean, and the same over the lengths of their own logits.

    With these, `nearest_class` compares logits with those of features along each row. One-hot rows where the network
    has no linear classifier.
    """
    try:
        rows = class_rows(model)
    except ConfigError:
        rows = torch.eye(classes, device=next(model.parameters()).device)
    rows = (rows - rows.mean(0)).to(torch.promote_types(rows.dtype, torch.float32))
    lengths = ((rows @ (rows.T @ rows)) * rows).sum(1).clamp_min(1e-12).sqrt()
    return rows, rows / lengths[:, None]


def nearest_class(log_p: Tensor, rows: Tensor, scaled_rows: Tensor) -> Tensor:
    """Squared cosine (n,) of centered log-probabilities (n, classes) with the logits of the nearest class."""
    return (F.normalize(log_p, dim=1) @ rows @ scaled_rows.T).amax(1).clamp_min(0).square()


def add_views(memory: LabelMemory, views: Tensor, rows: tuple[Tensor, Tensor]) -> LabelMemory:
    """The memory with the log-probabilities (views, n, classes) of a batch; `rows` of `class_logits`."""
    log_p = views.exp().mean(0).clamp_min(1e-12).log()
    log_p = log_p - log_p.mean(1, keepdim=True)
    count, classes = log_p.shape
    votes = F.one_hot(views.argmax(2), classes).to(log_p)[[0, -1]]
    kept = 2 ** (-count / TIDE.stream_memory)
    total = memory.log_p * kept + log_p.sum(0)
    images = memory.evidence[0] * kept + count
    cosines = nearest_class(log_p - total / images, *rows).sum()
    new = torch.stack([torch.full_like(cosines, count), (votes[0] * votes[1]).sum(), cosines])
    return LabelMemory(memory.votes * kept + votes.sum(1), total, memory.evidence * kept + new)


def network_share(memory: LabelMemory, rows: tuple[Tensor, Tensor], *, mirror: bool) -> Tensor:
    """Share () of the unevenness of the predictions that is due to the network, by the two signs.

    `mirror`: there are two views; otherwise, errors are unknown.
    """
    images, agreed, cosines = memory.evidence.unbind()
    enough = images >= _MIN_IMAGES
    images = images.clamp_min(1)
    cosine = nearest_class((memory.log_p / images)[None], *rows)[0]
    ratio = cosine / (cosines / images).clamp_min(1e-6)
    share = 1 / (1 + (ratio / TIDE.one_class).clamp_max(10).pow(_STEEPNESS))
    if mirror:
        votes = memory.votes / images
        classes = votes.shape[1]
        chance = (votes[0] * votes[1]).sum()
        errors = TIDE.view_errors * (1 - agreed / images) / (1 - chance).clamp_min(1e-6)  # 1 - kappa
        even = (classes / (2 * math.pi * images)).sqrt().clamp_max(1 - 1 / classes)  # of draws of even classes
        uneven = (votes.mean(0) - 1 / classes).clamp_min(0).sum() - even
        share = share * ((errors + 1e-6) / uneven.clamp_min(1e-6)).clamp_max(1).square()
    return torch.where(enough, share, torch.ones_like(share))
