"""Small networks and batches for the tests of the methods."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from trust_tta.methods import gather_fisher, gather_source_statistics
from trust_tta.methods.base import Method
from trust_tta.methods.registry import create_method
from trust_tta.models.config import VMambaConfig
from trust_tta.models.vmamba import VMamba

CLASSES = 5
LEARNERS = (
    "tent", "eta", "sar", "shot", "trust_naive", "trust", "ensemble", "repetition", "augmentation", "tide",
    "eata", "roid", "cmf", "cotta", "rotta", "deyo", "rdumb",
)  # fmt: skip
# What keeps images from being left out, so that every batch is learned from.
OPEN: dict[str, dict[str, Any]] = {
    "eta": {"margin": 10.0, "d_margin": 2.0},
    "eata": {"margin": 1.01, "d_margin": 2.0},
    "rdumb": {"margin": 1.01, "d_margin": 2.0},
    "sar": {"margin": 10.0, "reset_threshold": 0},
    "deyo": {"margin": 10.0, "plpd": -1.0},
}


def vmamba(norm: str = "batch", *, seed: int = 0, drop_path: float = 0.0) -> VMamba:
    """Two stages of one block; a steep head, so that some predictions are sure, and scans that matter."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = VMambaConfig(depths=(1, 1), dims=(8, 16), num_classes=CLASSES, norm=norm, drop_path=drop_path)  # type: ignore[arg-type]
        model = VMamba(config)
        model.classifier.head.weight.data.mul_(60)
        for name, parameter in model.named_parameters():
            if name.endswith(("in_proj.weight", "out_proj.weight")):
                parameter.data.mul_(15)
    return model


class ConvNet(nn.Module):
    """A plain network with two BatchNorms and the protocol of features and head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 6, 3, stride=2), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 8, 3), nn.BatchNorm2d(8), nn.ReLU()
        )
        self.head = nn.Linear(8, CLASSES)

    def forward_features(self, images: Tensor) -> Tensor:
        features: Tensor = self.body(images).mean((2, 3))
        return features

    def forward_head(self, features: Tensor) -> Tensor:
        logits: Tensor = self.head(features)
        return logits

    def forward(self, images: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(images))


def convnet(seed: int = 0) -> ConvNet:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = ConvNet()
        model.head.weight.data.mul_(10)
    return model


def batches(count: int, *, images: int = 9, size: int = 16, seed: int = 1) -> list[Tensor]:
    """Batches (images, 3, size, size) with a brightness of their own, so that statistics differ."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(images, 3, size, size, generator=generator) + 0.3 * i for i in range(count)]


def make(name: str, model: nn.Module, **options: Any) -> Any:
    """The method, small, with a learning rate that shows and with what it must have."""
    if name in LEARNERS:
        options = {"lr": 1e-2, **options}
    if name in ("eata", "rdumb", "deyo"):
        options = {"optimizer": "adam", **OPEN[name], **options}
    if name == "cotta":
        options = {"augmentations": 2, "threshold": 1.0, **options}
    if name == "rotta":
        options = {"memory_size": 10, "update_frequency": 9, **options}
    if name == "eata":
        chosen = {key: options[key] for key in ("parameters", "statistics") if key in options}
        options = {"fisher": gather_fisher(model, batches(2, seed=7), **chosen), "fisher_alpha": 1.0, **options}
    if name in ("trust", "ensemble", "repetition", "augmentation"):
        options = {"k": 2, **options}
    if name == "dpcore":
        statistics = gather_source_statistics(model, batches(2, seed=7), statistics="source")
        options = {"source_statistics": statistics, "new_steps": 3, "rho": 10.0, **options}
    if name == "foa":
        statistics = gather_source_statistics(model, batches(2, seed=7))
        options = {"source_statistics": statistics, "prompts": 2, "population": 4, **options}
    return create_method(name, model, **options)


def run(method: Method, stream: list[Tensor]) -> list[Tensor]:
    return [method(images) for images in stream]


def same(a: Any, b: Any) -> bool:
    """Whether two nested states are equal bit for bit."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return isinstance(b, (list, tuple)) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return copy.deepcopy(model.state_dict())
