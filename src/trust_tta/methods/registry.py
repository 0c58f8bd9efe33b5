"""The methods by name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from trust_tta.errors import ConfigError
from trust_tta.methods.ablations import Ensemble, Repetition
from trust_tta.methods.augment import Augmentation
from trust_tta.methods.base import Method
from trust_tta.methods.eta import Eta
from trust_tta.methods.foa import Foa
from trust_tta.methods.lame import Lame
from trust_tta.methods.sar import Sar
from trust_tta.methods.shot import Shot
from trust_tta.methods.source import BatchStatistics, Source
from trust_tta.methods.tent import Tent
from trust_tta.methods.trust import Trust, TrustNaive

METHODS: dict[str, type[Method]] = {
    method.name: method
    for method in (
        Source,
        BatchStatistics,
        Tent,
        Eta,
        Sar,
        Shot,
        Lame,
        Foa,
        TrustNaive,
        Trust,
        Ensemble,
        Repetition,
        Augmentation,
    )
}


_KINDS: dict[type, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"),
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
}


def list_methods() -> list[str]:
    """The names that `create_method` takes."""
    return list(METHODS)


def method_options(name: str) -> dict[str, Any]:
    """The options of a method with their default values."""
    if name not in METHODS:
        raise ConfigError(f"unknown method {name!r}; the methods are {', '.join(METHODS)}")
    parameters = inspect.signature(METHODS[name]).parameters
    return {p.name: p.default for p in parameters.values() if p.kind is inspect.Parameter.KEYWORD_ONLY}


def check_options(name: str, options: Mapping[str, Any]) -> None:
    """Refuse options that the method does not have, and values of another kind than the default's."""
    valid = method_options(name)
    unknown = sorted(options.keys() - valid.keys())
    if unknown:
        raise ConfigError(
            f"method '{name}' has no option {', '.join(map(repr, unknown))}; "
            f"its options are {', '.join(valid) or 'none'}"
        )
    for option, value in options.items():
        kind = type(valid[option])
        allowed, wanted = _KINDS.get(kind, ((object,), ""))
        if not isinstance(value, allowed) or (isinstance(value, bool) and kind in (int, float)):
            raise ConfigError(f"{option} of method '{name}' is {value!r}; give {wanted}")


def create_method(name: str, model: nn.Module, **options: Any) -> Method:
    """Wrap `model` in a method; a wrong option is refused with the valid ones.

    The method changes the weights of `model` itself: to run two methods side by side, give each a copy of it.
    """
    check_options(name, options)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"the model is a {type(model).__name__}; give a torch.nn.Module")
    with torch.inference_mode(False):  # what is made here must be able to learn
        return METHODS[name](model, **options)
