"""Selection of the parameters to adapt by their roles, and a second network over the same tensors."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Collection
from typing import Literal, TypeAlias

from torch import Tensor, nn

from trust_tta.errors import ConfigError
from trust_tta.methods.network_buffers import changeable_buffers
from trust_tta.models.classifier import classifiers
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
    """Whether a module is a normalization layer: PyTorch's, or one with an epsilon and one weight per channel."""
    if isinstance(module, _NORMS):
        return True
    own = dict(module.named_parameters(recurse=False))
    alone = bool(own) and own.keys() <= {"weight", "bias"} and all(p.dim() == 1 for p in own.values())
    return alone and any(isinstance(getattr(module, name, None), float) for name in _EPSILONS)


def parameter_roles(model: nn.Module) -> dict[str, Role]:
    """The role of each parameter: as the model itself reports them, or from the types of its layers."""
    own = getattr(model, "parameter_roles", None)
    if own is not None:
        return own()
    norms = [name for name, module in model.named_modules() if is_norm(module)]
    last = (*_last_stage(model), *norms[-1:])
    roles = {}
    for name, _ in model.named_parameters():
        module = name.rpartition(".")[0]
        at_the_end = any(f"{module}.".startswith(f"{end}.") for end in last)
        roles[name] = Role("norm" if module in norms else "other", at_the_end)
    return roles


def _last_stage(model: nn.Module) -> list[str]:
    """Names of the modules of the last stage: the last of several stages, or the last quarter of a series of blocks.

    As SAR leaves out `layer4` in ResNets and `blocks.9` to `blocks.11` in ViT-B.
    """
    for path, module in model.named_modules():  # from the root on
        series = _series(module)
        if series:
            stages = any(_series(part) for name in series for part in module.get_submodule(name).modules())
            count = 1 if stages else math.ceil(len(series) / 4)
            return [f"{path}.{name}" if path else name for name in series[-count:]]
    return []


def _series(module: nn.Module) -> list[str]:
    """Names of two or more children that run in sequence and hold norms: of a container, or numbered as `layer1`."""
    names = [n for n, child in module.named_children() if not is_norm(child) and any(map(is_norm, child.modules()))]
    if not isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict):
        names = [name for name in names if re.fullmatch(r"[a-z]+_?\d+", name)]
        names = [name for name in names if name.rstrip("0123456789") == names[-1].rstrip("0123456789")]
    return names if len(names) > 1 else []


def select(model: nn.Module, parameters: ParameterSet, *, skip_last: bool = False) -> list[str]:
    """Names of the parameters of a set; refused when the network has none of one of its kinds.

    "bn": affine weights of the normalization layers; "scan": SS2D without its inner norm; "ss2d": both; "all":
    everything but the classifier; "auto": "ss2d" where the network scans, else "bn", else "all". `skip_last` leaves out
    the last stage and the head.
    """
    every = parameter_roles(model)
    roles = {name: role for name, role in every.items() if not (skip_last and role.last)}
    if parameters == "auto":
        kinds = {role.kind for role in every.values()}
        parameters = "ss2d" if "scan" in kinds else "bn" if "norm" in kinds else "all"
    if parameters == "all":
        return [name for name in all_but_the_head(model) if name in roles]
    wanted = PARAMETER_SETS[parameters]
    found = sorted({role.kind for role in roles.values()})
    missing = [kind for kind in wanted if kind not in found]
    if missing:
        network, lacking = type(model).__name__, " or ".join(missing)
        if any(role.kind in missing for role in every.values()):
            raise ConfigError(
                f"all {lacking} parameters of {network} are in its last stage, which this method skips; "
                "pass skip_last=False"
            )
        raise ConfigError(
            f"{network} has no {lacking} parameters to adapt (it has: {', '.join(found) or 'none'}); "
            "adapt other parameters, as parameters='all', or use the method 'source'"
        )
    return [name for name, role in roles.items() if role.kind in wanted]


def all_but_the_head(model: nn.Module) -> list[str]:
    """Names of all parameters except those of the classifier."""
    fixed = {id(parameter) for head in classifiers(model) for parameter in head.parameters()}
    if not fixed:
        raise ConfigError(
            f"{type(model).__name__} has no linear classifier to hold fixed; adapt its normalizations: parameters='bn'"
        )
    return [name for name, parameter in model.named_parameters() if id(parameter) not in fixed]


class SharedModel:
    """The user's network, whose parameters the method shares. `given`: the network or its torch.compile wrapper."""

    def __init__(self, given: nn.Module) -> None:
        self.given = given
        self.network: nn.Module = getattr(given, "_orig_mod", given)  # methods run it without the compiled forward

    def __getstate__(self) -> dict[str, nn.Module]:
        return {"given": self.network, "network": self.network}

    def rebind(self, model: nn.Module) -> None:
        """Point the network's parameters at those of the method's `model` that were reallocated."""
        parameters = dict(model.named_parameters())
        for name, theirs in self.network.named_parameters():
            ours = parameters[name]
            moved = theirs.data_ptr() != ours.data_ptr()
            if moved and (theirs.dtype, theirs.device) == (ours.dtype, ours.device):
                theirs.data = ours.data


def share_tensors(model: nn.Module, adapted: Collection[str] = ()) -> nn.Module:
    """A second network over the same parameters, in evaluation mode, in which only the `adapted` require gradients.

    In-place updates show in both; modes, flags, hooks and changeable buffers of the user's network stay its own.
    """
    memo: dict[int, Tensor] = {}
    for name, parameter in model.named_parameters():
        if parameter.is_inference() and name in adapted:
            raise ConfigError("the network was made under torch.inference_mode and cannot learn; make it outside")
        memo[id(parameter)] = nn.Parameter(parameter.data, requires_grad=name in adapted)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer
    for buffer in changeable_buffers(model).values():
        memo[id(buffer)] = buffer.detach().clone()
    for module in model.modules():  # weights computed by hooks (legacy weight_norm, pruning), which have a graph
        memo |= {id(value): value.detach() for value in vars(module).values() if isinstance(value, Tensor)}
    return copy.deepcopy(model, memo).eval()
