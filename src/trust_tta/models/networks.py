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
from trust_tta.models.base import ScanNetwork
from trust_tta.models.config import (
    EfficientVMambaConfig,
    GroupMambaConfig,
    LocalVimConfig,
    LocalVMambaConfig,
    MambaVisionConfig,
    MSVMambaConfig,
    NetworkConfig,
    SpatialMambaConfig,
    UPerNetConfig,
    VimConfig,
    VMambaConfig,
    VSSDConfig,
)
from trust_tta.models.efficientvmamba import EfficientVMamba
from trust_tta.models.groupmamba import GroupMamba
from trust_tta.models.localvim import LocalVim
from trust_tta.models.localvmamba import LocalVMamba
from trust_tta.models.mambavision import MambaVision
from trust_tta.models.msvmamba import MSVMamba
from trust_tta.models.spatialmamba import SpatialMamba
from trust_tta.models.upernet import UPerNet
from trust_tta.models.variants import VARIANTS, default_preprocessing
from trust_tta.models.vim import Vim
from trust_tta.models.vmamba import VMamba
from trust_tta.models.vssd import VSSD
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


_FAMILIES: dict[type[NetworkConfig], Callable[[Any], nn.Module]] = {
    VMambaConfig: VMamba,
    UPerNetConfig: UPerNet.from_config,
    VimConfig: Vim,
    LocalVimConfig: LocalVim,
    LocalVMambaConfig: LocalVMamba,
    GroupMambaConfig: GroupMamba,
    MambaVisionConfig: MambaVision,
    MSVMambaConfig: MSVMamba,
    EfficientVMambaConfig: EfficientVMamba,
    SpatialMambaConfig: SpatialMamba,
    VSSDConfig: VSSD,
}


def find_network(name: str) -> Any:
    """Configuration of our variant `name`, or the outside object of that name; an unknown name is refused."""
    return resolve(name, VARIANTS, group="trust_tta.models")


def is_ours(name: str) -> bool:
    """Whether `name` is a variant of this package."""
    return name in VARIANTS


def build_network(name: str, fields: Mapping[str, Any]) -> nn.Module:
    """Build the network `name` with its default preprocessing.

    `fields` are those of the configuration of our networks, and the arguments of the factory for others.
    """
    found = find_network(name)
    if isinstance(found, NetworkConfig):
        ours: nn.Module = _FAMILIES[type(found)](found.override(fields))
        cast(ScanNetwork, ours).preprocessing = default_preprocessing(name)
        return ours
    network = _call(name, found, fields)
    if not isinstance(getattr(network, "preprocessing", None), Preprocessing):
        _set(network, "preprocessing", _timm_preprocessing(network))
    _set(network, "classes", getattr(network, "classes", None))
    network.register_forward_pre_hook(_prepare)
    return network


def require_vmamba(network: nn.Module, *, by: str) -> VMamba:
    """The network, if it is a VMamba; `by` names the caller in the error."""
    if not isinstance(network, VMamba):
        raise ConfigError(f"{by} needs a VMamba, and the network is a {type(network).__name__}")
    return network


def require_ours(network: nn.Module, *, by: str) -> ScanNetwork:
    """The network, if it is one of our classifiers; `by` names the caller in the error."""
    if not isinstance(network, ScanNetwork):
        raise ConfigError(f"{by} needs one of our scan networks, and the network is a {type(network).__name__}")
    return network


def outputs_of(network: nn.Module) -> int | None:
    """Number of classes, as the network states or as its last linear layer has outputs."""
    if isinstance(network, ScanNetwork):
        return network.config.num_classes
    stated = getattr(network, "num_classes", None)
    if isinstance(stated, int):
        return stated
    linear = [module for module in network.modules() if isinstance(module, nn.Linear)]
    return linear[-1].out_features if linear else None


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
        raise ConfigError(f"'{name}' gives a {type(network).__name__}; it must give an nn.Module")
    return network


def _set(network: nn.Module, name: str, value: object) -> None:
    try:
        setattr(network, name, value)
    except AttributeError as error:
        raise ConfigError(f"{type(network).__name__}.{name} cannot be set ({error}); make it an attribute") from error


def _prepare(network: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Forward pre-hook of an outside network: pixels go through its preprocessing."""
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
