"""VMamba: a stem, stages of SS2D blocks, a head. The scan order is an argument of the forward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from trust_tta.models.base import Orders
from trust_tta.models.config import VMambaConfig
from trust_tta.models.layers import Mlp, StochasticDepth, initialize_linear, make_downsample, make_norm
from trust_tta.models.ss2d import SS2D
from trust_tta.models.staged import Stage, StagedNetwork
from trust_tta.ops.batch_norm import norm_with_residual
from trust_tta.ops.convolution import FirstConv2d, StridedConv2d
from trust_tta.orders import ScanOrder


class Block(nn.Module):
    """x + SS2D(norm(x)), then x + MLP(norm(x)) where the network has MLPs."""

    def __init__(self, dim: int, config: VMambaConfig, op: nn.Module, drop_path: float) -> None:
        super().__init__()
        self.norm = make_norm(config.norm, dim)
        self.op = op
        self.drop_path = StochasticDepth(drop_path)
        self.mlp = Mlp(dim, int(config.mlp_ratio * dim)) if config.mlp_ratio > 0 else None
        self.norm2 = make_norm(config.norm, dim) if self.mlp is not None else None

    def forward(self, x: Tensor, directions: Tensor) -> Tensor:
        x, normal = norm_with_residual(self.norm, x)
        drops = self.drop_path.drops
        x = x + self.drop_path(self.op(normal, directions)) if drops else self.op(normal, directions, x)
        if self.mlp is not None and self.norm2 is not None:
            x, normal = norm_with_residual(self.norm2, x)
            x = x + self.drop_path(self.mlp(normal)) if drops else self.mlp(normal, x)
        return x


class Classifier(nn.Module):
    """The parameters that normalize the last map and classify its average."""

    norm: nn.Module

    def __init__(self, dim: int, norm: str, num_classes: int) -> None:
        super().__init__()
        self.norm = make_norm(norm, dim)
        self.head = nn.Linear(dim, num_classes)


class VMamba(StagedNetwork):
    """images (n, channels, h, w) -> logits (n, classes)."""

    # The groups that read rows forwards (a), rows backwards (c), columns forwards (b) and columns backwards (d).
    orders: ClassVar[Mapping[str, Sequence[int]]] = {
        str(order): [order.inverse[i] for i in (0, 2, 1, 3)] for order in ScanOrder.all()
    }
    mixer: ClassVar[str] = r"\.op\."
    norm_path: ClassVar[str] = "classifier.norm"
    head_path: ClassVar[str] = "classifier.head"
    stage_class: ClassVar[type[Stage]] = Stage
    config: VMambaConfig
    patch_embed: nn.Sequential
    layers: nn.ModuleList
    classifier: Classifier

    def __init__(self, config: VMambaConfig) -> None:
        channels, dim, patch, norm = config.in_channels, config.dims[0], config.patch_size, config.norm
        if config.overlapping_stem:
            stride = patch // 2
            stem = nn.Sequential(  # the indices are upstream's
                FirstConv2d(channels, dim // 2, stride + 1, stride=stride, padding=1),
                nn.Identity(),
                make_norm(norm, dim // 2),
                nn.Identity(),
                nn.GELU(),
                StridedConv2d(dim // 2, dim, stride + 1, stride=stride, padding=1),
                nn.Identity(),
                make_norm(norm, dim),
            )
        else:
            stem = nn.Sequential(nn.Conv2d(channels, dim, patch, stride=patch), nn.Identity(), make_norm(norm, dim))
        super().__init__(config, stem)
        self.classifier = Classifier(config.dims[-1], config.norm, config.num_classes)
        self.apply(initialize_linear)

    def make_stage(self, i: int, rates: list[float]) -> nn.Module:
        downsample, first = make_downsample(self.config, i), sum(self.config.depths[:i])
        blocks = [self.make_block(self.config.dims[i], first + j, rate) for j, rate in enumerate(rates)]
        return self.stage_class(blocks, downsample)

    def make_block(self, dim: int, index: int, drop_path: float) -> nn.Module:
        """Block `index` of the network."""
        return Block(dim, self.config, SS2D(dim, self.config), drop_path)

    def forward_stem(self, images: Tensor) -> Tensor | None:
        """First convolution of the images, which no scan order changes; None where it is adapted or observed."""
        observed = self.patch_embed._forward_hooks or self.patch_embed._forward_pre_hooks
        if observed or any(parameter.requires_grad for parameter in self.patch_embed[0].parameters()):
            return None
        return self.patch_embed[0](images.contiguous(memory_format=torch.channels_last))

    def forward_after_stem(self, x: Tensor, directions: Tensor) -> Tensor:
        """Logits (n, classes) from the output of `forward_stem`."""
        x = self.patch_embed[1:](x)
        return self.forward_head(self.pool(self.forward_maps(x, directions=directions)[-1]))

    def forward_maps(self, x: Tensor, order: Orders = None, *, directions: Tensor | None = None) -> list[Tensor]:
        """The map at the end of each stage, from the first map on."""
        if directions is None:
            directions = self.scan_directions(order, x.shape[0])
        return super().forward_maps(x, directions=directions)
