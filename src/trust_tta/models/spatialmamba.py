"""Spatial-Mamba: one scan by rows, whose states are fused with those of their neighbors by dilated convolutions.

Xiao et al., "Spatial-Mamba: Effective Visual State Space Models via Structure-Aware State Fusion", ICLR 2025. The
stem, the blocks' frame and the downsampling are also VSSD's.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trust_tta.models.config import SpatialMambaConfig
from trust_tta.models.layers import LayerNorm2d, Linear2d, Mlp, StochasticDepth, initialize_linear, reset_steps
from trust_tta.models.sequences import DIRECTIONS, Route, at_least_float32, visit
from trust_tta.models.staged import Stage, StagedNetwork, add_branch
from trust_tta.ops.batch_norm import BatchNorm2d, norm_with_residual
from trust_tta.ops.convolution import DepthwiseConv2d
from trust_tta.ops.functional import grouped_scan
from trust_tta.ops.map_sequences import read

DILATIONS = {"kernel_3": 1, "kernel_3_1": 3, "kernel_3_2": 5}


def conv_layer(conv: nn.Conv2d, *, norm: bool, relu: bool) -> nn.Sequential:
    """A convolution with an optional BatchNorm and ReLU, under the published names."""
    layers: dict[str, nn.Module] = {"conv": conv}
    layers |= {"norm": BatchNorm2d(conv.out_channels)} if norm else {}
    layers |= {"relu": nn.ReLU()} if relu else {}
    return nn.Sequential(OrderedDict(layers))


def _conv3(inputs: int, outputs: int, stride: int = 1, *, relu: bool = True) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
    return conv_layer(conv, norm=True, relu=relu)


class ResidualStem(nn.Module):
    """Images to the first map at a quarter of their size."""

    def __init__(self, channels: int, dim: int) -> None:
        super().__init__()
        half = dim // 2
        self.conv1 = _conv3(channels, half, 2)
        self.conv2 = nn.Sequential(_conv3(half, half), _conv3(half, half, relu=False))
        last = conv_layer(nn.Conv2d(4 * dim, dim, 1, bias=False), norm=True, relu=False)
        self.conv3 = nn.Sequential(_conv3(half, 4 * dim, 2), last)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(x)
        return self.conv3(x + self.conv2(x))


class PositionedBlock(nn.Module):
    """Pre-norm mixer and MLP, each after a depthwise convolution that encodes positions."""

    def __init__(self, dim: int, mixer: nn.Module, names: Sequence[str], *, mlp_ratio: float, drop_path: float) -> None:
        super().__init__()
        self.names = tuple(names)  # of the first norm, the mixer and the second norm
        self.cpe1 = nn.Conv2d(dim, dim, 3, padding=1, groups=dim)
        self.add_module(names[0], LayerNorm2d(dim))
        self.add_module(names[1], mixer)
        self.cpe2 = nn.Conv2d(dim, dim, 3, padding=1, groups=dim)
        self.add_module(names[2], LayerNorm2d(dim))
        self.mlp = Mlp(dim, int(dim * mlp_ratio))
        self.drop_path = StochasticDepth(drop_path)

    def forward(self, x: Tensor, directions: Tensor | None) -> Tensor:
        norm1, mixer, norm2 = (self.get_submodule(name) for name in self.names)
        x = x + self.cpe1(x)
        x, normal = norm_with_residual(norm1, x)
        x = add_branch(x, mixer(normal, directions), self.drop_path)
        x, normal = norm_with_residual(norm2, x + self.cpe2(x))
        return add_branch(x, self.mlp(normal), self.drop_path)


class StateFusion(nn.Module):
    """The weighted sum of three dilated depthwise convolutions of a map with replicated borders."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        for name in DILATIONS:
            kernel = nn.Parameter(torch.empty(dim, 1, 3, 3))
            nn.init.kaiming_uniform_(kernel, a=math.sqrt(5))
            self.register_parameter(name, kernel)
        self.alpha = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        """x (b, c, h, w); the kernels are combined in every pass, so that they can be adapted."""
        widest, (height, width) = max(DILATIONS.values()), x.shape[2:]
        padded = F.pad(x, (widest,) * 4, mode="replicate")
        y = torch.zeros_like(x)
        for i, (name, dilation) in enumerate(DILATIONS.items()):
            cut = widest - dilation
            part = padded[:, :, cut : cut + height + 2 * dilation, cut : cut + width + 2 * dilation]
            kernel = self.alpha[i] * getattr(self, name)
            y = y + F.conv2d(part, kernel, dilation=dilation, groups=x.shape[1])
        return y


class StateFusionSSM(nn.Module):
    """Project, convolve, scan once, fuse the states of neighbors, read them out, normalize, gate, project back."""

    backend: str = "auto"

    def __init__(self, dim: int) -> None:
        super().__init__()
        inner, rank = 2 * dim, math.ceil(dim / 16)
        self.x_proj_weight = nn.Parameter(torch.empty(rank + 2, inner))
        self.dt_projs_weight = nn.Parameter(torch.empty(inner, rank))
        self.dt_projs_bias = nn.Parameter(torch.empty(inner))
        self.A_logs = nn.Parameter(torch.zeros(inner, 1))
        self.Ds = nn.Parameter(torch.ones(inner))
        self.in_proj = Linear2d(dim, 2 * inner, bias=False)
        self.conv2d = DepthwiseConv2d(inner, 3, bias=True)
        self.state_fusion = StateFusion(inner)
        self.out_norm = LayerNorm2d(inner)
        self.out_proj = Linear2d(inner, dim, bias=False)
        nn.init.kaiming_uniform_(self.x_proj_weight, a=math.sqrt(5))
        reset_steps(self.dt_projs_weight, self.dt_projs_bias)

    def forward(self, x: Tensor, directions: Tensor | None) -> Tensor:
        """x (b, dim, h, w); `directions` (1,) or (b, 1), None for the rows."""
        u, z = self.in_proj(x).chunk(2, dim=1)
        u = F.silu(self.conv2d(u))
        b, c, height, width = u.shape
        tokens = u.flatten(2)
        low, B, C = (self.x_proj_weight.to(u.dtype) @ tokens).split((self.dt_projs_weight.shape[1], 1, 1), dim=1)
        sequences = torch.cat((tokens, self.dt_projs_weight.to(u.dtype) @ low, B), dim=1).unsqueeze(1)
        if directions is None:
            states = self.scan(sequences, c)
        else:
            route = Route.along(visit(DIRECTIONS, height, width, x.device)[directions], height * width)
            states = read(self.scan(read(sequences, route.visits), c), route.returns)
        fused = self.state_fusion(states.reshape(b, c, height, width))
        y = C.view(b, 1, height, width) * fused + self.Ds.view(-1, 1, 1).to(u.dtype) * u
        return self.out_proj(self.out_norm(y) * F.silu(z))

    def scan(self, sequences: Tensor, channels: int) -> Tensor:
        """States (b, 1, c, l) of the inputs, the steps and B, (b, 1, 2c + 1, l)."""
        u, delta, B = sequences.split((channels, channels, 1), dim=2)
        A = -torch.exp(at_least_float32(self.A_logs))[None, None]
        bias = at_least_float32(self.dt_projs_bias)[None, None]
        B, delta = B.unsqueeze(2), delta.unsqueeze(2)
        return grouped_scan(u, delta, A, B, torch.ones_like(B), None, bias, backend=self.backend)


class SpatialMamba(StagedNetwork):
    """Maps images (n, channels, h, w) to logits (n, classes).

    There is one group of parameters; a scan order changes the path of the recurrence in all blocks.
    """

    orders: ClassVar[Mapping[str, Sequence[int]]] = {
        "h": (0,),
        "scan_v": (1,),
        "scan_h_flip": (2,),
        "scan_v_flip": (3,),
    }
    mixer: ClassVar[str] = r"\.self_attention\."
    part_names: ClassVar[tuple[str, str, str]] = ("ln_1", "self_attention", "ln_2")
    config: SpatialMambaConfig

    def __init__(self, config: SpatialMambaConfig) -> None:
        super().__init__(config, ResidualStem(config.in_channels, config.dims[0]))
        self.norm = LayerNorm2d(config.dims[-1])
        self.head = nn.Linear(config.dims[-1], config.num_classes)
        self.apply(initialize_linear)

    def make_stage(self, i: int, rates: list[float]) -> Stage:
        dim, names, ratio = self.config.dims[i], self.part_names, self.config.mlp_ratio
        blocks = [PositionedBlock(dim, self.make_mixer(i), names, mlp_ratio=ratio, drop_path=rate) for rate in rates]
        if i + 1 == len(self.config.dims):
            return Stage(blocks, None)
        wide = 8 * dim
        convs = nn.Sequential(
            conv_layer(nn.Conv2d(dim, wide, 1), norm=False, relu=True),
            conv_layer(nn.Conv2d(wide, wide, 3, stride=2, padding=1, groups=wide), norm=False, relu=True),
            conv_layer(nn.Conv2d(wide, 2 * dim, 1), norm=True, relu=False),
        )
        return Stage(blocks, nn.Sequential(OrderedDict(conv=convs)))

    def make_mixer(self, stage: int) -> nn.Module:
        return StateFusionSSM(self.config.dims[stage])
