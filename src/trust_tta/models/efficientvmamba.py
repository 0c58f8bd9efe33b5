"""EfficientVMamba: early stages scan four interleaved quarters of the map and convolve, late ones only convolve.

Pei et al., "EfficientVMamba: Atrous Selective Scan for Light Weight Visual Mamba", AAAI 2025.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trust_tta.models.base import FOUR_DIRECTIONS
from trust_tta.models.config import EfficientVMambaConfig
from trust_tta.models.layers import LayerNorm2d, PointwiseConv2d, StochasticDepth, make_downsample
from trust_tta.models.localvmamba import ChannelAttention
from trust_tta.models.sequences import Route, scan_sequences
from trust_tta.models.ss2d import SS2D
from trust_tta.models.staged import Stage, add_branch
from trust_tta.models.vmamba import VMamba
from trust_tta.ops.batch_norm import BatchNorm2d, norm_with_residual
from trust_tta.ops.convolution import DepthwiseConv2d
from trust_tta.ops.map_sequences import Paths, merge_map, read_map

SCANNED_STAGES = 2


class AtrousSS2D(SS2D):
    """SS2D whose groups scan a quarter of the pixels each: every second pixel of every second row."""

    def scan(self, x: Tensor, directions: Paths) -> Tensor:  # type: ignore[override]
        """Scan SiLU(x), x (b, c, h, w), along the quarters in `directions`, (4, l) or (b, 4, l)."""
        sequences = read_map(x, directions, silu=True, backend=self.backend)
        y = scan_sequences(sequences, self.scan_parameters(), backend=self.backend)
        return self.out_norm(merge_map(y, directions, x.shape[2], x.shape[3], backend=self.backend))


class AtrousStage(Stage):
    """Blocks that read the quarters of a map; group k of the parameters reads the quarter directions[k]."""

    def paths(self, x: Tensor, directions: Tensor | None) -> Paths:
        """Paths through the quarters in `directions`, (4,) or (b, 4)."""
        height, width = x.shape[2:]
        tokens = torch.arange(height * width, device=x.device).view(height, width)
        padded = F.pad(tokens, (0, width % 2, 0, height % 2), value=height * width)  # zeros stay in the sequences
        quarters = padded.flatten()[visit_quarters(padded.shape[0], padded.shape[1], x.device)[directions]]
        return Paths(quarters, Route.along(quarters.flatten(-2).unsqueeze(-2), height * width).returns)


def visit_quarters(height: int, width: int, device: torch.device) -> Tensor:
    """Pixels of the quarters a to d of an even map in the order in which they are read, (4, height * width / 4).

    a: even rows, even columns, by rows; b: odd rows, even columns, by columns; c: even rows, odd columns, by rows; d:
    odd rows, odd columns, by columns.
    """
    pixels = torch.arange(height * width, device=device).view(height, width)
    a, b, c, d = (pixels[row::2, column::2] for column in (0, 1) for row in (0, 1))
    return torch.stack((a.flatten(), b.t().flatten(), c.flatten(), d.t().flatten()))


class EfficientBlock(nn.Module):
    """x plus a scan and a convolution of norm(x), both weighted by one channel attention."""

    def __init__(self, dim: int, op: SS2D, drop_path: float) -> None:
        super().__init__()
        self.norm = LayerNorm2d(dim)
        self.op = op
        self.conv_branch = nn.Sequential(
            DepthwiseConv2d(dim, 3, bias=True), BatchNorm2d(dim), nn.GELU(), PointwiseConv2d(dim, dim)
        )
        self.se = ChannelAttention(dim)
        self.drop_path = StochasticDepth(drop_path)

    def forward(self, x: Tensor, directions: Paths) -> Tensor:
        x, normal = norm_with_residual(self.norm, x)
        branches = (self.op(normal, directions), self.conv_branch(normal))
        weighted = [self.se(branch.flatten(2)).view(x.shape) for branch in branches]
        return add_branch(x, weighted[0] + weighted[1], self.drop_path)


class PixelSqueezeExcite(nn.Module):
    """Squeeze-and-excitation of a map by 1x1 convolutions."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.conv_reduce = nn.Conv2d(dim, dim // 8, 1)
        self.conv_expand = nn.Conv2d(dim // 8, dim, 1)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.conv_expand(F.relu(self.conv_reduce(x.mean((2, 3), keepdim=True))))
        return x * torch.sigmoid(weights)


class InvertedResidual(nn.Module):
    """x plus 1x1 expansion, depthwise convolution, squeeze-and-excitation and 1x1 projection."""

    def __init__(self, dim: int, drop_path: float) -> None:
        super().__init__()
        wide = 4 * dim
        self.conv_pw = nn.Sequential(PointwiseConv2d(dim, wide, bias=False), BatchNorm2d(wide), nn.ReLU())
        self.conv_dw = nn.Sequential(DepthwiseConv2d(wide, 3, bias=False), BatchNorm2d(wide), nn.ReLU())
        self.se = PixelSqueezeExcite(wide)
        self.conv_pw2 = nn.Sequential(PointwiseConv2d(wide, dim, bias=False), BatchNorm2d(dim))
        self.drop_path = StochasticDepth(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        return add_branch(x, self.conv_pw2(self.se(self.conv_dw(self.conv_pw(x)))), self.drop_path)


class ConvStage(nn.Sequential):
    """Inverted residuals under the published names: 1 to depth, then an unused place, then the downsampling."""

    def __init__(self, blocks: Iterable[nn.Module], downsample: nn.Module) -> None:
        super().__init__(nn.Identity(), *blocks, nn.Identity(), downsample)

    @property
    def downsample(self) -> nn.Module:
        return self[-1]

    def forward(self, x: Tensor, directions: Tensor) -> Tensor:  # type: ignore[override]
        for block in list(self)[:-1]:
            x = block(x)
        return x


class EfficientVMamba(VMamba):
    """Maps images (n, channels, h, w) to logits (n, classes).

    A scan order permutes the four quarters of the map, with their reading directions, among the groups of parameters.
    """

    orders = FOUR_DIRECTIONS
    stage_class = AtrousStage
    config: EfficientVMambaConfig

    def make_stage(self, i: int, rates: list[float]) -> nn.Module:
        if i < SCANNED_STAGES:
            return super().make_stage(i, rates)
        downsample = make_downsample(self.config, i)
        return ConvStage([InvertedResidual(self.config.dims[i], rate) for rate in rates], downsample)

    def make_block(self, dim: int, index: int, drop_path: float) -> nn.Module:
        return EfficientBlock(dim, AtrousSS2D(dim, self.config), drop_path)
