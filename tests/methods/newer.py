"""The small network and the stream of the golden files of newer methods (golden/newer/README.md), in float64."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.golden import Arrays, load_golden


class SmallNet(nn.Module):
    """Three convolutions with BatchNorm, a mean over the map, a linear head."""

    def __init__(self) -> None:
        super().__init__()
        for i, (inner, outer) in enumerate(((3, 16), (16, 32), (32, 64)), start=1):
            stride = 1 if i == 1 else 2
            self.add_module(f"conv{i}", nn.Conv2d(inner, outer, 3, stride=stride, padding=1, bias=False))
            self.add_module(f"bn{i}", nn.BatchNorm2d(outer))
        self.fc = nn.Linear(64, 10)

    def forward_features(self, images: Tensor) -> Tensor:
        x = images
        for i in (1, 2, 3):
            x = F.relu(self.get_submodule(f"bn{i}")(self.get_submodule(f"conv{i}")(x)))
        return x.mean((2, 3))

    def forward_head(self, features: Tensor) -> Tensor:
        logits: Tensor = self.fc(features)
        return logits

    def forward(self, images: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(images))


def small_net() -> SmallNet:
    """With the weights of the file, in evaluation mode."""
    arrays = load_golden("newer/common.npz")
    state = {k.removeprefix("param/"): torch.from_numpy(v) for k, v in arrays.items() if k.startswith("param/")}
    net = SmallNet()
    net.load_state_dict(state)
    return net.double().eval()


def stream() -> list[Tensor]:
    """Eight batches (16, 3, 32, 32)."""
    return list(torch.from_numpy(load_golden("newer/common.npz")["x"]).double())


def golden_run(name: str) -> tuple[dict[str, Any], Arrays]:
    """Hyper-parameters and arrays of a run."""
    arrays = load_golden(f"newer/{name}.npz")
    return json.loads(str(arrays["hyper"])), arrays


def adapted_error(adapted: dict[str, Any], arrays: Arrays) -> float:
    """The largest relative error of the weights after the last batch."""
    names = [n.removeprefix("param/") for n in arrays if n.startswith("param/")]
    assert set(adapted) == set(names)
    ours = {n: adapted[n].detach().numpy() for n in names}
    return max(float(np.abs(ours[n] - arrays[f"param/{n}"]).max() / np.abs(arrays[f"param/{n}"]).max()) for n in names)
