"""The state of an unfinished training run on disk: whole or not at all, and only for the run it belongs to."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from trust_tta.atomic import write_whole
from trust_tta.data.files import hash_pixels
from trust_tta.errors import CheckpointError, StateError
from trust_tta.training.recipe import Recipe

_FORMAT = 1


def identify(model: nn.Module, images: NDArray[np.uint8], labels: NDArray[Any], recipe: Recipe) -> dict[str, str]:
    """What must be the same for a run to continue: the recipe field by field, the data, the network's shapes."""
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    return {
        **{name: json.dumps(value) for name, value in recipe.model_dump().items()},
        "images": hash_pixels(images),
        "labels": hash_pixels(labels.astype(label_type(labels))),
        "network": hash_pixels(np.frombuffer(repr(shapes).encode(), np.uint8)),
    }


def label_type(labels: NDArray[Any]) -> type[np.integer[Any]]:
    """How labels are kept: those of pixels are many, and small."""
    return np.uint8 if labels.ndim > 1 else np.int64


def save_state(path: Path, state: Mapping[str, Any], identity: Mapping[str, str]) -> None:
    """Write tensors and plain values; a crash leaves the last state that was whole."""
    content = io.BytesIO()  # written as bytes, so that a full disk is reported as such
    torch.save({"format": _FORMAT, "identity": dict(identity), **state}, content)
    write_whole(path, content.getbuffer())


def load_state(path: Path, identity: Mapping[str, str], device: torch.device) -> dict[str, Any]:
    """Read what `save_state` wrote; the state of another run is refused with what differs."""
    try:
        state: Any = torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # the reader raises many types; each means the same to a user
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"'{path}' cannot be read as a training state ({reason}); delete this file") from error
    if not isinstance(state, dict) or state.get("format") != _FORMAT:
        raise CheckpointError(f"'{path}' is not a training state of this version; delete it or give another folder")
    saved = state["identity"]
    changed = [f"{key} was {saved.get(key)}, is {value}" for key, value in identity.items() if saved.get(key) != value]
    if changed:
        raise StateError(
            f"'{path}' belongs to another run: {'; '.join(changed)}; give another folder, or delete this file"
        )
    return state
