"""LocalVMamba: a VMamba whose blocks scan in four directions of their own, some of them by windows.

Huang et al., "LocalMamba: Visual State Space Model with Windowed Selective Scan", 2024.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trust_tta.models.base import FOUR_DIRECTIONS
from trust_tta.models.config import LocalVMambaConfig
from trust_tta.models.layers import LayerNorm2d
from trust_tta.models.sequences import Route, scan_sequences, visit
from trust_tta.models.ss2d import SS2D
from trust_tta.models.vmamba import Block, VMamba
from trust_tta.ops.map_sequences import read, read_map


class ChannelAttention(nn.Module):
    """Weight the channels of sequences (.., c, l) by the mean of their normalized tokens."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = LayerNorm2d(dim)
        self.global_reduce = nn.Linear(dim, dim // 8)
        self.channel_select = nn.Linear(dim // 8, dim)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -3).unsqueeze(-1)  # maps of one column
        mean = self.norm(tokens).mean((2, 3)).view(x.shape[:-1])
        weights: Tensor = torch.sigmoid(self.channel_select(F.gelu(self.global_reduce(mean))))
        return x * weights.unsqueeze(-1)


class LocalSS2D(SS2D):
    """SS2D along four directions of `sequences`, each weighted by one channel attention before they are summed."""

    def __init__(self, dim: int, config: LocalVMambaConfig, names: tuple[str, ...]) -> None:
        super().__init__(dim, config)
        self.direction_names = names
        self.multi_scan = nn.ModuleDict({"attn": ChannelAttention(int(config.ssm_ratio * dim))})  # the published name

    def scan(self, x: Tensor, directions: Tensor) -> Tensor:
        """Scan SiLU(x), x (b, c, h, w); group k reads the direction `direction_names[directions[k]]`."""
        b, c, height, width = x.shape
        route = self.route(height, width, directions)
        sequences = read_map(x, route.paths(), silu=True, backend=self.backend)
        y = scan_sequences(sequences, self.scan_parameters(), backend=self.backend)
        y = self.multi_scan["attn"](read(y, route.returns)).sum(1)
        return self.out_norm(y.view(b, c, height, width))

    def route(self, height: int, width: int, directions: Tensor) -> Route:
        """The sequence of each group."""
        return Route.along(visit(self.direction_names, height, width, directions.device)[directions], height * width)


class LocalVMamba(VMamba):
    """images (n, channels, h, w) -> logits (n, classes).

    A scan order permutes the four directions of every block among its groups of parameters.
    """

    orders = FOUR_DIRECTIONS
    config: LocalVMambaConfig

    def make_block(self, dim: int, index: int, drop_path: float) -> nn.Module:
        return Block(dim, self.config, LocalSS2D(dim, self.config, self.config.directions[index]), drop_path)
