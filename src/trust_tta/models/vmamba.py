"""VMamba: a stem, stages of SS2D blocks, a head. The scan order is an argument of the forward pass."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from trust_tta.models.base import Orders, ScanNetwork
from trust_tta.models.config import VMambaConfig
from trust_tta.models.layers import (
    SCAN_PARAMETERS,
    Convolutions,
    Mlp,
    StochasticDepth,
    initialize_linear,
    make_downsample,
    make_norm,
    make_stem,
)
from trust_tta.models.parameter_roles import Role
from trust_tta.models.ss2d import SS2D
from trust_tta.ops.batch_norm import fork_norm
from trust_tta.ops.convolution import FirstConv2d, bias_can_wait
from trust_tta.ops.cuda_graphs import StemOutput
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
        x, normal = fork_norm(self.norm, x)
        drops = self.drop_path.drops
        x = x + self.drop_path(self.op(normal, directions)) if drops else self.op(normal, directions, x)
        if self.mlp is not None and self.norm2 is not None:
            x = x + self.drop_path(self.mlp(self.norm2(x))) if drops else self.mlp.add_to(x, self.norm2)
        return x


class Stage(nn.Module):
    """Blocks at one resolution, then the step to the next."""

    def __init__(self, blocks: list[Block], downsample: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.downsample = downsample

    def forward(self, x: Tensor, directions: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, directions)
        return x


class Classifier(nn.Module):
    """The parameters that normalize the last map and classify its average."""

    norm: nn.Module

    def __init__(self, dim: int, norm: str, num_classes: int) -> None:
        super().__init__()
        self.norm = make_norm(norm, dim)
        self.head = nn.Linear(dim, num_classes)


def _groups(order: ScanOrder) -> list[int]:
    """The group that reads rows forwards (a), rows backwards (c), columns forwards (b) and columns backwards (d)."""
    group = order.inverse
    return [group[0], group[2], group[1], group[3]]


def ss2d_arguments(config: VMambaConfig, dim: int) -> dict[str, Any]:
    """Constructor arguments of an SS2D of this width."""
    return {
        "inner": int(config.ssm_ratio * dim),
        "d_state": config.d_state,
        "dt_rank": config.dt_rank or math.ceil(dim / 16),
        "conv_size": config.conv_size,
        "conv_bias": config.conv_bias,
        "gate": config.gate,
    }


class VMamba(ScanNetwork):
    """images (n, channels, h, w) -> logits (n, classes)."""

    orders: ClassVar[Mapping[str, Sequence[int]]] = {str(order): _groups(order) for order in ScanOrder.all()}
    config: VMambaConfig
    classifier: Classifier

    def __init__(self, config: VMambaConfig) -> None:
        super().__init__()
        self.config = config
        dims, depths = config.dims, config.depths
        self.patch_embed = make_stem(
            config.in_channels, dims[0], config.patch_size, overlapping=config.overlapping_stem, norm=config.norm
        )
        rates = [config.drop_path * i / max(1, sum(depths) - 1) for i in range(sum(depths))]
        stages = []
        for i, (dim, depth) in enumerate(zip(dims, depths, strict=True)):
            first = sum(depths[:i])
            blocks = [Block(dim, config, self.make_op(dim, j), rates[j]) for j in range(first, first + depth)]
            downsample: nn.Module = nn.Identity()
            if i + 1 < len(dims):
                downsample = make_downsample(dim, dims[i + 1], merging=config.merging_downsample, norm=config.norm)
            stages.append(Stage(blocks, downsample))
        self.layers = nn.ModuleList(stages)
        self.classifier = Classifier(dims[-1], config.norm, config.num_classes)
        self.apply(initialize_linear)

    def make_op(self, dim: int, block: int) -> SS2D:
        """SS2D of a block; blocks are counted over all stages."""
        del block
        return SS2D(dim, **ss2d_arguments(self.config, dim))

    def encode(self, images: Tensor, order: Orders = None, *, directions: Tensor | None = None) -> Tensor:
        """The last map (n, dims[-1], h, w)."""
        return self.forward_maps(self.embed(images), order, directions=directions)[-1]

    def forward_head(self, features: Tensor) -> Tensor:
        """Logits (n, classes) of pooled features."""
        logits: Tensor = self.classifier.head(features)
        return logits

    def embed(self, images: Tensor) -> Tensor:
        """The first map (n, dims[0], h', w')."""
        images = self.check_images(images)
        if not isinstance(self.patch_embed[0], FirstConv2d):  # which takes them as they lie
            images = images.contiguous(memory_format=torch.channels_last)
        x: Tensor = self.patch_embed(images)
        return x

    def forward_stem(self, images: Tensor) -> StemOutput | None:
        """First convolution of the images, which no scan order and few methods change, for `forward_after_stem`.

        None where it is fused with later layers or adapted.
        """
        stem, first = self.patch_embed, self.patch_embed[0]
        if not isinstance(stem, Convolutions) or stem._forward_hooks or stem._forward_pre_hooks:
            return None
        if not isinstance(first, FirstConv2d) or first.weight.requires_grad or not bias_can_wait(first, images):
            return None
        return stem.forward_stem(images)

    def forward_after_stem(self, stem: StemOutput, directions: Tensor) -> Tensor:
        """Logits (n, classes) from the output of `forward_stem`."""
        x = cast(Convolutions, self.patch_embed).finish(*stem)
        return self.forward_head(self.pool(self.forward_maps(x, directions=directions)[-1]))

    def forward_maps(self, x: Tensor, order: Orders = None, *, directions: Tensor | None = None) -> list[Tensor]:
        """The map at the end of each stage, from the first map on."""
        if directions is None:
            directions = self.scan_directions(order, x.shape[0])
        maps = []
        for stage in cast(list[Stage], self.layers):
            x = stage(x, directions)
            maps.append(x)
            x = stage.downsample(x)
        return maps

    def pool(self, x: Tensor) -> Tensor:
        """The last map, normalized and averaged, (n, dims[-1])."""
        normal: Tensor = self.classifier.norm(x)
        return normal.permute(0, 2, 3, 1).flatten(1, 2).mean(1)  # so that its gradient lies as the map does

    def heads(self) -> list[nn.Linear]:
        return [self.classifier.head]

    def parameter_roles(self) -> dict[str, Role]:
        """The role of every parameter, by name; `out_norm` counts as `other`, as in the paper."""
        roles = {}
        last_stage = f"layers.{len(self.layers) - 1}."
        for name, _ in self.named_parameters():
            last = name.startswith((last_stage, "classifier."))
            module, _, leaf = name.rpartition(".")
            if leaf in SCAN_PARAMETERS:
                roles[name] = Role("scan", last)
            elif ".op." in name and not module.endswith("out_norm") and ".attn." not in name:
                roles[name] = Role("projection", last)
            elif isinstance(self.get_submodule(module), (nn.BatchNorm2d, nn.LayerNorm)) and ".op." not in name:
                roles[name] = Role("norm", last)
            else:
                roles[name] = Role("other", last)
        return roles
