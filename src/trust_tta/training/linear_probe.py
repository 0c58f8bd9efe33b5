"""Linear probing: train a new classifier on precomputed features of a frozen backbone."""

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

from trust_tta.errors import ConfigError
from trust_tta.models.base import ScanNetwork
from trust_tta.progress import SILENT, Progress
from trust_tta.training.recipe import FinetuneRecipe
from trust_tta.training.tasks import accuracy, check_classes

Images: TypeAlias = NDArray[np.uint8] | Sequence[NDArray[np.uint8]]

_FEATURE_BATCH = 128  # images per forward pass of the backbone


@dataclass(frozen=True)
class HeadResult:
    """Mean loss of each epoch, and the accuracy on the training images at the end."""

    losses: tuple[float, ...]
    accuracy: float


def fit_head(
    model: ScanNetwork,
    images: Images,
    labels: NDArray[Any],
    recipe: FinetuneRecipe,
    *,
    preprocess: Callable[[Any], Tensor],
    progress: Progress = SILENT,
) -> HeadResult:
    """Train the classifier of `model` with AdamW and nothing else; the network is left in evaluation mode.

    Slices of `images` go through `preprocess`, which returns float32 (n, 3, h, w).
    """
    check_classes(labels, len(images), classes=model.config.num_classes)
    features = extract_features(model, images, preprocess=preprocess, progress=progress)
    device = features.device
    truth = torch.from_numpy(np.array(labels, dtype=np.int64)).to(device)
    heads = nn.ModuleList(model.heads()).requires_grad_(True)
    optimizer = torch.optim.AdamW(
        heads.parameters(), lr=recipe.lr, weight_decay=recipe.weight_decay, fused=device.type == "cuda"
    )
    generator = torch.Generator(device).manual_seed(recipe.seed)
    losses = []
    progress.start(recipe.epochs, "epochs")
    for epoch in range(recipe.epochs):
        shuffled = torch.randperm(len(truth), generator=generator, device=device)
        batches = []
        for chosen in shuffled.split(recipe.batch_size):
            loss = F.cross_entropy(model.forward_head(features[chosen]), truth[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            batches.append(loss.detach())
        losses.append(float(torch.stack(batches).mean()))
        if not math.isfinite(losses[-1]):
            raise ConfigError(f"the loss is {losses[-1]} in epoch {epoch} with lr {recipe.lr:g}; lower lr")
        progress.advance()
        if epoch + 1 == recipe.epochs or (epoch + 1) % max(1, recipe.epochs // 10) == 0:
            progress.note(f"epoch {epoch + 1:{len(str(recipe.epochs))}d}/{recipe.epochs}  loss {losses[-1]:.4f}")
    progress.finish()
    optimizer.zero_grad()
    with torch.no_grad():
        return HeadResult(tuple(losses), accuracy(model.forward_head(features).argmax(1), truth))


@torch.no_grad()
def extract_features(
    model: ScanNetwork,
    images: Images,
    *,
    preprocess: Callable[[Any], Tensor],
    batch_size: int = _FEATURE_BATCH,
    progress: Progress = SILENT,
) -> Tensor:
    """The pooled features float32 (n, dims[-1]) of the images; the network is put in evaluation mode."""
    device = next(model.parameters()).device
    model.eval()
    features = []
    progress.start(len(images), "features")
    for start in range(0, len(images), batch_size):
        batch = preprocess(images[start : start + batch_size]).to(device)
        features.append(model.forward_features(batch).float())
        progress.advance(len(batch))
    progress.finish()
    return torch.cat(features)


def score_head(
    model: ScanNetwork, images: Images, labels: NDArray[Any], *, preprocess: Callable[[Any], Tensor], progress: Progress
) -> float:
    features = extract_features(model, images, preprocess=preprocess, progress=progress)
    with torch.no_grad():
        predictions = model.forward_head(features).argmax(1).cpu()
    return accuracy(predictions, torch.from_numpy(np.array(labels, dtype=np.int64)))
