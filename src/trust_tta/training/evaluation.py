"""Clean accuracy, and running statistics taken anew for averaged weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trust_tta.errors import DataError
from trust_tta.training.augment import channel_constants, normalise


@torch.no_grad()
def accuracy(
    model: nn.Module,
    images: NDArray[np.uint8],
    labels: NDArray[Any],
    *,
    mean: Sequence[float],
    std: Sequence[float],
    device: str | torch.device = "cpu",
    batch_size: int = 1000,
) -> float:
    """The share of images uint8 (n, h, w, 3) that the network, left in evaluation mode, puts in their class."""
    check_images(images, labels)
    model.eval()
    truth = torch.from_numpy(np.array(labels, dtype=np.int64)).to(device)
    batches = _batches(images, mean, std, torch.device(device), batch_size)
    predictions = torch.cat([model(inputs).argmax(1) for inputs in batches])
    return float((predictions == truth).double().mean())


@torch.no_grad()
def recalibrate(
    model: nn.Module,
    images: NDArray[np.uint8],
    *,
    mean: Sequence[float],
    std: Sequence[float],
    device: str | torch.device = "cpu",
    batch_size: int = 1000,
) -> None:
    """Replace the running statistics of every BatchNorm by the mean over whole batches of `images` (n, h, w, 3).

    The batches are drawn: files come sorted by class, and a layer that normalises a batch of one class by that batch's
    own statistics hides from the next layer what sets the class apart.
    """
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    model.eval()
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # a plain mean over batches
        norm.train()
    whole = max(1, len(images) // batch_size) * batch_size  # a smaller last batch would weigh too much
    drawn = np.random.default_rng(0).permutation(len(images))[:whole]
    for inputs in _batches(images, mean, std, torch.device(device), batch_size, drawn):
        model(inputs)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
        norm.eval()


def check_images(images: NDArray[Any], labels: NDArray[Any], *, classes: int | None = None) -> None:
    """Refuse arrays that are not uint8 (n, h, w, 3) with n labels, each below `classes`."""
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[-1] != 3 or len(images) == 0:
        raise DataError(f"images are {images.dtype} {images.shape}; give uint8 (n, height, width, 3), n at least 1")
    if labels.dtype.kind not in "iu" or labels.shape != (len(images),):
        raise DataError(f"labels are {labels.dtype} {labels.shape}; give integers ({len(images)},), one for each image")
    if classes is not None and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        raise DataError(
            f"labels run from {labels.min()} to {labels.max()} but the network has {classes} classes; "
            f"create it with num_classes={int(labels.max()) + 1}"
        )


def _batches(
    images: NDArray[np.uint8],
    mean: Sequence[float],
    std: Sequence[float],
    device: torch.device,
    batch_size: int,
    order: NDArray[np.int64] | None = None,
) -> Iterator[Tensor]:
    scale, shift = channel_constants(mean, std, device)
    places = np.arange(len(images)) if order is None else order
    for start in range(0, len(places), batch_size):
        batch = torch.from_numpy(images[places[start : start + batch_size]]).to(device)
        yield normalise(batch, scale, shift)
