"""A tiny segmentation network that learns; run as a program, it dies as if killed in the middle of training."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trust_tta.data.segmentation_metrics import IGNORED
from trust_tta.models.config import UPerNetConfig
from trust_tta.models.upernet import UPerNet
from trust_tta.training.loop import FitResult, fit
from trust_tta.training.recipe import SegmentationRecipe
from trust_tta.training.segmentation import segmentation

CLASSES = 3
# Every random part is on, so that a resumed run must get every one of them right.
SHORT = SegmentationRecipe(epochs=3, batch_size=4, warmup_epochs=1, drop_path=0.3, balance=0.5, plain_share=0.34)


def network() -> UPerNet:
    torch.manual_seed(0)
    return UPerNet.from_config(
        UPerNetConfig(
            depths=(1, 1), dims=(8, 16), channels=8, auxiliary_channels=4, num_classes=CLASSES, patch_size=2,
            overlapping_stem=False, norm="batch", pools=(1, 2),
        )
    )  # fmt: skip


def stripes(n: int, *, height: int = 12, width: int = 16) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Three stripes in an order of their own, of which each is brightest in the channel that is its label."""
    draw = np.random.default_rng(0)
    labels = np.stack([np.repeat(draw.permutation(CLASSES), width // CLASSES + 1)[:width] for _ in range(n)])
    stacked = np.broadcast_to(labels[:, None], (n, height, width)).astype(np.uint8)
    images = draw.integers(0, 100, (n, height, width, 3)).astype(np.uint8)
    images += (150 * np.eye(CLASSES, dtype=np.uint8))[stacked]
    masks: NDArray[np.uint8] = stacked.copy()
    masks[:, 0] = IGNORED
    return images, masks


def learn(
    path: Path | None = None, recipe: SegmentationRecipe = SHORT, *, images: int = 10, **options: Any
) -> FitResult[UPerNet]:
    pictures, masks = stripes(images)
    task = segmentation(CLASSES, masks, recipe)
    return fit(network(), pictures, masks, recipe, task=task, state_path=path, **options)


def main(path: Path, deadly_epoch: int) -> None:
    epochs = iter(range(SHORT.epochs))

    def evaluate(_: UPerNet) -> float:
        if next(epochs) == deadly_epoch:
            os.kill(os.getpid(), signal.SIGKILL)
        return 0.5

    learn(path, evaluate=evaluate)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
