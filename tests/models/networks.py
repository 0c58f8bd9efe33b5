"""Networks of the model tests: tiny ones, and golden ones with their weights."""

from __future__ import annotations

import json
from typing import Any

import torch

from tests.golden import Arrays, load_golden
from trust_tta.models.checkpoint import load_checkpoint
from trust_tta.models.config import VMambaConfig
from trust_tta.models.vmamba import VMamba

TINY = VMambaConfig(depths=(1, 2), dims=(8, 16), num_classes=3, drop_path=0.0)
TINY_VANILLA = VMambaConfig(
    depths=(1, 1), dims=(8, 16), num_classes=3, overlapping_stem=False, merging_downsample=True, d_state=3,
    ssm_ratio=2.0, conv_bias=True, gate=True, mlp_ratio=0.0, drop_path=0.0,
)  # fmt: skip
TINY_CONFIGS = {
    "layer": TINY,
    "batch": TINY.override({"norm": "batch"}),
    "vanilla": TINY_VANILLA,
    "vanilla-batch": TINY_VANILLA.override({"norm": "batch"}),
}

# Small variants of the networks of `test_backbones.py`.
BACKBONES: dict[str, dict[str, Any]] = {
    "mambavision_tiny": {
        "dim": 8,
        "stem_dim": 4,
        "depths": (1, 1, 2, 2),
        "windows": (8, 8, 3, 2),
        "heads": (1, 1, 2, 4),
        "layer_scale": 0.5,
    },
    "msvmambav3_tiny": {"depths": (1, 1), "dims": (32, 64)},  # so wide that some units of the attentions are awake
    "msvmamba_nano": {"depths": (1, 1), "dims": (32, 64)},
    "efficientvmamba_tiny": {"depths": (1, 1, 1), "dims": (8, 16, 32), "d_state": 3},
    "spatialmamba_tiny": {"depths": (1, 1), "dims": (8, 16)},
    "vssd_micro": {
        "depths": (1, 1, 1),
        "dims": (8, 16, 32),
        "heads": (1, 2, 2),
        "attention": (False, False, True),
        "d_state": 4,
    },
}


def tiny_network(config: VMambaConfig = TINY, *, seed: int = 0) -> VMamba:
    """In evaluation mode, in float64, with directions and statistics that differ from each other."""
    torch.manual_seed(seed)
    model = VMamba(config).double().eval()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.add_(torch.rand_like(tensor) * 0.3)
    return model


def tiny_images(count: int = 3, *, height: int = 24, width: int = 16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 3, height, width, generator=generator, dtype=torch.float64)


def golden_network(file: str) -> tuple[VMamba, Arrays]:
    """The network of a golden file with its weights loaded, and the file's arrays."""
    golden = load_golden(file)
    model = VMamba(VMambaConfig.from_official(json.loads(str(golden["config"]))))
    state = {k.removeprefix("param/"): torch.from_numpy(v) for k, v in golden.items() if k.startswith("param/")}
    load_checkpoint(model, state)
    return model.eval(), golden
