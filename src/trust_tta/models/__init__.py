"""Networks and their checkpoints: VMamba, its variants as data, and networks from outside the package."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trust_tta.models.checkpoint import Checkpoint, load_checkpoint
    from trust_tta.models.config import VMambaConfig
    from trust_tta.models.factory import create_model, list_models
    from trust_tta.models.networks import Network
    from trust_tta.models.pretrained import PRETRAINED, Pretrained
    from trust_tta.models.upernet import slide
    from trust_tta.models.vmamba import VMamba

__all__ = [
    "PRETRAINED",
    "Checkpoint",
    "Network",
    "Pretrained",
    "VMamba",
    "VMambaConfig",
    "create_model",
    "list_models",
    "load_checkpoint",
    "slide",
]

# Loaded on first use: a name can be checked without PyTorch.
_HOMES = {
    "PRETRAINED": "pretrained",
    "Checkpoint": "checkpoint",
    "Network": "networks",
    "Pretrained": "pretrained",
    "VMamba": "vmamba",
    "VMambaConfig": "config",
    "create_model": "factory",
    "list_models": "factory",
    "load_checkpoint": "checkpoint",
    "slide": "upernet",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'trust_tta.models' has no attribute {name!r}")
    return getattr(importlib.import_module(f"trust_tta.models.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
