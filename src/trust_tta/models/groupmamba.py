"""GroupMamba: in every block four groups of channels, each scanned in one direction.

Shaker et al., "GroupMamba: Efficient ChannelGroup-Based Visual State Space Model", CVPR 2025.
"""

from __future__ import annotations

import math
from operator import attrgetter
from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trust_tta.models.base import FOUR_DIRECTIONS, Orders, ScanNetwork
from trust_tta.models.config import GroupMambaConfig
from trust_tta.models.layers import StochasticDepth, initialize_linear, reset_steps
from trust_tta.models.sequences import DIRECTIONS, Route, scan_sequences, visit
from trust_tta.models.staged import drop_path_rates
from trust_tta.ops.map_sequences import read
from trust_tta.ops.tensors import Parameters

GROUPS = ("mamba_g1", "mamba_g2", "mamba_g3", "mamba_g4")
EPS = 1e-6  # of the norms around the blocks; the others have PyTorch's


class ChannelGroup(nn.Module):
    """The parameters of one group of channels; `GroupedScan` computes with those of all four at once."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        rank = math.ceil(dim / 16)
        self.in_proj = nn.Linear(dim, 2 * dim, bias=False)
        self.conv2d = nn.Conv2d(dim, dim, 3, padding=1, groups=dim)
        self.x_proj_weight = nn.Parameter(torch.empty(1, rank + 2, dim))
        self.dt_projs_weight = nn.Parameter(torch.empty(1, dim, rank))
        self.dt_projs_bias = nn.Parameter(torch.empty(1, dim))
        self.A_logs = nn.Parameter(torch.zeros(dim, 1))
        self.Ds = nn.Parameter(torch.ones(dim))
        self.out_norm = nn.LayerNorm(dim)
        self.out_proj = nn.Linear(dim, dim, bias=False)
        nn.init.kaiming_uniform_(self.x_proj_weight[0], a=math.sqrt(5))
        reset_steps(self.dt_projs_weight, self.dt_projs_bias)


class GroupedScan(nn.Module):
    """Normalize, scan four groups of channels separately, gate by the input and a channel attention, project."""

    backend: str = "auto"

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        for name in GROUPS:
            self.add_module(name, ChannelGroup(dim // 4))
        self.fc1 = nn.Linear(dim, dim // 16)
        self.fc2 = nn.Linear(dim // 16, dim)
        self.skip_scale = nn.Parameter(torch.ones(1))
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor, height: int, route: Route) -> Tensor:
        """x (b, l, dim), the tokens of a map with `height` rows."""
        x = self.norm(x)
        weights = torch.sigmoid(self.fc2(F.relu(self.fc1(x.mean(1, keepdim=True)))))
        return self.proj(self.norm(self.scan(x, height, route) * self.skip_scale * x * weights))

    def scan(self, x: Tensor, height: int, route: Route) -> Tensor:
        """Each quarter of the channels of x (b, l, dim) through its own group, (b, l, dim)."""
        in_proj, out_proj = (torch.stack(self.each(f"{name}.weight")) for name in ("in_proj", "out_proj"))
        groups = x.unflatten(2, (4, -1)).permute(0, 2, 3, 1)  # (b, 4, c, l)
        u, z = (in_proj @ groups).chunk(2, dim=2)
        parameters = Parameters(*(torch.cat(self.each(name)) for name in Parameters._fields))
        y = scan_sequences(read(F.silu(self.convolve(u, height)), route.visits), parameters, backend=self.backend)
        y = read(y, route.returns).transpose(2, 3)
        weight, bias = (torch.stack(self.each(f"out_norm.{name}")).unsqueeze(1) for name in ("weight", "bias"))
        y = (F.layer_norm(y, y.shape[-1:]) * weight + bias) * F.silu(z.transpose(2, 3))
        return (y @ out_proj.transpose(1, 2)).transpose(1, 2).flatten(2)

    def convolve(self, u: Tensor, height: int) -> Tensor:
        """A 3x3 convolution of each channel of u (b, 4, c, l) as a map."""
        weight, bias = (torch.cat(self.each(f"conv2d.{name}")) for name in ("weight", "bias"))
        maps = u.flatten(1, 2).unflatten(2, (height, -1))
        return F.conv2d(maps, weight, bias, padding=1, groups=len(weight)).view(u.shape)

    def each(self, name: str) -> list[Tensor]:
        """A weight of every group, looked up by name so that `functional_call` can replace it."""
        return [attrgetter(f"{group}.{name}")(self) for group in GROUPS]


class GroupMambaMlp(nn.Module):
    """Two linear layers with GELU between them; `convolving`: a 3x3 depthwise convolution before the GELU."""

    def __init__(self, dim: int, hidden: int, *, convolving: bool) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        conv = nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden) if convolving else None
        self.dwconv = None if conv is None else nn.ModuleDict({"dwconv": conv})  # the published name
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor, height: int) -> Tensor:
        x = self.fc1(x)
        if self.dwconv is not None:
            maps = x.transpose(1, 2).unflatten(2, (height, -1))
            x = self.dwconv["dwconv"](maps).flatten(2).transpose(1, 2)
        return self.fc2(F.gelu(x))


class GroupMambaBlock(nn.Module):
    """x + scan(x), then x + MLP(norm(x)); x (b, l, dim). `of_means`: for pooled tokens, with a norm after the scan."""

    def __init__(self, dim: int, mlp_ratio: float, drop_path: float = 0.0, *, of_means: bool = False) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=EPS) if of_means else None
        self.norm2 = nn.LayerNorm(dim, eps=EPS)
        self.attn = GroupedScan(dim)
        self.mlp = GroupMambaMlp(dim, int(dim * mlp_ratio), convolving=not of_means)
        self.drop_path = StochasticDepth(drop_path)

    def forward(self, x: Tensor, height: int, route: Route) -> Tensor:
        y = self.attn(x, height, route)
        x = x + self.drop_path(y if self.norm1 is None else self.norm1(y))
        return x + self.drop_path(self.mlp(self.norm2(x), height))


class GroupDownsample(nn.Module):
    """Halve a map by a convolution: tokens (b, l, dim), normalized, and their number of rows."""

    def __init__(self, channels: int, dim: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(channels, dim, 3, stride=2, padding=1)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        x = self.proj(x)
        tokens: Tensor = self.norm(x.flatten(2).transpose(1, 2))
        return tokens, x.shape[2]


class GroupMambaStem(GroupDownsample):
    """Three convolutions, the first of which halves the images, and a downsampling."""

    def __init__(self, channels: int, hidden: int, dim: int) -> None:
        super().__init__(hidden, dim)
        layers: list[nn.Module] = []
        for before, size, stride in ((channels, 7, 2), (hidden, 3, 1), (hidden, 3, 1)):
            conv = nn.Conv2d(before, hidden, size, stride=stride, padding=size // 2, bias=False)
            layers += [conv, nn.BatchNorm2d(hidden), nn.ReLU()]
        self.conv = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        return super().forward(self.conv(x))


class GroupMamba(ScanNetwork):
    """images (n, channels, h, w) -> logits (n, classes).

    A scan order says which direction each group scans: its channels and parameters stay together. In training mode as
    in evaluation, the logits are the mean of both heads where there are two.
    """

    orders = FOUR_DIRECTIONS
    mixer: ClassVar[str] = r"\.attn\.(mamba_g\d\.|(?=proj))"  # without the norm before the groups
    config: GroupMambaConfig

    def __init__(self, config: GroupMambaConfig) -> None:
        super().__init__(config)
        dims, rates = config.dims, drop_path_rates(config.drop_path, config.depths)
        for i, (dim, ratio) in enumerate(zip(dims, config.mlp_ratios, strict=True)):
            down = GroupDownsample(dims[i - 1], dim) if i else GroupMambaStem(config.in_channels, config.stem_dim, dim)
            self.add_module(f"patch_embed{i + 1}", down)
            self.add_module(f"block{i + 1}", nn.ModuleList(GroupMambaBlock(dim, ratio, rate) for rate in rates[i]))
            self.add_module(f"norm{i + 1}", nn.LayerNorm(dim, eps=EPS))
        self.post_network = nn.ModuleList([GroupMambaBlock(dims[-1], config.mlp_ratios[-1], of_means=True)])
        self.head = nn.Linear(dims[-1], config.num_classes)
        self.dist_head = nn.Linear(dims[-1], config.num_classes) if config.two_heads else None
        self.apply(initialize_linear)

    def encode(self, images: Tensor, order: Orders = None, *, directions: Tensor | None = None) -> Tensor:
        """The last map (n, dims[-1], h, w)."""
        x = self.check_images(images)
        if directions is None:
            directions = self.scan_directions(order, images.shape[0])
        for i in range(1, len(self.config.dims) + 1):
            x, height = self.get_submodule(f"patch_embed{i}")(x)
            route = Route.along(visit(DIRECTIONS, height, x.shape[1] // height, x.device)[directions], x.shape[1])
            for block in cast(nn.ModuleList, self.get_submodule(f"block{i}")):
                x = block(x, height, route)
            if i < len(self.config.dims):
                x = self.get_submodule(f"norm{i}")(x)
            x = x.transpose(1, 2).unflatten(2, (height, -1))
        return x

    def pool(self, x: Tensor) -> Tensor:
        """The mean over the last map's tokens, mixed and normalized, (n, dims[-1])."""
        x = x.flatten(2).transpose(1, 2).mean(1, keepdim=True)
        route = Route.along(visit(DIRECTIONS, 1, 1, x.device)[self.direction_table[0]], 1)  # one token has one order
        for block in self.post_network:
            x = block(x, 1, route)
        return self.get_submodule(f"norm{len(self.config.dims)}")(x).squeeze(1)

    def heads(self) -> list[nn.Linear]:
        return [self.head] if self.dist_head is None else [self.head, self.dist_head]

    def last_stage(self) -> tuple[str, ...]:
        i = len(self.config.dims)
        return f"block{i}.", f"norm{i}.", "post_network.", "head.", "dist_head."
