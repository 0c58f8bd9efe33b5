"""Small hand-written twins of the usual networks, as their authors write them: in-place ops, no forward_features."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

CLASSES = 5


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs)
        self.conv2, self.bn2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out: Tensor = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        result: Tensor = self.relu(out)
        return result


class ResNet(nn.Module):
    """As torchvision's: residual sums and ReLUs in place."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1, self.relu = nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True)
        self.layer1 = nn.Sequential(BasicBlock(8, 8, 1))
        self.layer2 = nn.Sequential(BasicBlock(8, 16, 2), BasicBlock(16, 16, 1))
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer2(self.layer1(self.relu(self.bn1(self.conv1(x)))))
        logits: Tensor = self.fc(torch.flatten(self.avgpool(x), 1))
        return logits


class Vit(nn.Module):
    """On nn.TransformerEncoder, under an attribute called `blocks`, with dropout and a head registered first."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, CLASSES)
        self.patches, self.dropout = nn.Conv2d(3, 16, 4, 4), nn.Dropout(0.1)
        self.cls, self.positions = nn.Parameter(torch.zeros(1, 1, 16)), nn.Parameter(0.02 * torch.randn(1, 17, 16))
        layer = nn.TransformerEncoderLayer(16, 2, 32, activation="gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 4, nn.LayerNorm(16), enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.cls.expand(len(x), -1, -1), tokens], 1) + self.positions
        logits: Tensor = self.head(self.blocks(self.dropout(tokens))[:, 0])
        return logits


class ConvNextBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.dwconv, self.norm = nn.Conv2d(width, width, 7, padding=3, groups=width), nn.LayerNorm(width)
        self.up, self.down, self.gamma = (
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
            nn.Parameter(torch.full((width,), 0.1)),
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.dwconv(x).permute(0, 2, 3, 1))
        y = self.gamma * self.down(nn.functional.gelu(self.up(y)))
        result: Tensor = x + y.permute(0, 3, 1, 2)
        return result


class ConvNext(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        stages = [nn.Sequential(ConvNextBlock(width), ConvNextBlock(width)) for width in (8, 16)]
        self.features = nn.Sequential(nn.Conv2d(3, 8, 4, 4), stages[0], nn.Conv2d(8, 16, 2, 2), stages[1])
        self.classifier = nn.Sequential(nn.LayerNorm(16), nn.Dropout(0.2), nn.Linear(16, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(x).mean((2, 3)))
        return logits


class DenseLayer(nn.Module):
    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.norm, self.relu = nn.BatchNorm2d(inputs), nn.ReLU(inplace=True)
        self.conv = nn.Conv2d(inputs, 4, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.conv(self.relu(self.norm(x)))], 1)


class DenseNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(*(DenseLayer(width + 4 * i) for i in range(3))) for width in (8, 20)]
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1), blocks[0], nn.AvgPool2d(2), blocks[1], nn.BatchNorm2d(32)
        )
        self.classifier = nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.relu(self.features(x), inplace=True)
        logits: Tensor = self.classifier(x.mean((2, 3)))
        return logits


class InvertedResidual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        hidden = 2 * width
        self.block = nn.Sequential(
            nn.Conv2d(width, hidden, 1, bias=False),
            nn.BatchNorm2d(hidden),
            nn.Hardswish(inplace=True),
            nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden, bias=False),
            nn.BatchNorm2d(hidden),
            nn.Hardswish(inplace=True),
            nn.Conv2d(hidden, width, 1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.block(x)
        out += x
        return out


class MobileNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.Hardswish(inplace=True))
        self.features = nn.Sequential(stem, *(InvertedResidual(8) for _ in range(4)))
        self.classifier = nn.Sequential(nn.Linear(8, 16), nn.Hardswish(inplace=True), nn.Linear(16, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(x).mean((2, 3)))
        return logits


TWINS: dict[str, type[nn.Module]] = {
    "resnet": ResNet, "vit": Vit, "convnext": ConvNext, "densenet": DenseNet, "mobilenet": MobileNet,
}  # fmt: skip


def twin(name: str, **changes: Any) -> nn.Module:
    """A twin with fixed random weights, in evaluation mode."""
    torch.manual_seed(0)
    network = TWINS[name](**changes).eval()
    for module in network.modules():  # statistics of training that are not those of a fresh network
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_mean is not None
            assert module.running_var is not None
            module.running_mean.uniform_(-0.5, 0.5)
            module.running_var.uniform_(0.5, 1.5)
    return network
