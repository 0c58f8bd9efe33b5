"""Build a network by name, and load its checkpoint."""

from __future__ import annotations

from os import PathLike
from typing import Any, cast, overload

from torch import nn

from trust_tta.models.base import ScanNetwork
from trust_tta.models.checkpoint import Checkpoint
from trust_tta.models.networks import build_network
from trust_tta.models.upernet import UPerNet
from trust_tta.models.variants import VARIANTS, OtherName, SegmenterName, VMambaName
from trust_tta.models.vmamba import VMamba
from trust_tta.plugins import installed
from trust_tta.preprocessing import Preprocessing, find_preset


def list_models() -> list[str]:
    """The names that `create_model` takes: our variants, and what installed packages add."""
    return sorted({*VARIANTS, *installed("trust_tta.models")})


@overload
def create_model(
    name: VMambaName,
    *,
    num_classes: int | None = None,
    checkpoint: str | PathLike[str] | None = None,
    preprocessing: Preprocessing | str | None = None,
    **overrides: Any,
) -> VMamba: ...


@overload
def create_model(
    name: OtherName,
    *,
    num_classes: int | None = None,
    checkpoint: str | PathLike[str] | None = None,
    preprocessing: Preprocessing | str | None = None,
    **overrides: Any,
) -> ScanNetwork: ...


@overload
def create_model(
    name: SegmenterName,
    *,
    num_classes: int | None = None,
    checkpoint: str | PathLike[str] | None = None,
    preprocessing: Preprocessing | str | None = None,
    **overrides: Any,
) -> UPerNet: ...


@overload
def create_model(
    name: str,
    *,
    num_classes: int | None = None,
    checkpoint: str | PathLike[str] | None = None,
    preprocessing: Preprocessing | str | None = None,
    **overrides: Any,
) -> nn.Module: ...


def create_model(
    name: str,
    *,
    num_classes: int | None = None,
    checkpoint: str | PathLike[str] | None = None,
    preprocessing: Preprocessing | str | None = None,
    **overrides: Any,
) -> nn.Module:
    """Build the network `name`: one of `list_models()`, or "package.module:Name".

    "upernet_..." is a VMamba under UPerNet's heads, which gives logits (n, classes, h, w). `overrides` are fields of
    the network's configuration, as of VMambaConfig, or arguments of a network from outside. `checkpoint` is a path or
    the name of a known checkpoint (see `models.pretrained`); the network comes back in evaluation mode when one is
    loaded. What a file states of its network need not be given again. `preprocessing` is what makes images its input,
    or the name of a preset, where the checkpoint does not say.

    >>> model = create_model("vmamba_nano", checkpoint="vmamba_nano_cifar10")
    >>> model.classes[:2], model.preprocessing.size
    (('airplane', 'automobile'), 32)
    """
    given = overrides if num_classes is None else overrides | {"num_classes": num_classes}
    wanted = find_preset(preprocessing) if isinstance(preprocessing, str) else preprocessing
    if checkpoint is not None:
        return Checkpoint.open(checkpoint, variant=name, preprocessing=wanted, fields=given).load()
    network = build_network(name, given)
    if wanted is not None:
        cast(VMamba, network).preprocessing = wanted
    return network
