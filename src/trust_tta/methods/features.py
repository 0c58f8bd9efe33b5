"""Pooled features and logits of any network that can tell its features from its head."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trust_tta.errors import ConfigError, ShapeError
from trust_tta.methods.parameters import classifiers


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


def pools_in_head(model: nn.Module) -> bool:
    """Whether a network is one of timm's, whose `forward_head` pools whatever it is given."""
    return hasattr(model, "get_classifier") and not hasattr(model, "classifier_names")


def classify(model: nn.Module, features: Tensor) -> Tensor:
    """Logits (n, classes) of pooled features (n, d)."""
    network: Any = model
    if pools_in_head(model):
        (head,) = linear_heads(model)
        return F.linear(features, head.weight.flatten(1), head.bias)
    logits: Tensor = network.forward_head(features)
    return logits


def class_rows(model: nn.Module) -> Tensor:
    """The weights (classes, d) that pooled features are multiplied with."""
    return torch.stack([head.weight.detach().flatten(1) for head in linear_heads(model)]).mean(0)


def linear_heads(model: nn.Module, *, by: str = "it") -> list[nn.Linear | nn.Conv2d]:
    """The linear layers whose mean gives the logits; a 1x1 convolution of a pooled map is one.

    Networks of timm with several, as the distilled DeiT, feed each with features of its own, and are refused.
    """
    found = classifiers(model)
    heads = [head for head in found if isinstance(head, nn.Linear | nn.Conv2d)]
    if not heads or len(heads) < len(found) or (len(heads) > 1 and pools_in_head(model)):
        kinds = ", ".join(type(head).__name__ for head in found) or "none"
        raise ConfigError(
            f"{by} needs one linear classifier, and {type(model).__name__} has {kinds}; use another method, as 'tent'"
        )
    return heads


def _pool(network: Any, found: Tensor) -> Tensor:
    try:
        pooled: Tensor = network.forward_head(found, pre_logits=True)
    except TypeError:  # it has no such argument
        return found
    return pooled
