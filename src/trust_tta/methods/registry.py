"""The methods by name."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trust_tta.errors import ConfigError
from trust_tta.plugins import installed, resolve
from trust_tta.schema import parse

if TYPE_CHECKING:  # a name is known, and a wrong one refused, without waiting for PyTorch
    from torch import nn

    from trust_tta.methods.base import Method

# Where each method lives, in the order in which they are listed.
METHODS = {
    "source": "trust_tta.methods.source:Source",
    "bn": "trust_tta.methods.source:BatchStatistics",
    "tent": "trust_tta.methods.tent:Tent",
    "eta": "trust_tta.methods.eta:Eta",
    "sar": "trust_tta.methods.sar:Sar",
    "shot": "trust_tta.methods.shot:Shot",
    "lame": "trust_tta.methods.lame:Lame",
    "foa": "trust_tta.methods.foa:Foa",
    "trust_naive": "trust_tta.methods.trust:TrustNaive",
    "trust": "trust_tta.methods.trust:Trust",
    "ensemble": "trust_tta.methods.ablations:Ensemble",
    "repetition": "trust_tta.methods.ablations:Repetition",
    "augmentation": "trust_tta.methods.ablations:Augmentation",
    "tide": "trust_tta.methods.tide.method:Tide",
    "eata": "trust_tta.methods.eta:Eata",
    "roid": "trust_tta.methods.roid:Roid",
    "cmf": "trust_tta.methods.roid:Cmf",
    "cotta": "trust_tta.methods.cotta:Cotta",
    "rotta": "trust_tta.methods.rotta:Rotta",
    "deyo": "trust_tta.methods.deyo:Deyo",
    "rdumb": "trust_tta.methods.eta:Rdumb",
    "neo": "trust_tta.methods.neo:Neo",
    "t3a": "trust_tta.methods.t3a:T3a",
    "dpcore": "trust_tta.methods.dpcore:Dpcore",
    "bn_alpha": "trust_tta.methods.norms:BnAlpha",
    "bn_ema": "trust_tta.methods.norms:BnEma",
}


def list_methods() -> list[str]:
    """The names that `create_method` takes: ours, then those of installed packages."""
    return [*METHODS, *(name for name in installed("trust_tta.methods") if name not in METHODS)]


def find_method(name: str | type[Method]) -> type[Method]:
    """The class of a method: of ours, of an installed package, or "package.module:Name"."""
    found: Any = name
    if not isinstance(name, type):
        found = resolve(name, METHODS, group="trust_tta.methods")
        if isinstance(found, str):
            module, _, attribute = found.partition(":")
            found = getattr(importlib.import_module(module), attribute)
    from trust_tta.methods.base import Method

    if not (isinstance(found, type) and issubclass(found, Method)):
        raise ConfigError(f"the method {name!r} is not a subclass of trust_tta.Method; derive it from that class")
    return found


def method_options(name: str | type[Method]) -> dict[str, Any]:
    """The options of a method with their default values."""
    return find_method(name).Options.defaults()


def check_options(name: str | type[Method], options: Mapping[str, Any]) -> None:
    """Refuse options that the method does not have, and values that they do not take, all in one line."""
    method = find_method(name)
    parse(method.Options, options, where=f"method '{method.name}'")


def create_method(name: str | type[Method], model: nn.Module, **options: Any) -> Method:
    """Wrap `model` in a method: of ours, of an installed package, or "package.module:Name".

    The method changes the weights of `model` itself: to run two methods side by side, give each a copy of it.

        method = create_method("tent", model, lr=1e-3)
        logits = method(images)
    """
    method = find_method(name)
    return method(model, parse(method.Options, options, where=f"method '{method.name}'"))
