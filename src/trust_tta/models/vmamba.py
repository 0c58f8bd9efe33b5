"""VMamba: a stem, stages of SS2D blocks, a head. The scan order is an argument of the forward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from trust_tta.models.base import Orders
from trust_tta.models.config import VMambaConfig
from trust_tta.models.layers import Mlp, StochasticDepth, initialize_linear, make_downsample, make_norm, make_stem
from trust_tta.models.ss2d import SS2D
from trust_tta.models.staged import Stage, StagedNetwork, drop_path_rates
from trust_tta.ops.batch_norm import norm_with_residual
from trust_tta.orders import ScanOrder


class Block(nn.Module):
    """x + SS2D(norm(x)), then x + MLP(norm(x)) where the network has MLPs."""

    def __init__(self, dim: int, config: VMambaConfig, op: SS2D, drop_path: float) -> None:
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
    norm_path: ClassVar[str] = "classifier.norm"
    head_path: ClassVar[str] = "classifier.head"
    stage_class: ClassVar[type[Stage]] = Stage
    config: VMambaConfig
    patch_embed: nn.Sequential
    classifier: Classifier

    def __init__(self, config: VMambaConfig) -> None:
        super().__init__()
        self.config = config
        dims, depths = config.dims, config.depths
        self.patch_embed = make_stem(
            config.in_channels, dims[0], config.patch_size, overlapping=config.overlapping_stem, norm=config.norm
        )
        stages = []
        for i, (dim, rates) in enumerate(zip(dims, drop_path_rates(config.drop_path, depths), strict=True)):
            downsample: nn.Module = nn.Identity()
            if i + 1 < len(dims):
                downsample = make_downsample(dim, dims[i + 1], merging=config.merging_downsample, norm=config.norm)
            stages.append(self.make_stage(i, rates, downsample))
        self.layers = nn.ModuleList(stages)
        self.classifier = Classifier(dims[-1], config.norm, config.num_classes)
        self.apply(initialize_linear)

    def make_stage(self, i: int, rates: list[float], downsample: nn.Module) -> nn.Module:
        """Stage i, a block for each rate of stochastic depth."""
        first = sum(self.config.depths[:i])
        blocks = [self.make_block(self.config.dims[i], first + j, rate) for j, rate in enumerate(rates)]
        return self.stage_class(blocks, downsample)

    def make_block(self, dim: int, block: int, drop_path: float) -> nn.Module:
        """A block of a stage; blocks are counted over all stages."""
        return Block(dim, self.config, self.make_op(dim, block), drop_path)

    def make_op(self, dim: int, block: int) -> SS2D:
        """SS2D of a block; blocks are counted over all stages."""
        del block
        return SS2D(dim, self.config)

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
