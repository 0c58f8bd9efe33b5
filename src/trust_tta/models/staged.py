"""Networks of a stem, stages of falling resolution, a norm, pooling and a head."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from trust_tta.models.base import Orders, ScanNetwork
from trust_tta.models.layers import StochasticDepth
from trust_tta.models.parameter_roles import Kind, Role
from trust_tta.ops.tensors import Parameters


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

    The class attributes are the names that the published files use, and the last names of the parameters of the scan.
    """

    stages_path: ClassVar[str] = "layers"
    norm_path: ClassVar[str] = "norm"
    mixer_names: ClassVar[tuple[str, ...]] = (".op.",)
    scan_names: ClassVar[tuple[str, ...]] = Parameters._fields
    patch_embed: nn.Module

    def stages(self) -> list[Any]:
        """The stages in turn, each with a `downsample`."""
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

    def parameter_roles(self) -> dict[str, Role]:
        """The role of every parameter, by name; norms inside a mixer count as `other`, as in the paper."""
        last_names = (f"{self.stages_path}.{len(self.stages()) - 1}.", f"{self.norm_path}.", f"{self.head_path}.")
        return {name: Role(self._kind(name), name.startswith(last_names)) for name, _ in self.named_parameters()}

    def _kind(self, name: str) -> Kind:
        module = self.get_submodule(name.rpartition(".")[0])
        is_norm = isinstance(module, _BatchNorm | nn.LayerNorm)  # SyncBatchNorm, too
        mixer = next((part for part in self.mixer_names if part in name), None)
        if mixer is None:
            return "norm" if is_norm else "other"
        inside = name.partition(mixer)[2].split(".")
        if inside[0] in self.scan_names:
            return "scan"
        return "projection" if inside[0] in ("in_proj", "out_proj") or inside[0].startswith("conv") else "other"


def drop_path_rates(rate: float, depths: Iterable[int]) -> list[list[float]]:
    """Rates of stochastic depth for each block of each stage, rising from 0 to `rate`."""
    depths = list(depths)
    rates = iter([rate * i / max(1, sum(depths) - 1) for i in range(sum(depths))])
    return [[next(rates) for _ in range(depth)] for depth in depths]


def attend(qkv: Tensor, heads: int) -> Tensor:
    """Multi-head attention among the pixels of a map (b, 3c, h, w) of queries, keys and values: (b, c, h, w)."""
    b, channels, height, width = qkv.shape
    tokens = qkv.permute(0, 2, 3, 1).reshape(b, height * width, 3, heads, channels // 3 // heads)
    q, k, v = tokens.permute(2, 0, 3, 1, 4)
    y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
    return y.reshape(b, height, width, channels // 3).permute(0, 3, 1, 2)


def add_branch(x: Tensor, branch: Tensor, drop_path: StochasticDepth, scale: Tensor | None = None) -> Tensor:
    """x plus a residual branch (b, c, h, w), scaled per channel, under stochastic depth."""
    if scale is not None:
        branch = branch * scale.view(-1, 1, 1)
    return x + drop_path(branch)
