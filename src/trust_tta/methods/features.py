"""Pooled features, their classifier, and methods that adapt in the space of features."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trust_tta.errors import ConfigError, ShapeError
from trust_tta.methods.base import Method
from trust_tta.methods.forward import take_logits
from trust_tta.methods.validation import check_outputs
from trust_tta.models.classifier import classifiers


class FeatureMethod(Method):
    """A method on the features of a network: subclasses implement `classify` and `update`."""

    def adapted_names(self, model: nn.Module) -> list[str]:
        require_features(model, self.name)
        return []

    def adapt(self, images: Tensor) -> Tensor:
        with torch.no_grad():
            self.counters.forwards += 1
            features, logits = features_and_logits(self.model, images)
            check_outputs(logits, images)  # prototypes would hide it
            before = self.prediction_before = self.classify(features)
            self.update(features)
            return before if self.options.predict == "before" else self.classify(features)

    def infer(self, images: Tensor) -> Tensor:
        return self.classify(features_and_logits(self.model, images)[0])

    def classify(self, features: Tensor) -> Tensor:
        """Logits (n, classes) of the adapted classifier for features (n, d)."""
        raise NotImplementedError

    def update(self, features: Tensor) -> None:
        """Update the state by the features (n, d) of a batch."""
        raise NotImplementedError


def splits_head(model: nn.Module) -> bool:
    """Whether a network has `forward_features` and `forward_head`."""
    return hasattr(model, "forward_features") and hasattr(model, "forward_head")


def pools_in_head(model: nn.Module) -> bool:
    """Whether a network is timm's, whose `forward_head` always pools, so that it cannot take pooled features."""
    return hasattr(model, "get_classifier") and not hasattr(model, "classifier_names")


def require_features(model: nn.Module, method: str) -> None:
    """Refuse a network whose features cannot be read, neither by `forward_features` nor at its classifier."""
    if pools_in_head(model) or not splits_head(model):
        linear_heads(model, by=method)


def features_and_logits(model: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
    """Pooled features (n, d) and logits (n, classes) of one forward.

    Networks either pool in `forward_features`; or, like those of timm, give maps or tokens there and pool in
    `forward_head(features, pre_logits=True)`; or have neither: their features are the input of the classifier.
    """
    network: Any = model
    if not splits_head(model):
        return _classifier_input(model, images)
    pooled = found = network.forward_features(images)
    if found.dim() != 2:
        with suppress(TypeError):  # of a forward_head without this argument
            pooled = network.forward_head(found, pre_logits=True)
    if pooled.dim() != 2:
        raise ShapeError(
            f"the features have shape {tuple(pooled.shape)}; let forward_features, or forward_head(features, "
            "pre_logits=True), give pooled features (n, d)"
        )
    return pooled, network.forward_head(found)


def _classifier_input(model: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
    """The input (n, d) of the classifier, read by a hook, and the logits (n, classes), which must be its output."""
    (head,) = linear_heads(model)
    seen: list[tuple[Tensor, Tensor]] = []
    handle = head.register_forward_hook(lambda module, inputs, output: seen.append((inputs[0], output)))
    try:
        logits = take_logits(model, model(images))
    finally:
        handle.remove()
    name = next(name for name, module in model.named_modules() if module is head)
    if not seen or not torch.equal(seen[-1][1].flatten(1), logits):
        raise ConfigError(
            f"the logits of {type(model).__name__} are not the output of its layer '{name}', so its features are "
            "unknown; add get_classifier (returns the layer that gives the logits), or forward_features (images to "
            "features) and forward_head (features to logits), to the network"
        )
    return seen[-1][0].flatten(1), logits


def classify(model: nn.Module, features: Tensor) -> Tensor:
    """Logits (n, classes) of pooled features (n, d)."""
    if pools_in_head(model) or not splits_head(model):
        (head,) = linear_heads(model)
        return F.linear(features.to(head.weight.dtype), head.weight.flatten(1), head.bias)
    network: Any = model
    return network.forward_head(features)


def class_rows(model: nn.Module) -> Tensor:
    """Weights (classes, d) of the classifier, the mean over its heads."""
    return torch.stack([head.weight.detach().flatten(1) for head in linear_heads(model)]).mean(0)


def linear_heads(model: nn.Module, *, by: str = "it") -> list[nn.Linear | nn.Conv2d]:
    """The linear layers whose mean gives the logits; a 1x1 convolution of a pooled map is one.

    Networks of timm with several, as the distilled DeiT, feed each with features of its own, and are refused.
    """
    found = classifiers(model)
    heads = [head for head in found if isinstance(head, nn.Linear | nn.Conv2d)]
    several = len(heads) > 1 and (pools_in_head(model) or not splits_head(model))
    if not heads or len(heads) < len(found) or several:
        kinds = ", ".join(type(head).__name__ for head in found) or "none"
        raise ConfigError(
            f"{by} needs one linear classifier, and {type(model).__name__} has {kinds}; use another method, as 'tent'"
        )
    return heads


def wide_dtype(values: Tensor) -> torch.dtype:
    """The dtype of `values`, at least float32."""
    return torch.promote_types(values.dtype, torch.float32)
