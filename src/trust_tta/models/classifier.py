"""The layers of a network that give its logits."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from torch import nn

_HEAD_NAMES = ("fc", "head", "heads", "classifier", "linear", "last_linear", "logits", "output")
_ATTENTION_OUT = nn.modules.linear.NonDynamicallyQuantizableLinear


def classifiers(model: nn.Module) -> list[nn.Module]:
    """The layers that give the logits: as our networks report, as timm's do, else the last linear layer.

    Linear layers below an attribute named as a head come first: others may be registered after it. A network without
    linear layers may end in a 1x1 convolution.
    """
    own: Callable[[], Collection[str]] | None = getattr(model, "classifier_names", None)
    if own is not None:
        return [model.get_submodule(path) for path in dict.fromkeys(name.rpartition(".")[0] for name in own())]
    classifier: Callable[[], Any] | None = getattr(model, "get_classifier", None)
    found = classifier() if callable(classifier) else ()
    layers = found if isinstance(found, tuple | list) else (found,)
    heads = [layer for layer in layers if isinstance(layer, nn.Module) and any(True for _ in layer.parameters())]
    if heads:
        return heads
    linear: dict[str, nn.Module] = {
        n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and not isinstance(m, _ATTENTION_OUT)
    }
    named = [module for name, module in linear.items() if name.partition(".")[0] in _HEAD_NAMES]
    if linear:
        return (named or list(linear.values()))[-1:]
    # A 1x1 convolution that is the last layer with parameters, if the network has none outside its layers.
    owners = [module for module in model.modules() if any(True for _ in module.parameters(recurse=False))]
    last = owners[-1] if owners and owners[0] is not model else None
    return [last] if isinstance(last, nn.Conv2d) and last.kernel_size == (1, 1) else []
