"""Training the classifier alone on a frozen backbone, whose features are computed once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from trust_tta.errors import ConfigError, DataError
from trust_tta.models.vmamba import VMamba

Preprocess: TypeAlias = Callable[[Any], Tensor]
"""A slice of the images to float32 (n, 3, h, w)."""

Progress: TypeAlias = Callable[[int, float], None]


@dataclass(frozen=True)
class FinetuneResult:
    """Mean loss of each epoch, and the accuracy on the training images at the end."""

    losses: tuple[float, ...]
    accuracy: float


def finetune_head(
    model: VMamba,
    images: NDArray[np.uint8] | Sequence[NDArray[np.uint8]],
    labels: NDArray[Any],
    *,
    preprocess: Preprocess,
    epochs: int = 300,
    lr: float = 5e-4,
    weight_decay: float = 0.0,
    batch_size: int = 128,
    feature_batch_size: int = 128,
    seed: int = 0,
    device: str | torch.device = "cpu",
    progress: Progress | None = None,
) -> FinetuneResult:
    """Train `model.classifier.head` with AdamW and nothing else; the network is left in evaluation mode.

    `images` is anything that slices into what `preprocess` takes; `progress` gets each epoch and its loss.
    """
    _check(images, labels, model.config.num_classes, epochs=epochs, lr=lr, batch_size=batch_size)
    target = torch.device(device)
    features = extract_features(model, images, preprocess=preprocess, batch_size=feature_batch_size, device=target)
    truth = torch.from_numpy(np.array(labels, dtype=np.int64)).to(target)
    head = model.classifier.head.requires_grad_(True)
    optimiser = torch.optim.AdamW(head.parameters(), lr=lr, weight_decay=weight_decay, fused=target.type == "cuda")
    generator = torch.Generator(target).manual_seed(seed)
    losses = []
    for epoch in range(epochs):
        losses.append(_run_epoch(head, optimiser, features, truth, batch_size, generator))
        if not math.isfinite(losses[-1]):
            raise ConfigError(f"the loss is {losses[-1]} in epoch {epoch} with lr {lr:g}; lower lr")
        if progress:
            progress(epoch, losses[-1])
    with torch.no_grad():
        right = (head(features).argmax(1) == truth).double().mean()
    return FinetuneResult(tuple(losses), float(right))


@torch.no_grad()
def extract_features(
    model: VMamba,
    images: NDArray[np.uint8] | Sequence[NDArray[np.uint8]],
    *,
    preprocess: Preprocess,
    batch_size: int = 128,
    device: str | torch.device = "cpu",
) -> Tensor:
    """The pooled features float32 (n, dims[-1]) of the images, on the device; the network in evaluation mode."""
    model.to(device).eval()
    starts = range(0, len(images), batch_size)
    return torch.cat(
        [model.forward_features(preprocess(images[i : i + batch_size]).to(device)) for i in starts]
    ).float()


def _run_epoch(
    head: nn.Linear,
    optimiser: torch.optim.Optimizer,
    features: Tensor,
    labels: Tensor,
    batch_size: int,
    generator: torch.Generator,
) -> float:
    """One pass over the shuffled features: the mean loss of its batches."""
    shuffled = torch.randperm(len(labels), generator=generator, device=labels.device)
    losses = []
    for chosen in shuffled.split(batch_size):
        loss = F.cross_entropy(head(features[chosen]), labels[chosen])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.detach())
    optimiser.zero_grad()
    return float(torch.stack(losses).mean())


def _check(images: Any, labels: NDArray[Any], classes: int, *, epochs: int, lr: float, batch_size: int) -> None:
    if len(images) == 0 or labels.dtype.kind not in "iu" or labels.shape != (len(images),):
        raise DataError(f"{len(images)} images with labels {labels.dtype} {labels.shape}; give one integer an image")
    if not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        raise DataError(
            f"labels run from {labels.min()} to {labels.max()} but the head has {classes} classes; "
            f"create the network with num_classes={int(labels.max()) + 1}"
        )
    problems = [
        f"{name} is {value} but must be {wanted}"
        for name, value, wanted, fits in (
            ("epochs", epochs, "at least 1", epochs >= 1),
            ("lr", lr, "positive", lr > 0),
            ("batch_size", batch_size, "at least 1", batch_size >= 1),
        )
        if not fits
    ]
    if problems:
        raise ConfigError("finetune: " + "; ".join(problems))
