"""A tiny network and tiny images for the tests of this room."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trust_tta.models.config import VMambaConfig
from trust_tta.models.vmamba import VMamba
from trust_tta.training.recipe import TrainRecipe
from trust_tta.training.tasks import classification

TINY = VMambaConfig(
    depths=(1, 1), dims=(8, 16), num_classes=3, patch_size=2, overlapping_stem=False, norm="batch", mlp_ratio=2.0
)
TASK = classification(TINY.num_classes)
# Every random part is on, so that a resumed run must get every one of them right.
SHORT = TrainRecipe(
    epochs=4,
    batch_size=8,
    warmup_epochs=1,
    crop_padding=2,
    cutout=3,
    cutmix=0.4,
    plain_share=0.25,
    drop_path=0.3,
)


def tiny_network(seed: int = 0) -> VMamba:
    torch.manual_seed(seed)
    return VMamba(TINY)


def noisy_images(n: int, *, height: int = 8, width: int = 8, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (n, height, width, 3), dtype=np.uint8)


def colored_images(n: int, *, seed: int = 0) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Images (n, 8, 8, 3) whose brightest channel is their label."""
    labels = np.arange(n) % 3
    images = noisy_images(n, seed=seed) // 2
    images[np.arange(n), :, :, labels] += 100
    return images, labels


def flat(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Every tensor in a nested state, by path."""
    found: dict[str, torch.Tensor] = {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            found[str(key)] = value
        elif isinstance(value, dict):
            found |= {f"{key}.{inner}": tensor for inner, tensor in flat(value).items()}
    return found
