"""Scores of a network, and BatchNorm statistics recomputed for averaged weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trust_tta.training.recipe import Channels
from trust_tta.training.tasks import accuracy, channel_constants, label_type, normalize


@torch.no_grad()
def evaluate(
    model: nn.Module,
    images: NDArray[np.uint8],
    labels: NDArray[Any],
    *,
    mean: Channels,
    std: Channels,
    metric: Callable[[Tensor, Tensor], float] = accuracy,
    batch_size: int | None = None,
) -> float:
    """The metric of the network's predictions for images uint8 (n, h, w, 3); leaves it in evaluation mode."""
    model.eval()
    device = _device(model)
    batches = _batches(images, mean, std, device, batch_size or evaluation_batch(images))
    truth = torch.from_numpy(np.array(labels, dtype=label_type(labels))).to(device)
    return metric(torch.cat([model(inputs).argmax(1).to(truth.dtype) for inputs in batches]), truth)


@torch.no_grad()
def recalibrate(
    model: nn.Module,
    images: NDArray[np.uint8],
    *,
    mean: Channels,
    std: Channels,
    forward: Callable[[nn.Module, Tensor], Any] | None = None,
    batch_size: int | None = None,
) -> None:
    """Replace the running statistics of every BatchNorm by their mean over whole batches of `images` (n, h, w, 3).

    `forward(model, inputs)` passes through all of them where a prediction does not.

    The batches are drawn: files come sorted by class, and a layer that normalizes a batch of one class by that batch's
    own statistics hides from the next layer what sets the class apart.
    """
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    size = min(batch_size or evaluation_batch(images), len(images))
    model.eval()
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # a plain mean over batches
        norm.train()
    whole = len(images) // size * size  # a smaller last batch would weigh too much
    drawn = np.random.default_rng(0).permutation(len(images))[:whole]
    for inputs in _batches(images, mean, std, _device(model), size, drawn):
        forward(model, inputs) if forward else model(inputs)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
        norm.eval()


def evaluation_batch(images: NDArray[np.uint8]) -> int:
    """Images at a time without gradients: as many pixels as 1000 images of 32 x 32."""
    height, width = (int(side) for side in images.shape[1:3])
    return max(16, 1000 * 32 * 32 // (height * width))


def _device(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def _batches(
    images: NDArray[np.uint8],
    mean: Channels,
    std: Channels,
    device: torch.device,
    batch_size: int,
    order: NDArray[np.int64] | None = None,
) -> Iterator[Tensor]:
    scale, shift = channel_constants(mean, std, device)
    indices = np.arange(len(images)) if order is None else order
    for start in range(0, len(indices), batch_size):
        batch = torch.from_numpy(images[indices[start : start + batch_size]]).to(device)
        yield normalize(batch, scale, shift)
