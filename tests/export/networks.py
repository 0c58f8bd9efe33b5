"""Networks that are exported in seconds."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import trust_tta as tt
from trust_tta.preprocessing import Preprocessing

WINDOWS = (("h", "v_flip", "w2", "w7_flip"), ("w2", "h_flip", "v", "h"))
SMALL: dict[str, tuple[str, dict[str, Any]]] = {
    "vmamba": ("vmamba_nano", {"dims": (8, 16), "depths": (1, 1)}),
    "vanilla": ("vanilla_vmamba_tiny", {"dims": (8, 16), "depths": (1, 1), "d_state": 2}),
    "vim": ("vim_tiny", {"dim": 16, "depth": 1, "d_state": 3, "image_size": (32, 32)}),
    "localvmamba": ("localvmamba_tiny", {"dims": (8, 16), "depths": (1, 1), "directions": WINDOWS}),
    "localvim": (
        "localvim_tiny",
        {"dim": 16, "depth": 1, "d_state": 1, "image_size": (32, 32), "directions": WINDOWS[:1]},
    ),
    "groupmamba": ("groupmamba_tiny", {"dims": (64, 64), "depths": (1, 1), "mlp_ratios": (2.0, 2.0), "stem_dim": 8}),
}


def small(family: str) -> nn.Module:
    """A network of the family with random weights and statistics, that takes images of 32 pixels."""
    name, fields = SMALL[family]
    torch.manual_seed(0)
    network = tt.create_model(name, num_classes=5, **fields).eval()
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean)  # type: ignore[arg-type]
            nn.init.uniform_(module.running_var, 0.5, 2)  # type: ignore[arg-type]
    network.preprocessing = Preprocessing(size=32, resize=None, crop=False)  # type: ignore[assignment]
    network.classes = tuple("abcde")  # type: ignore[assignment]
    return network
