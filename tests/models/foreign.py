"""Networks from outside the package, as users write them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from trust_tta.preprocessing import Preprocessing


class SmallCNN(nn.Module):
    """Knows its preprocessing and classes; its parameters carry names that VMamba's renaming would change."""

    def __init__(self, num_classes: int = 5, width: int = 8) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.ReLU())
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_classes)
        self.preprocessing = Preprocessing(size=24, resize=None, crop=False, mean=(0.5,) * 3, std=(0.5,) * 3)
        self.classes = tuple(f"kind {i}" for i in range(num_classes))

    def forward_features(self, images: Tensor) -> Tensor:
        pooled: Tensor = self.norm(self.body(images).mean((2, 3)))
        return pooled

    def forward_head(self, features: Tensor) -> Tensor:
        logits: Tensor = self.head(features)
        return logits

    def forward(self, images: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(images))


class Plain(nn.Module):
    """Says nothing of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.fc = nn.Linear(4, 7)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.fc(self.body(images))
        return logits


def like_timm(**changes: Any) -> nn.Module:
    """Describes its input as timm's networks do."""
    network: Any = Plain()
    network.num_classes = 7
    network.pretrained_cfg = {
        "input_size": (3, 224, 224), "crop_pct": 0.875, "interpolation": "bilinear", "mean": (0.5, 0.5, 0.5),
        "std": [0.25, 0.25, 0.25], "crop_mode": "center", **changes,
    }  # fmt: skip
    made: nn.Module = network
    return made


READY = Plain()
WORD = "resnet"


def gives_nothing() -> None:
    return None


def breaks(depth: int) -> nn.Module:
    raise RuntimeError(f"no weights\nfor depth {depth}")


def pretrained() -> nn.Module:
    """Loads its own weights."""
    network = SmallCNN()
    with torch.no_grad():
        network.head.bias.copy_(torch.arange(5.0))
    return network
