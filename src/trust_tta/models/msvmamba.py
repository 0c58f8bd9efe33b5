"""MSVMamba and MSVMambav3: a VMamba that scans one direction at full and three at half resolution.

Shi et al., "Multi-Scale VMamba: Hierarchy in Hierarchy Visual State Space Model", NeurIPS 2024.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from trust_tta.models.base import FOUR_DIRECTIONS
from trust_tta.models.config import MSVMambaConfig
from trust_tta.models.layers import LayerNorm2d, StochasticDepth
from trust_tta.models.sequences import Route, read, scan_sequences, visit
from trust_tta.models.ss2d import SS2D
from trust_tta.models.staged import add_branch
from trust_tta.models.vmamba import VMamba
from trust_tta.ops.tensors import Parameters

DIRECTIONS = ("h", "h_flip", "v", "v_flip")  # a, b, c, d: as published, the first at full resolution


class SqueezeExcite(nn.Module):
    """Weigh the channels of a map (b, c, h, w) by its mean."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.fc = nn.Sequential(
            nn.Linear(dim, dim // 8, bias=False), nn.ReLU(), nn.Linear(dim // 8, dim, bias=False), nn.Sigmoid()
        )

    def forward(self, x: Tensor) -> Tensor:
        return x * self.fc(x.mean((2, 3)))[:, :, None, None]


class MultiScaleSS2D(SS2D):
    """SS2D of two groups of parameters: one reads the map, the other three directions of a map of half its size.

    The three sequences are joined into one, so that the state runs on from each to the next.
    """

    def __init__(self, dim: int, config: MSVMambaConfig) -> None:
        super().__init__(dim, config, groups=2)
        inner = int(config.ssm_ratio * dim)
        self.first_generation = config.first_generation
        self.full, self.low = (1, 0) if config.first_generation else (0, 1)  # the groups of parameters
        self.conv2d_b1 = nn.Conv2d(inner, inner, 7, stride=2, padding=3, groups=inner)
        self.se = SqueezeExcite(inner)

    def forward(self, x: Tensor, directions: Tensor, residual: Tensor | None = None) -> Tensor:
        """x (b, dim, h, w); `directions` (4,) or (b, 4): of the full map and of the three parts of the small one."""
        u = self.in_proj(x)
        if self.gate:
            u, z = u.chunk(2, dim=1)
        full = self.scan_joined(F.silu(self.conv2d(u)), directions[..., :1], self.full)
        low = self.scan_joined(F.silu(self.conv2d_b1(u)), directions[..., 1:], self.low)
        if self.first_generation:
            y = full + F.interpolate(low, x.shape[2:], mode="bilinear", align_corners=False)
        else:
            y = self.out_norm(full + F.interpolate(low, x.shape[2:], mode="nearest"))
        y = self.se(y)
        return self.out_proj(y * F.silu(z) if self.gate else y, residual)

    def scan_joined(self, x: Tensor, directions: Tensor, group: int) -> Tensor:
        """Scan x (b, c, h, w) along k directions (k,) or (b, k), joined to one sequence; the sum of its parts."""
        b, c, height, width = x.shape
        parts = directions.shape[-1]
        route = Route.along(visit(DIRECTIONS, height, width, x.device)[directions], height * width)
        u = read(x.flatten(2).unsqueeze(1).expand(-1, parts, -1, -1), route.visits)
        u = u.transpose(1, 2).flatten(2).unsqueeze(1)  # (b, 1, c, k * l)
        parameters = Parameters(
            self.x_proj_weight[group : group + 1],
            self.dt_projs_weight[group : group + 1],
            self.dt_projs_bias[group : group + 1],
            self.A_logs.chunk(2)[group],
            self.Ds.chunk(2)[group],
        )
        y = scan_sequences(u, parameters, backend=self.backend).squeeze(1).unflatten(2, (parts, -1))
        if self.first_generation:  # normalizes every step of each part
            y = self.out_norm(y)
        return read(y.transpose(1, 2), route.returns).sum(1).view(b, c, height, width)


class ConvFFN(nn.Module):
    """Two 1x1 convolutions, between them a depthwise one with a shortcut, then GELU."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.linear1 = nn.Conv2d(dim, hidden, 1)
        self.linear2 = nn.Conv2d(hidden, dim, 1)
        self.dwc = nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear1(x)
        return self.linear2(F.gelu(y + self.dwc(y)))


class MSVMambaBlock(nn.Module):
    """x + op(norm(x)), then x + FFN(norm(x)), or x + norm(FFN(x)) from the third generation on."""

    def __init__(self, dim: int, config: MSVMambaConfig, drop_path: float) -> None:
        super().__init__()
        self.norm_first = config.first_generation
        self.norm = LayerNorm2d(dim)
        self.op = MultiScaleSS2D(dim, config)
        self.convFFN = ConvFFN(dim, int(dim * config.ffn_ratio))
        self.norm2 = LayerNorm2d(dim)
        self.drop_path = StochasticDepth(drop_path)

    def forward(self, x: Tensor, directions: Tensor) -> Tensor:
        x = add_branch(x, self.op(self.norm(x), directions), self.drop_path)
        ffn = self.convFFN(self.norm2(x)) if self.norm_first else self.norm2(self.convFFN(x))
        return add_branch(x, ffn, self.drop_path)


class MSVMamba(VMamba):
    """Maps images (n, channels, h, w) to logits (n, classes).

    A scan order permutes the published directions among the full map and the three parts of the small one.
    """

    orders = FOUR_DIRECTIONS
    config: MSVMambaConfig

    def make_block(self, dim: int, block: int, drop_path: float) -> nn.Module:
        del block
        return MSVMambaBlock(dim, self.config, drop_path)
