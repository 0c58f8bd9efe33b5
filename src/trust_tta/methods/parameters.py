"""Which parameters a method adapts, chosen by role; and a network that shares everything else."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from trust_tta.errors import ConfigError
from trust_tta.models.parameter_roles import Kind, Role

ParameterSet: TypeAlias = Literal["auto", "ss2d", "scan", "bn", "all"]
PARAMETER_SETS: dict[ParameterSet, tuple[Kind, ...]] = {
    "ss2d": ("scan", "projection", "norm"),
    "scan": ("scan", "projection"),
    "bn": ("norm",),
}
_NORMS = (
    nn.modules.batchnorm._BatchNorm, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.instancenorm._InstanceNorm,
)  # fmt: skip
_EPSILONS = ("eps", "variance_epsilon")


def is_norm(module: nn.Module) -> bool:
    """Whether a module normalizes: one of PyTorch's, or one with an epsilon and a weight for each channel alone."""
    if isinstance(module, _NORMS):
        return True
    own = dict(module.named_parameters(recurse=False))
    alone = bool(own) and own.keys() <= {"weight", "bias"} and all(p.dim() == 1 for p in own.values())
    return alone and any(isinstance(getattr(module, name, None), float) for name in _EPSILONS)


def parameter_roles(model: nn.Module) -> dict[str, Role]:
    """The model's own account of its parameters, or, for any other network, what its layers are."""
    own = getattr(model, "parameter_roles", None)
    if own is not None:
        roles: dict[str, Role] = own()
        return roles
    norms = [name for name, module in model.named_modules() if is_norm(module)]
    last = (*_last_stage(model), *norms[-1:])
    roles = {}
    for name, _ in model.named_parameters():
        module = name.rpartition(".")[0]
        at_the_end = any(f"{module}.".startswith(f"{end}.") for end in last)
        roles[name] = Role("norm" if module in norms else "other", at_the_end)
    return roles


def _last_stage(model: nn.Module) -> list[str]:
    """Names of the modules that make the last stage, as networks of the field are built.

    A ResNet's last `layer<i>`, the last of `stages` or `layers`, the last quarter of a transformer's `blocks`: what SAR
    leaves out by name in ResNets and ViT-B (`layer4`, `blocks.9` to `blocks.11`).
    """
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        names = [name for name, _ in module.named_children()]
        numbered = [name for name in names if re.fullmatch(r"layer\d+", name)]
        if numbered:
            return [prefix + numbered[-1]]
        for name in ("stages", "layers", "blocks"):
            inner = [child for child, _ in module.get_submodule(name).named_children()] if name in names else []
            if inner:
                count = math.ceil(len(inner) / 4) if name == "blocks" else 1
                return [f"{prefix}{name}.{child}" for child in inner[-count:]]
    return []


def select(model: nn.Module, parameters: ParameterSet, *, skip_last: bool = False) -> list[str]:
    """Names of the parameters of a set; refused when the network has none of one of its kinds.

    "bn": affine weights of the normalizations; "scan": SS2D without its inner norm; "ss2d": both; "all": everything but
    the classifier; "auto": "ss2d" where the network scans, else "bn", else "all". `skip_last` leaves out the last stage
    and the head.
    """
    if parameters == "auto":
        kinds = {role.kind for role in parameter_roles(model).values()}
        parameters = "ss2d" if "scan" in kinds else "bn" if "norm" in kinds else "all"
    if parameters == "all":
        kept = {n for n, role in parameter_roles(model).items() if not (skip_last and role.last)}
        return [n for n in all_but_the_head(model) if n in kept]
    wanted = PARAMETER_SETS[parameters]
    roles = {n: role for n, role in parameter_roles(model).items() if not (skip_last and role.last)}
    found = sorted({role.kind for role in roles.values()})
    missing = [kind for kind in wanted if kind not in found]
    if missing:
        raise ConfigError(
            f"{type(model).__name__} has no {' or '.join(missing)} parameters to adapt (it has: {', '.join(found)}"
            f"{', the last stage left out' if skip_last else ''}); adapt other parameters, or use the method 'source'"
        )
    return [n for n, role in roles.items() if role.kind in wanted]


def all_but_the_head(model: nn.Module) -> list[str]:
    """Names of all parameters except those that classify."""
    fixed = {id(parameter) for head in classifiers(model) for parameter in head.parameters()}
    if not fixed:
        raise ConfigError(
            f"{type(model).__name__} has no linear classifier to hold fixed; adapt its normalizations: parameters='bn'"
        )
    return [name for name, parameter in model.named_parameters() if id(parameter) not in fixed]


def classifiers(model: nn.Module) -> list[nn.Module]:
    """The layers that give logits: as our networks say, as timm's say, or else the last linear layer."""
    own: Callable[[], Collection[str]] | None = getattr(model, "classifier_names", None)
    if own is not None:
        return [model.get_submodule(path) for path in dict.fromkeys(name.rpartition(".")[0] for name in own())]
    classifier: Callable[[], Any] | None = getattr(model, "get_classifier", None)
    found = classifier() if callable(classifier) else ()
    layers = found if isinstance(found, tuple | list) else (found,)
    heads: list[nn.Module] = [
        layer for layer in layers if isinstance(layer, nn.Module) and any(True for _ in layer.parameters())
    ]
    return heads or list([module for module in model.modules() if isinstance(module, nn.Linear)][-1:])


class SharedModel:
    """The user's network, whose parameters the method shares; `given` is perhaps what torch.compile made of it."""

    def __init__(self, given: nn.Module) -> None:
        self.given = given
        self.network: nn.Module = getattr(given, "_orig_mod", given)  # methods run it without the compiled forward

    def __getstate__(self) -> dict[str, nn.Module]:
        return {"given": self.network, "network": self.network}

    @torch.no_grad()
    def with_weights(self, adapted: Mapping[str, Tensor]) -> nn.Module:
        """The given network with the values of `adapted`."""
        for name, parameter in adapted.items():  # the storage is the same unless the method was moved
            self.network.get_parameter(name).copy_(parameter)
        return self.given

    def rebind(self, model: nn.Module) -> None:
        """Point the network's parameters at those of the method's `model` that were reallocated."""
        parameters = dict(model.named_parameters())
        for name, theirs in self.network.named_parameters():
            ours = parameters[name]
            moved = theirs.data_ptr() != ours.data_ptr()
            if moved and (theirs.dtype, theirs.device) == (ours.dtype, ours.device):
                theirs.data = ours.data


def share_tensors(model: nn.Module, adapted: Collection[str] = ()) -> nn.Module:
    """A second network over the same tensors, in evaluation mode, in which only the `adapted` require gradients.

    In-place updates show in both; modes, flags and hooks of the user's network stay its own.
    """
    memo: dict[int, Tensor] = {}
    for name, parameter in model.named_parameters():
        if parameter.is_inference() and name in adapted:
            raise ConfigError("the network was made under torch.inference_mode and cannot learn; make it outside")
        memo[id(parameter)] = nn.Parameter(parameter.data, requires_grad=name in adapted)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer
    return copy.deepcopy(model, memo).eval()
