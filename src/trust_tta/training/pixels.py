"""What a segmentation network learns from: cross-entropy over labeled pixels, of both heads.

As MMSegmentation has it: logits are resized to the labels, pixels labeled 255 add nothing, and the sum is divided by
the number of all pixels, or of the labeled ones alone.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from trust_tta.bands import by_bands
from trust_tta.models.upernet import resize
from trust_tta.overlap import IGNORED

AUXILIARY_WEIGHT = 0.4
_EPSILON = 2.0**-23  # keeps the loss of a batch without labels at zero


def pixel_loss(logits: Tensor, labels: Tensor, *, labeled_only: bool = False) -> Tensor:
    """Mean cross-entropy, a scalar, of coarse logits (n, classes, h', w') to labels (n, h, w).

    The mean is over all pixels, ignored ones included, unless it is to be over the labeled ones only.
    """
    full = resize(logits, labels.shape[1:])
    total = by_bands(_cross_entropy, full, labels.long()).sum()
    count = int((labels != IGNORED).sum()) if labeled_only else labels.numel()
    return total / (count + _EPSILON)


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none")


def two_head_loss(main: Tensor, auxiliary: Tensor, labels: Tensor, *, labeled_only: bool = False) -> Tensor:
    """The loss of the decoding head, and 0.4 times that of the auxiliary one."""
    losses = (pixel_loss(logits, labels, labeled_only=labeled_only) for logits in (main, auxiliary))
    return next(losses) + AUXILIARY_WEIGHT * next(losses)
