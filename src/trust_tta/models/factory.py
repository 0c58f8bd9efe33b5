"""Build a network by name, and load its checkpoint."""

from __future__ import annotations

import difflib
from os import PathLike
from pathlib import Path
from typing import Any

from trust_tta.errors import CheckpointError, ConfigError
from trust_tta.models.checkpoint import load_checkpoint, read_metadata, stated_fields
from trust_tta.models.pretrained import PRETRAINED, locate
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
    """
    if name not in VARIANTS:
        close = difflib.get_close_matches(str(name).lower(), VARIANTS, n=1)
        hint = f"did you mean '{close[0]}'? " if close else ""
        raise ConfigError(f"unknown model {name!r}; {hint}the models are {', '.join(list_models())}")
    known = PRETRAINED.get(str(checkpoint))
    if known is not None and known.variant != name:
        raise ConfigError(f"checkpoint '{known.name}' is for the model '{known.variant}', not '{name}'")
    if checkpoint is not None and known is None and not Path(checkpoint).is_file():
        raise CheckpointError(f"no checkpoint at '{checkpoint}'; give a path, or one of {', '.join(PRETRAINED)}")
    stated: dict[str, Any] = {}
    if known is not None:
        stated = {"num_classes": known.num_classes}
    elif checkpoint is not None:
        stated = stated_fields(read_metadata(checkpoint), checkpoint)
    given = overrides if num_classes is None else overrides | {"num_classes": num_classes}
    model = VMamba(VARIANTS[name].override(stated | given))
    if checkpoint is not None:
        load_checkpoint(model, locate(known) if known else Path(checkpoint))
        model.eval()
    return model
