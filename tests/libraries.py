"""Other people's libraries, each skipped where it is missing.

torchvision's builds for GPUs do not find their operators under a PyTorch for CPUs, and timm imports torchvision. Those
that it declares at import are declared here without an implementation; nothing in these tests calls them.
"""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest
import torch

_DECLARED = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def import_vision() -> None:
    """torchvision, where it is installed, so that those who import it next find it."""
    try:
        importlib.import_module("torchvision")
    except ModuleNotFoundError:
        return
    except RuntimeError as error:
        if "torchvision::nms does not exist" not in str(error):
            raise
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", _DECLARED)


def import_timm() -> ModuleType:
    """timm, or a skip."""
    import_vision()
    module: ModuleType = pytest.importorskip("timm", reason="needs the extra 'timm'")
    return module
