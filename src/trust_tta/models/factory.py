"""Build a network by name, and load its checkpoint."""

from __future__ import annotations

from os import PathLike
from typing import Any, cast

from torch import nn

from trust_tta.errors import ConfigError
from trust_tta.models.checkpoint import Checkpoint
from trust_tta.models.networks import build_network
from trust_tta.models.variants import VARIANTS
from trust_tta.models.vmamba import VMamba
from trust_tta.plugins import installed
from trust_tta.preprocessing import Preprocessing, find_preset


def list_models() -> list[str]:
    """The names that `create_model` takes: our variants, and what installed packages add."""
    return sorted({*VARIANTS, *installed("trust_tta.models")})


def create_model(
    name: str | None = None,
    *,
    num_classes: int | None = None,
    checkpoint: str | PathLike[str] | None = None,
    preprocessing: Preprocessing | str | None = None,
    **overrides: Any,
) -> nn.Module:
    """Build the network `name`: one of `list_models()`, or "package.module:Name".

    "upernet_..." is UPerNet on a VMamba backbone: logits (n, classes, h, w). `checkpoint` is a path or a key of
    `models.PRETRAINED`; with a checkpoint the network is returned in evaluation mode, and `name`, `num_classes` and
    `overrides` may be omitted where the file states them. `overrides` are fields of the network's configuration, such
    as VMambaConfig, or arguments of your own class. `preprocessing` is a Preprocessing or the name of a preset, for
    networks and files that do not state one.

    >>> model = create_model("vmamba_nano", checkpoint="vmamba_nano_cifar10")
    >>> model.classes[:2], model.preprocessing.size
    (('airplane', 'automobile'), 32)
    """
    given = overrides if num_classes is None else overrides | {"num_classes": num_classes}
    wanted = find_preset(preprocessing) if isinstance(preprocessing, str) else preprocessing
    if name is None and checkpoint is None:
        raise ConfigError("create_model needs a name, a checkpoint or both; list_models() has the names")
    if checkpoint is not None:
        return Checkpoint.open(checkpoint, variant=name, preprocessing=wanted, fields=given).load()
    network = build_network(cast(str, name), given)
    if wanted is not None:
        cast(VMamba, network).preprocessing = wanted
    return network


def load(checkpoint: str | PathLike[str]) -> nn.Module:
    """Load the network in `checkpoint`, a file that states its architecture or a key of `models.PRETRAINED`.

    The same as `create_model(checkpoint=checkpoint)`: weights, `preprocessing` and `classes`, in evaluation mode.

    >>> load("vmamba_nano_cifar10").classes[:2]
    ('airplane', 'automobile')
    """
    return create_model(checkpoint=checkpoint)
