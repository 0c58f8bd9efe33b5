"""Networks by name: our variants, those of installed packages, and any "package.module:Name".

A network from outside is a class or a function that returns an `nn.Module`, or such a module itself.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast

from torch import Tensor, nn

from trust_tta.errors import ConfigError, reason_of
from trust_tta.models import (
    config,
    efficientvmamba,
    groupmamba,
    localvim,
    localvmamba,
    mambavision,
    msvmamba,
    spatialmamba,
    upernet,
    vim,
    vmamba,
    vssd,
)
from trust_tta.models.base import ScanNetwork
from trust_tta.models.classifier import classifiers
from trust_tta.models.config import NetworkConfig
from trust_tta.models.variants import VARIANTS, default_preprocessing
from trust_tta.plugins import resolve
from trust_tta.preprocessing import Preprocessing, network_input
from trust_tta.schema import show


class Network(Protocol):
    """Interface that every method needs: an `nn.Module` from images (n, c, h, w) to logits (n, classes).

    Some methods need more, and check it when they are created:
    `forward_features(images)` and `forward_head(features)`: pooled features (n, d), and the logits of them;
    `parameter_roles()`: a `trust_tta.models.parameter_roles.Role` for the name of each parameter;
    `forward(images, order=..., directions=...)`, `scan_directions(order, images)` and `scan_orders`, their names.
    """

    preprocessing: Preprocessing | None
    classes: tuple[str, ...] | None

    def __call__(self, images: Tensor) -> Tensor: ...


FAMILIES: dict[type[NetworkConfig], Callable[[Any], nn.Module]] = {
    config.VMambaConfig: vmamba.VMamba,
    config.UPerNetConfig: upernet.UPerNet.from_config,
    config.VimConfig: vim.Vim,
    config.LocalVimConfig: localvim.LocalVim,
    config.LocalVMambaConfig: localvmamba.LocalVMamba,
    config.GroupMambaConfig: groupmamba.GroupMamba,
    config.MambaVisionConfig: mambavision.MambaVision,
    config.MSVMambaConfig: msvmamba.MSVMamba,
    config.EfficientVMambaConfig: efficientvmamba.EfficientVMamba,
    config.SpatialMambaConfig: spatialmamba.SpatialMamba,
    config.VSSDConfig: vssd.VSSD,
}


def find_network(name: str) -> Any:
    """Configuration of our variant `name`, or the object of that name from outside; an unknown name is refused."""
    return resolve(name, VARIANTS, group="trust_tta.models")


def build_network(name: str, fields: Mapping[str, Any]) -> nn.Module:
    """Build the network `name` with its default preprocessing.

    `fields` are those of the configuration of our networks, and the arguments of the factory for others, whose
    `preprocessing` and `classes` are set, None where unknown, and which are made to take pixels.
    """
    if name in VARIANTS:
        chosen = VARIANTS[name].override(fields)
        ours = FAMILIES[type(chosen)](chosen)
        cast(ScanNetwork, ours).preprocessing = default_preprocessing(name)
        return ours
    network: Any = _call(name, find_network(name), fields)
    own = getattr(network, "preprocessing", None)
    try:
        network.preprocessing = own if isinstance(own, Preprocessing) else _timm_preprocessing(network)
        network.classes = getattr(network, "classes", None)
    except AttributeError as error:  # a property
        raise ConfigError(f"{type(network).__name__}: {error}; make it an attribute that can be set") from error
    network.register_forward_pre_hook(_prepare)
    return cast(nn.Module, network)


def require_ours(network: nn.Module, *, by: str) -> ScanNetwork:
    """The network, if it is one of our classifiers; `by` names the caller in the error."""
    if not isinstance(network, ScanNetwork):
        raise ConfigError(f"{by} needs one of our scan networks, and the network is a {type(network).__name__}")
    return network


def outputs_of(network: nn.Module) -> int | None:
    """Number of classes, as the network states, as its classifier has outputs, or as it names classes."""
    if isinstance(network, ScanNetwork):
        return network.config.num_classes
    stated = getattr(network, "num_classes", None)
    if isinstance(stated, int):
        return stated
    for layer in classifiers(network):
        outputs = getattr(layer, "out_features", getattr(layer, "out_channels", None))
        if isinstance(outputs, int):
            return outputs
    names = getattr(network, "classes", None)
    return len(names) if isinstance(names, tuple | list) else None


def _call(name: str, found: Any, fields: Mapping[str, Any]) -> nn.Module:
    if isinstance(found, nn.Module):
        if fields:
            raise ConfigError(f"'{name}' is a network, not a factory, and takes no {', '.join(fields)}; omit them")
        return copy.deepcopy(found)
    if not callable(found):
        raise ConfigError(f"'{name}' is {show(found)}; give a class or a function that returns an nn.Module")
    try:
        network = found(**fields)
    except Exception as error:  # another package may raise anything
        given = f" with {', '.join(fields)}" if fields else ""
        raise ConfigError(
            f"the network '{name}' cannot be made{given}: {type(error).__name__}: {reason_of(error)}"
        ) from error
    if not isinstance(network, nn.Module):
        raise ConfigError(f"'{name}' returns a {type(network).__name__}; it must return an nn.Module")
    return network


def _prepare(network: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Forward pre-hook of a network of another package: pixels go through its preprocessing."""
    return (network_input(network, arguments[0]), *arguments[1:]) if arguments else None


def _timm_preprocessing(network: nn.Module) -> Preprocessing | None:
    """Preprocessing of a timm network, from `pretrained_cfg` or `default_cfg`."""
    for name in ("pretrained_cfg", "default_cfg"):
        stated = getattr(network, name, None)
        values = stated if isinstance(stated, Mapping) else getattr(stated, "__dict__", {})
        sides = values.get("input_size")
        if isinstance(sides, tuple | list) and len(sides) == 3 and sides[0] == 3 and sides[1] == sides[2]:
            size, squash = int(sides[1]), values.get("crop_mode") == "squash"
            resize = None if squash else math.floor(size / float(values.get("crop_pct") or 1.0))
            fields: dict[str, Any] = {"size": size, "resize": resize, "crop": not squash}
            fields |= {key: tuple(map(float, values[key])) for key in ("mean", "std") if values.get(key)}
            if values.get("interpolation") in ("bicubic", "bilinear"):
                fields["interpolation"] = values["interpolation"]
            return Preprocessing.from_mapping(fields)
    return None
