"""MSVMamba and MSVMambav3: a VMamba that scans one direction at full and three at half resolution.

Shi et al., "Multi-Scale VMamba: Hierarchy in Hierarchy Visual State Space Model", NeurIPS 2024.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from trust_tta.models.base import FOUR_DIRECTIONS
from trust_tta.models.config import MSVMambaConfig
from trust_tta.models.layers import LayerNorm2d, PointwiseConv2d, StochasticDepth
from trust_tta.models.sequences import Route, scan_sequences, visit
from trust_tta.models.ss2d import SS2D
from trust_tta.models.staged import Stage
from trust_tta.models.vmamba import VMamba
from trust_tta.ops.batch_norm import norm_with_residual
from trust_tta.ops.convolution import DepthwiseConv2d
from trust_tta.ops.map_sequences import Paths, merge_map, read_map
from trust_tta.ops.tensors import Parameters

DIRECTIONS = ("h", "h_flip", "v", "v_flip")  # a, b, c, d: as published, the first at full resolution


class SqueezeExcite(nn.Module):
    """Squeeze-and-excitation of a map (b, c, h, w)."""

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

    def forward(self, x: Tensor, directions: tuple[Paths, Paths], residual: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """x (b, dim, h, w); `directions` through maps of full and half size; plus `residual` (b, dim, h, w)."""
        u = self.in_proj(x)
        if self.gate:
            u, z = u.chunk(2, dim=1)
        full = self.scan_joined(self.conv2d(u), directions[0], self.full)
        small, (height, width), backend = self.conv2d_b1(u), x.shape[2:], self.backend
        low = self.scan_joined(small, directions[1], self.low)
        low = merge_map(low, directions[1], small.shape[2], small.shape[3], backend=backend)
        if self.first_generation:
            y = merge_map(full, directions[0], height, width, backend=backend)
            y = y + F.interpolate(low, (height, width), mode="bilinear", align_corners=False)
        else:
            y = self.out_norm(merge_map(full, directions[0], height, width, half=low, backend=backend))
        y = self.se(y)
        return self.out_proj(y * F.silu(z) if self.gate else y, residual)

    def scan_joined(self, x: Tensor, paths: Paths, group: int) -> Tensor:
        """Scan SiLU(x), x (b, c, h, w), along one path: (b, 1, c, l)."""
        parameters = Parameters(
            self.x_proj_weight[group : group + 1],
            self.dt_projs_weight[group : group + 1],
            self.dt_projs_bias[group : group + 1],
            self.A_logs.chunk(2)[group],
            self.Ds.chunk(2)[group],
        )
        u = read_map(x, paths, silu=True, backend=self.backend)
        y = scan_sequences(u, parameters, backend=self.backend)
        if self.first_generation:  # normalizes every step
            y = self.out_norm(y.transpose(1, 2)).transpose(1, 2)
        return y


class ConvFFN(nn.Module):
    """Two 1x1 convolutions; between them, a depthwise one with a shortcut, then GELU."""

    backend: str = "auto"

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.linear1 = PointwiseConv2d(dim, hidden)
        self.linear2 = PointwiseConv2d(hidden, dim)
        self.dwc = DepthwiseConv2d(hidden, 3, bias=True)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """The output (b, dim, h, w), plus `residual`."""
        return self.linear2(self.dwc.with_shortcut_and_gelu(self.linear1(x), self.backend), residual)


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

    def forward(self, x: Tensor, directions: tuple[Paths, Paths]) -> Tensor:
        x, normal = norm_with_residual(self.norm, x)
        if self.drop_path.drops:
            x = x + self.drop_path(self.op(normal, directions))
            ffn = self.convFFN(self.norm2(x)) if self.norm_first else self.norm2(self.convFFN(x))
            return x + self.drop_path(ffn)
        x = self.op(normal, directions, x)
        if not self.norm_first:
            return self.norm2(self.convFFN(x), x)
        x, normal = norm_with_residual(self.norm2, x)
        return self.convFFN(normal, x)


class MultiScaleStage(Stage):
    """Blocks that scan a map along one direction, and a map of half its size along the other three, joined."""

    def paths(self, x: Tensor, directions: Tensor) -> tuple[Paths, Paths]:  # type: ignore[override]
        """Paths through the full and the small map in `directions`, (4,) or (b, 4)."""
        found = []
        for part, divisor in ((directions[..., :1], 1), (directions[..., 1:], 2)):
            height, width = ((size + divisor - 1) // divisor for size in x.shape[2:])
            visits = visit(DIRECTIONS, height, width, x.device)[part]
            found.append(Route.along(visits, height * width).paths(joined=True))
        return found[0], found[1]


class MSVMamba(VMamba):
    """Maps images (n, channels, h, w) to logits (n, classes).

    A scan order permutes the published directions among the full map and the three parts of the small one.
    """

    orders = FOUR_DIRECTIONS
    stage_class = MultiScaleStage
    config: MSVMambaConfig

    def make_block(self, dim: int, index: int, drop_path: float) -> nn.Module:
        return MSVMambaBlock(dim, self.config, drop_path)
