"""A small segmentation network and pictures for it."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from trust_tta.models.config import UPerNetConfig
from trust_tta.models.upernet import UPerNet

CLASSES = 5


def upernet(norm: Literal["layer", "batch"] = "batch", *, seed: int = 0) -> UPerNet:
    """Two stages of one block; a steep head, so that some predictions are sure, and scans that matter."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = UPerNetConfig(
            depths=(1, 1), dims=(8, 16), channels=8, auxiliary_channels=4, num_classes=CLASSES, patch_size=2,
            overlapping_stem=False, norm=norm, drop_path=0.1, pools=(1, 2),
        )  # fmt: skip
        model = UPerNet.from_config(config)
        model.decode_head.conv_seg.weight.data.mul_(300)
        for name, parameter in model.named_parameters():
            if name.endswith(("in_proj.weight", "out_proj.weight")):
                parameter.data.mul_(15)
    return model.eval()


def batches(count: int, *, images: int = 6, height: int = 14, width: int = 18, seed: int = 1) -> list[Tensor]:
    """Batches (images, 3, height, width) with a brightness of their own, so that statistics differ."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(images, 3, height, width, generator=generator) + 0.3 * i for i in range(count)]
