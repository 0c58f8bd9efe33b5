"""Pooled features and logits of any network that can tell its features from its head."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from trust_tta.errors import ConfigError, ShapeError


def require_features(model: nn.Module, method: str) -> None:
    """Refuse a network that has no features to show."""
    if not (hasattr(model, "forward_features") and hasattr(model, "forward_head")):
        raise ConfigError(
            f"{method} reads features and {type(model).__name__} has no forward_features and forward_head; "
            "add both (images to features to logits), or use another method such as 'tent'"
        )


def features_and_logits(model: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
    """Pooled features (n, d) and logits (n, classes), in one pass.

    Networks either pool in `forward_features`, or, like those of timm, give maps or tokens there and pool in
    `forward_head(features, pre_logits=True)`.
    """
    network: Any = model
    found: Tensor = network.forward_features(images)
    pooled = found if found.dim() == 2 else _pool(network, found)
    if pooled.dim() != 2:
        raise ShapeError(
            f"the features have shape {tuple(pooled.shape)}; let forward_features, or forward_head(features, "
            "pre_logits=True), give pooled features (n, d)"
        )
    logits: Tensor = network.forward_head(found)
    return pooled, logits


def _pool(network: Any, found: Tensor) -> Tensor:
    try:
        pooled: Tensor = network.forward_head(found, pre_logits=True)
    except TypeError:  # it has no such argument
        return found
    return pooled
