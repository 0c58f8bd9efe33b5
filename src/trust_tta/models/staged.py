"""Networks with a stem, stages of decreasing resolution, a norm, pooling and a head."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trust_tta.models.base import Orders, ScanNetwork
from trust_tta.models.config import NetworkConfig
from trust_tta.models.layers import Linear2d, StochasticDepth


class Stage(nn.Module):
    """Blocks at one resolution; `downsample` leads to the next stage and is called by the network."""

    def __init__(self, blocks: Iterable[nn.Module], downsample: nn.Module | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.downsample = downsample

    def forward(self, x: Tensor, directions: Tensor | None) -> Tensor:
        paths = self.paths(x, directions)
        for block in self.blocks:
            x = block(x, paths)
        return x

    def paths(self, x: Tensor, directions: Tensor | None) -> Any:
        """Second argument of the blocks: the directions, or paths through maps of the size of x."""
        del x
        return directions


class StagedNetwork(ScanNetwork):
    """Maps images (n, channels, h, w) to logits (n, classes) through maps (n, c, h, w), channel-last in memory.

    Subclasses add the norm and the head, under the names of the published files.
    """

    stages_path: ClassVar[str] = "layers"
    norm_path: ClassVar[str] = "norm"

    def __init__(self, config: NetworkConfig, stem: nn.Module) -> None:
        super().__init__(config)
        self.patch_embed = stem
        rates = drop_path_rates(config.drop_path, [depth for depth, _ in config.stages()])
        self.add_module(self.stages_path, nn.ModuleList(self.make_stage(i, each) for i, each in enumerate(rates)))

    def make_stage(self, i: int, rates: list[float]) -> nn.Module:
        """Stage i, with a block for each rate of stochastic depth, and a `downsample`."""
        raise NotImplementedError

    def stages(self) -> list[Any]:
        return list(cast(nn.ModuleList, self.get_submodule(self.stages_path)))

    def embed(self, images: Tensor) -> Tensor:
        """The first map (n, c, h', w')."""
        return self.patch_embed(self.check_images(images).contiguous(memory_format=torch.channels_last))

    def forward_maps(self, x: Tensor, order: Orders = None, *, directions: Tensor | None = None) -> list[Tensor]:
        """The map at the end of each stage, from the first map on. The published order needs no directions."""
        if directions is None and order is not None:
            directions = self.scan_directions(order, x.shape[0])
        maps = []
        for stage in self.stages():
            x = stage(x, directions)
            maps.append(x)
            if stage.downsample is not None:
                x = stage.downsample(x)
        return maps

    def encode(self, images: Tensor, order: Orders = None, *, directions: Tensor | None = None) -> Tensor:
        """The last map (n, c, h, w)."""
        return self.forward_maps(self.embed(images), order, directions=directions)[-1]

    def pool(self, x: Tensor) -> Tensor:
        """The last map, normalized and averaged, (n, c)."""
        normal: Tensor = self.get_submodule(self.norm_path)(x)
        return normal.permute(0, 2, 3, 1).flatten(1, 2).mean(1)  # so that its gradient lies as the map does

    def last_stage(self) -> tuple[str, ...]:
        return f"{self.stages_path}.{len(self.stages()) - 1}.", f"{self.norm_path}.", f"{self.head_path}."


def drop_path_rates(rate: float, depths: Iterable[int]) -> list[list[float]]:
    """Rates of stochastic depth for each block of each stage, rising from 0 to `rate`."""
    depths = list(depths)
    rates = iter([rate * i / max(1, sum(depths) - 1) for i in range(sum(depths))])
    return [[next(rates) for _ in range(depth)] for depth in depths]


class Attention(nn.Module):
    """Multi-head attention among all pixels of a map, without positions; `names` of its two layers as published."""

    def __init__(self, dim: int, heads: int, names: tuple[str, str], *, bias: bool) -> None:
        super().__init__()
        self.heads, self.names = heads, names
        self.add_module(names[0], Linear2d(dim, 3 * dim, bias=bias))
        self.add_module(names[1], Linear2d(dim, dim))

    def forward(self, x: Tensor, directions: object) -> Tensor:
        """x (b, c, h, w)."""
        to_qkv, to_out = self.names
        b, c, height, width = x.shape
        tokens = getattr(self, to_qkv)(x).permute(0, 2, 3, 1).reshape(b, height * width, 3, self.heads, c // self.heads)
        y = F.scaled_dot_product_attention(*tokens.permute(2, 0, 3, 1, 4)).transpose(1, 2)
        y = y.reshape(b, height, width, c).permute(0, 3, 1, 2)
        return cast(Tensor, getattr(self, to_out)(y))


def add_branch(x: Tensor, branch: Tensor, drop_path: StochasticDepth, scale: Tensor | None = None) -> Tensor:
    """x plus a residual branch (b, c, h, w), scaled per channel, under stochastic depth."""
    if scale is not None:
        branch = branch * scale.view(-1, 1, 1)
    return x + drop_path(branch)
