"""MambaVision: convolutional stages, then windows of tokens with Mamba mixers followed by attention.

Hatamizadeh and Kautz, "MambaVision: A Hybrid Mamba-Transformer Vision Backbone", CVPR 2025.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trust_tta.models.config import MambaVisionConfig
from trust_tta.models.layers import LayerNorm2d, Linear2d, Mlp, StochasticDepth, initialize_linear
from trust_tta.models.sequences import DIRECTIONS, Route, scan_sequences, visit
from trust_tta.models.staged import Attention, Stage, StagedNetwork, add_branch
from trust_tta.ops.batch_norm import BatchNorm2d, norm_with_residual
from trust_tta.ops.map_sequences import read
from trust_tta.ops.tensors import Parameters

# The directions of the convolutions and of the recurrence inside a window. "scan_" changes that of the recurrence
# alone; "mixer_" that of both.
SCAN_ORDERS = {
    "h": (0, 0),
    "scan_v": (0, 1),
    "scan_h_flip": (0, 2),
    "scan_v_flip": (0, 3),
    "mixer_v": (1, 1),
    "mixer_h_flip": (2, 2),
    "mixer_v_flip": (3, 3),
}
STATES = 8
STEM_EPS = 1e-4


class MambaMixer(nn.Module):
    """Project, convolve along the tokens, scan one half of the channels, join both halves, project back."""

    backend: str = "auto"

    def __init__(self, dim: int) -> None:
        super().__init__()
        inner, rank = dim // 2, math.ceil(dim / 16)
        self.A_log = nn.Parameter(torch.log(torch.arange(1.0, STATES + 1)).repeat(inner, 1))
        self.D = nn.Parameter(torch.ones(inner))
        self.in_proj = Linear2d(dim, dim, bias=False)
        self.x_proj = nn.Linear(inner, rank + 2 * STATES, bias=False)
        self.dt_proj = nn.Linear(rank, inner)
        self.out_proj = Linear2d(dim, dim, bias=False)
        self.conv1d_x = nn.Conv1d(inner, inner, 3, padding=1, groups=inner, bias=False)
        self.conv1d_z = nn.Conv1d(inner, inner, 3, padding=1, groups=inner, bias=False)

    def forward(self, x: Tensor, routes: tuple[Route, Route] | None) -> Tensor:
        """Windows x (b, dim, h, w); `routes` of the convolutions and of the recurrence, None for row-major ones."""
        b, dim, height, width = x.shape
        tokens, (convolutions, recurrence) = self.in_proj(x).flatten(2), routes or (None, None)
        weight = torch.cat((self.conv1d_x.weight, self.conv1d_z.weight))
        tokens = tokens if convolutions is None else _read(tokens, convolutions.visits)
        tokens = F.silu(F.conv1d(tokens, weight, padding=1, groups=dim))
        tokens = tokens if convolutions is None else _read(tokens, convolutions.returns)
        u, z = tokens.chunk(2, dim=1)
        u = u if recurrence is None else _read(u, recurrence.visits)
        parameters = Parameters(
            self.x_proj.weight[None],
            self.dt_proj.weight[None],
            2 * self.dt_proj.bias[None],  # published networks are trained with the bias added twice
            self.A_log,
            self.D,
        )
        y = scan_sequences(u.unsqueeze(1), parameters, backend=self.backend).squeeze(1)
        y = y if recurrence is None else _read(y, recurrence.returns)
        return self.out_proj(torch.cat((y, z), dim=1).view(b, dim, height, width))


def _read(x: Tensor, steps: Tensor) -> Tensor:
    """x (b, c, l) at `steps` (1, l) or (b, 1, l)."""
    return read(x.unsqueeze(1), steps).squeeze(1)


class WindowBlock(nn.Module):
    """x + mixer(norm(x)), then x + MLP(norm(x)), each branch with an optional scale per channel."""

    def __init__(self, dim: int, mixer: nn.Module, config: MambaVisionConfig, drop_path: float) -> None:
        super().__init__()
        self.norm1 = LayerNorm2d(dim)
        self.mixer = mixer
        self.drop_path = StochasticDepth(drop_path)
        self.norm2 = LayerNorm2d(dim)
        self.mlp = Mlp(dim, int(dim * config.mlp_ratio))
        self.gamma_1 = _layer_scale(config.layer_scale, dim)
        self.gamma_2 = _layer_scale(config.layer_scale, dim)

    def forward(self, x: Tensor, routes: tuple[Route, Route] | None) -> Tensor:
        x, normal = norm_with_residual(self.norm1, x)
        x = add_branch(x, self.mixer(normal, routes), self.drop_path, self.gamma_1)
        x, normal = norm_with_residual(self.norm2, x)
        if self.gamma_2 is None and not self.drop_path.drops:
            return self.mlp(normal, x)
        return add_branch(x, self.mlp(normal), self.drop_path, self.gamma_2)


class ConvBlock(nn.Module):
    """x + norm(conv(GELU(norm(conv(x)))))."""

    def __init__(self, dim: int, layer_scale: float | None, drop_path: float) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(dim, dim, 3, padding=1)
        self.norm1 = BatchNorm2d(dim)
        self.conv2 = nn.Conv2d(dim, dim, 3, padding=1)
        self.norm2 = BatchNorm2d(dim)
        self.gamma = _layer_scale(layer_scale, dim)
        self.drop_path = StochasticDepth(drop_path)

    def forward(self, x: Tensor, directions: Tensor | None) -> Tensor:
        y = F.gelu(self.norm1(self.conv1(x)), approximate="tanh")
        return add_branch(x, self.norm2(self.conv2(y)), self.drop_path, self.gamma)


def _layer_scale(value: float | None, dim: int) -> nn.Parameter | None:
    return None if value is None else nn.Parameter(torch.full((dim,), value))


class WindowStage(Stage):
    """Blocks on windows of the map. Zero padding on the right and below takes part in every block."""

    def __init__(self, blocks: list[WindowBlock], downsample: nn.Module | None, window: int) -> None:
        super().__init__(blocks, downsample)
        self.window = window

    def forward(self, x: Tensor, directions: Tensor | None) -> Tensor:
        """x (b, c, h, w); `directions` (2,) or (b, 2), None for row-major windows."""
        b, c, height, width = x.shape
        size = self.window
        rows, columns = (height + size - 1) // size, (width + size - 1) // size
        x = F.pad(x, (0, columns * size - width, 0, rows * size - height)).permute(0, 2, 3, 1)
        x = x.reshape(b, rows, size, columns, size, c).transpose(2, 3).reshape(-1, size, size, c).permute(0, 3, 1, 2)
        routes = None if directions is None else self.routes(directions, rows * columns)
        for block in self.blocks:
            x = block(x, routes)
        x = x.permute(0, 2, 3, 1).reshape(b, rows, columns, size, size, c).transpose(2, 3)
        return x.reshape(b, rows * size, columns * size, c)[:, :height, :width].permute(0, 3, 1, 2)

    def routes(self, directions: Tensor, windows: int) -> tuple[Route, Route]:
        """Routes of the convolutions and of the recurrence through the windows of each image."""
        visits = visit(DIRECTIONS, self.window, self.window, directions.device)[directions]
        if directions.dim() == 2:
            visits = visits.repeat_interleave(windows, 0)
        convolutions, recurrence = (Route.along(visits[..., i : i + 1, :], self.window**2) for i in (0, 1))
        return convolutions, recurrence


def halving_conv(channels: int, out_channels: int) -> nn.Conv2d:
    """Convolution of stride 2."""
    return nn.Conv2d(channels, out_channels, 3, stride=2, padding=1, bias=False)


class MambaVision(StagedNetwork):
    """Maps images (n, channels, h, w) to logits (n, classes).

    Every Mamba mixer has one group of parameters and one direction, by rows inside a window. A scan order changes that
    direction in all of them; attention and convolutional blocks do not depend on it.
    """

    orders = SCAN_ORDERS
    stages_path: ClassVar[str] = "levels"
    mixer: ClassVar[str] = r"\.mixer\.(?!proj)"  # without the attention's output
    config: MambaVisionConfig

    def __init__(self, config: MambaVisionConfig) -> None:
        stem: list[nn.Module] = []
        for before, after in ((config.in_channels, config.stem_dim), (config.stem_dim, config.dim)):
            stem += [halving_conv(before, after), BatchNorm2d(after, eps=STEM_EPS), nn.ReLU()]
        super().__init__(config, nn.Sequential(OrderedDict(conv_down=nn.Sequential(*stem))))
        self.norm = BatchNorm2d(config.dim * 2 ** (len(config.depths) - 1))
        self.head = nn.Linear(self.norm.num_features, config.num_classes)
        self.apply(initialize_linear)

    def make_stage(self, i: int, rates: list[float]) -> Stage:
        config, dim, downsample = self.config, self.config.dim * 2**i, None
        if i + 1 < len(config.depths):
            downsample = nn.Sequential(OrderedDict(reduction=nn.Sequential(halving_conv(dim, 2 * dim))))
        if i < 2:
            return Stage([ConvBlock(dim, config.layer_scale_conv, rate) for rate in rates], downsample)
        scanning = (len(rates) + 1) // 2  # the others attend
        blocks = []
        for j, rate in enumerate(rates):
            attention = None if j < scanning else Attention(dim, config.heads[i], ("qkv", "proj"), bias=True)
            blocks.append(WindowBlock(dim, attention or MambaMixer(dim), config, rate))
        return WindowStage(blocks, downsample, config.windows[i])
