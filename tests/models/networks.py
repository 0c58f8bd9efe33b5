"""Networks of the model tests: tiny ones, and golden ones with their weights."""

from __future__ import annotations

import json

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
