"""torchvision's networks, narrow and shallow, with random weights: the code that most users' networks run."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from tests.libraries import import_vision
from tests.methods.twins import CLASSES, twin

TORCHVISION = (
    "resnet18", "resnet50", "mobilenet_v3_small", "efficientnet_b0", "convnext_tiny", "vit_b_16", "swin_t",
    "regnet_y_400mf", "densenet121",
)  # fmt: skip
NETWORKS = (*TORCHVISION, "transformer_encoder")
SIDES = {"transformer_encoder": 16}  # others: 32


def small(name: str) -> nn.Module:
    """A copy of the small network, in evaluation mode."""
    return copy.deepcopy(_made(name))


@cache
def _made(name: str) -> nn.Module:
    if name == "transformer_encoder":
        return twin("vit")
    import_vision()
    models: Any = pytest.importorskip("torchvision.models")
    torch.manual_seed(0)
    network: nn.Module = _build(models, name).eval()
    for parameter in list(network.parameters())[-2:]:  # some start with a classifier of zeros
        nn.init.normal_(parameter, std=0.3)
    return network


def _build(models: Any, name: str) -> Any:
    classes: dict[str, Any] = {"num_classes": CLASSES}
    if name == "resnet18":
        return models.resnet.ResNet(models.resnet.BasicBlock, [1, 1, 1, 1], **classes)
    if name == "resnet50":
        return models.resnet.ResNet(models.resnet.Bottleneck, [1, 1, 1, 1], width_per_group=8, **classes)
    if name == "mobilenet_v3_small":
        block = models.mobilenetv3.InvertedResidualConfig
        blocks = [
            block(16, 3, 16, 16, True, "RE", 2, 1, 0.5),
            block(16, 3, 32, 24, False, "HS", 2, 1, 0.5),
            block(24, 5, 48, 24, True, "HS", 1, 1, 0.5),
        ]
        return models.MobileNetV3(blocks, last_channel=32, **classes)
    if name == "efficientnet_b0":
        block = models.efficientnet.MBConvConfig
        blocks = [block(1, 3, 1, 16, 8, 1, 1, 1), block(4, 3, 2, 8, 16, 2, 1, 1), block(4, 5, 2, 16, 24, 2, 1, 1)]
        return models.EfficientNet(blocks, dropout=0.2, last_channel=64, **classes)
    if name == "convnext_tiny":
        block = models.convnext.CNBlockConfig
        return models.ConvNeXt([block(16, 32, 1), block(32, None, 1)], **classes)
    if name == "vit_b_16":
        sizes = {"num_layers": 4, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 32}
        return models.VisionTransformer(image_size=32, patch_size=8, dropout=0.1, **sizes, **classes)
    if name == "swin_t":
        return models.SwinTransformer([4, 4], 16, [2, 2], [2, 4], [4, 4], **classes)
    if name == "regnet_y_400mf":
        block = models.regnet.BlockParams
        params = block.from_init_params(depth=6, w_0=16, w_a=16.0, w_m=2.0, group_width=8, se_ratio=0.25)
        return models.RegNet(params, **classes)
    assert name == "densenet121"
    return models.DenseNet(4, (2, 2, 2), 8, **classes)
