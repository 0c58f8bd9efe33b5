"""Build a network by name, and load its checkpoint."""

from __future__ import annotations

from os import PathLike
from typing import Any

from trust_tta.models.checkpoint import Checkpoint
from trust_tta.models.networks import build_network
from trust_tta.models.variants import VARIANTS
from trust_tta.models.vmamba import VMamba


def list_models() -> list[str]:
    """The names that `create_model` takes."""
    return sorted(VARIANTS)


def create_model(
    name: str, *, num_classes: int | None = None, checkpoint: str | PathLike[str] | None = None, **overrides: Any
) -> VMamba:
    """Build the variant `name`; `overrides` are fields of VMambaConfig.

    `checkpoint` is a path or the name of a known checkpoint (see `models.pretrained`); the network comes back
    in evaluation mode when one is loaded. What a file states of its network need not be given again.

    >>> model = create_model("vmamba_nano", checkpoint="vmamba_nano_cifar10")
    >>> model.classes[:2], model.preprocessing.size
    (('airplane', 'automobile'), 32)
    """
    given = overrides if num_classes is None else overrides | {"num_classes": num_classes}
    if checkpoint is None:
        return build_network(name, given)
    return Checkpoint.open(checkpoint, variant=name, fields=given).load()
