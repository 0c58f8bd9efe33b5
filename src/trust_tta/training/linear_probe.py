"""Linear probing: train a new classifier on precomputed features of a frozen backbone."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True)
class HeadResult:
    """Mean loss of each epoch, and the final accuracy on the training images."""

    losses: tuple[float, ...]
    accuracy: float


@torch.no_grad()
def extract_features(model: ScanNetwork, batches: Iterable[Tensor], *, progress: Progress = SILENT) -> Tensor:
    """Pooled features float32 (n, d) of batches of network input; puts the network in evaluation mode."""
    device = next(model.parameters()).device
    model.eval()
    features = []
    for batch in batches:
        features.append(model.forward_features(batch.to(device)).float())
        progress.advance(len(batch))
    return torch.cat(features)


def fit_head(
    model: ScanNetwork, features: Tensor, labels: NDArray[Any], recipe: FinetuneRecipe, *, progress: Progress = SILENT
) -> HeadResult:
    """Train the classifier of `model`, and nothing else, with AdamW on features (n, d) and labels (n,)."""
    check_classes(labels, len(features), classes=model.config.num_classes)
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
    return HeadResult(tuple(losses), score_head(model, features, labels))


@torch.no_grad()
def score_head(model: ScanNetwork, features: Tensor, labels: NDArray[Any]) -> float:
    """Accuracy of the classifier on features (n, d)."""
    return accuracy(model.forward_head(features).argmax(1).cpu(), torch.from_numpy(np.array(labels, dtype=np.int64)))
