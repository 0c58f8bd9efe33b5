"""Test-time adaptation of vision state-space models: VMamba, TRUST and its baselines."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from trust_tta._version import __version__
from trust_tta.errors import TrustError
from trust_tta.orders import ScanOrder

if TYPE_CHECKING:
    from trust_tta.data.corruptions.apply import corrupt
    from trust_tta.live.guard import Guard
    from trust_tta.live.stream import Stream
    from trust_tta.methods.base import Method
    from trust_tta.methods.ranking import rank_orders
    from trust_tta.methods.registry import list_methods
    from trust_tta.methods.typed import create_method
    from trust_tta.models.checkpoint import load_checkpoint
    from trust_tta.models.config import VMambaConfig
    from trust_tta.models.factory import create_model, list_models
    from trust_tta.models.fast import fast
    from trust_tta.models.vmamba import VMamba
    from trust_tta.scan.functional import selective_scan

__all__ = [
    "Guard",
    "Method",
    "ScanOrder",
    "Stream",
    "TrustError",
    "VMamba",
    "VMambaConfig",
    "__version__",
    "corrupt",
    "create_method",
    "create_model",
    "fast",
    "list_methods",
    "list_models",
    "load_checkpoint",
    "rank_orders",
    "selective_scan",
]

# Where each name lives; loaded on first use, so that reading results never waits for PyTorch.
_HOMES = {
    "Guard": "trust_tta.live.guard",
    "Stream": "trust_tta.live.stream",
    "Method": "trust_tta.methods.base",
    "VMamba": "trust_tta.models.vmamba",
    "VMambaConfig": "trust_tta.models.config",
    "corrupt": "trust_tta.data.corruptions.apply",
    "create_method": "trust_tta.methods.registry",
    "create_model": "trust_tta.models.factory",
    "fast": "trust_tta.models.fast",
    "list_methods": "trust_tta.methods.registry",
    "list_models": "trust_tta.models.factory",
    "load_checkpoint": "trust_tta.models.checkpoint",
    "rank_orders": "trust_tta.methods.ranking",
    "selective_scan": "trust_tta.scan.functional",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'trust_tta' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
