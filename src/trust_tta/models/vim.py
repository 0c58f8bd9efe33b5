"""Vim: a sequence of patches with a class token in its middle, scanned forwards and backwards in every layer.

Zhu et al., "Vision Mamba: Efficient Visual Representation Learning with Bidirectional State Space Model", ICML 2024.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trust_tta.errors import ShapeError
from trust_tta.models.base import Orders, ScanNetwork
from trust_tta.models.config import VimConfig
from trust_tta.models.layers import StochasticDepth, reset_steps
from trust_tta.models.sequences import Route, scan_sequences, visit
from trust_tta.models.staged import drop_path_rates
from trust_tta.ops.map_sequences import read
from trust_tta.ops.tensors import Parameters

# Which direction the forward and the backward set of parameters read: the rows (a), the columns (b), both backwards
# (c and d).
SCAN_ORDERS = {"ac": (0, 2), "ca": (2, 0), "bd": (1, 3), "db": (3, 1)}
CONV_SIZE = 4
EPS = 1e-5


class Mixer(nn.Module):
    """Project, then convolve and scan in two directions with parameters of their own, gate, project back."""

    backend: str = "auto"
    suffixes: tuple[str, ...] = ("", "_b")  # of the parameters' names, one for each direction
    decay = "A{}_log"  # the name of A

    def __init__(self, dim: int, *, d_state: int, halve: bool) -> None:
        super().__init__()
        self.halve = halve
        inner, rank = 2 * dim, math.ceil(dim / 16)
        self.in_proj = nn.Linear(dim, 2 * inner, bias=False)
        for suffix in self.suffixes:
            self.add_module(f"conv1d{suffix}", nn.Conv1d(inner, inner, CONV_SIZE, groups=inner))
            self.add_module(f"x_proj{suffix}", nn.Linear(inner, rank + 2 * d_state, bias=False))
            self.add_module(f"dt_proj{suffix}", nn.Linear(rank, inner))
            A_log = torch.log(torch.arange(1.0, d_state + 1)).repeat(inner, 1)
            self.register_parameter(self.decay.format(suffix), nn.Parameter(A_log))
            self.register_parameter(f"D{suffix}", nn.Parameter(torch.ones(inner)))
        self.out_proj = nn.Linear(inner, dim, bias=False)
        for weight, bias in zip(self.each("dt_proj{}.weight"), self.each("dt_proj{}.bias"), strict=True):
            reset_steps(weight, bias)

    def forward(self, x: Tensor, route: Route) -> Tensor:
        """x (b, l, dim); the route has a sequence for each set of parameters."""
        u, z = self.in_proj(x).transpose(1, 2).chunk(2, dim=1)
        y = self.scan(u, route).sum(1) * F.silu(z)
        return self.out_proj((y / 2 if self.halve else y).transpose(1, 2))

    def scan(self, u: Tensor, route: Route) -> Tensor:
        """u (b, c, l) scanned in each direction, (b, k, c, l), with the tokens back in place."""
        u = read(u.unsqueeze(1).expand(-1, len(self.suffixes), -1, -1), route.visits)
        parameters = Parameters(
            torch.stack(self.each("x_proj{}.weight")),
            torch.stack(self.each("dt_proj{}.weight")),
            torch.stack(self.each("dt_proj{}.bias")),
            torch.cat(self.each(self.decay)),
            torch.cat(self.each("D{}")),
        )
        return read(scan_sequences(F.silu(self.convolve(u)), parameters, backend=self.backend), route.returns)

    def convolve(self, u: Tensor) -> Tensor:
        """Causal convolution of u (b, k, c, l): each step with the three before it."""
        weight, bias = (torch.cat(self.each(f"conv1d{{}}.{part}")) for part in ("weight", "bias"))
        padded = F.pad(u.flatten(1, 2), (CONV_SIZE - 1, 0))
        return F.conv1d(padded, weight, bias, groups=len(weight)).view(u.shape)

    def each(self, name: str) -> list[Tensor]:
        """A weight of every direction, looked up by name so that `functional_call` can replace it."""
        return [attrgetter(name.format(suffix))(self) for suffix in self.suffixes]


class VimLayer(nn.Module):
    """residual + mixer(norm(residual)); the residual is float32 at least, whatever the weights are."""

    def __init__(self, dim: int, mixer: Mixer, drop_path: float) -> None:
        super().__init__()
        self.mixer = mixer
        self.norm = nn.RMSNorm(dim, eps=EPS)
        self.drop_path = StochasticDepth(drop_path)

    def forward(self, residual: Tensor, route: Route) -> Tensor:
        return residual + self.drop_path(self.mixer(normalize(residual, self.norm), route))


def normalize(x: Tensor, norm: nn.RMSNorm) -> Tensor:
    """x normalized in its own dtype, in the dtype of the weights."""
    return F.rms_norm(x, norm.normalized_shape, norm.weight.to(x.dtype), norm.eps).to(norm.weight.dtype)


class PatchEmbedding(nn.Module):
    """images -> tokens (n, rows * columns, dim)."""

    def __init__(self, channels: int, dim: int, *, patch: int, stride: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(channels, dim, patch, stride=stride)

    def forward(self, images: Tensor) -> Tensor:
        return self.proj(images).flatten(2).transpose(1, 2)


class Vim(ScanNetwork):
    """images (n, channels, h, w) of one size -> logits (n, classes)."""

    orders: ClassVar[Mapping[str, Sequence[int]]] = SCAN_ORDERS
    mixer: ClassVar[str] = r"\.mixer\."
    config: VimConfig

    def __init__(self, config: VimConfig) -> None:
        super().__init__(config)
        dim = config.dim
        self.patch_embed = PatchEmbedding(config.in_channels, dim, patch=config.patch_size, stride=config.stride)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim)) if config.class_token else None
        self.pos_embed = nn.Parameter(torch.zeros(1, math.prod(config.grid) + config.class_token, dim))
        (rates,) = drop_path_rates(config.drop_path, [config.depth])
        self.layers = nn.ModuleList(VimLayer(dim, self.make_mixer(), rate) for rate in rates)
        self.rope: nn.Module | None = None  # rotary embedding, of a LocalVim
        self.norm_f = nn.RMSNorm(dim, eps=EPS)
        self.head = nn.Linear(dim, config.num_classes)
        for weight in (self.cls_token, self.pos_embed, self.head.weight):
            if weight is not None:
                nn.init.trunc_normal_(weight, std=0.02)
        nn.init.zeros_(self.head.bias)
        for layer in cast(list[VimLayer], self.layers):  # the sum of all layers has the scale of one
            nn.init.kaiming_uniform_(layer.mixer.out_proj.weight, a=math.sqrt(5))
            layer.mixer.out_proj.weight.data.div_(math.sqrt(len(self.layers)))

    def make_mixer(self) -> Mixer:
        return Mixer(self.config.dim, d_state=self.config.d_state, halve=self.config.halve)

    @property
    def middle(self) -> int:
        """Position of the class token."""
        return math.prod(self.config.grid) // 2

    def encode(self, images: Tensor, order: Orders = None, *, directions: Tensor | None = None) -> Tensor:
        """All tokens (n, tokens, dim)."""
        residual = self.embed(images)
        if directions is None:
            directions = self.scan_directions(order, images.shape[0])
        rope = self.rope
        for layer, route in zip(self.layers, self.routes(directions), strict=True):
            residual = layer(residual if rope is None else rope(residual), route)
        return residual

    def routes(self, directions: Tensor) -> list[Route]:
        """The route of each layer, with a sequence for each set of parameters."""
        forwards = insert_token(visit(("h", "v"), *self.config.grid, directions.device), self.middle)
        route = Route.along(torch.cat((forwards, forwards.flip(1)))[directions], self.pos_embed.shape[1])
        return [route] * len(self.layers)

    def pool(self, x: Tensor) -> Tensor:
        """The class token (n, dim) of all tokens (n, tokens, dim), normalized; where there is none, their mean."""
        if self.cls_token is None:
            return normalize(x, self.norm_f).mean(1)
        return normalize(x[:, self.middle], self.norm_f)

    def embed(self, images: Tensor) -> Tensor:
        """Patches, the class token and their positions, (n, tokens, dim), float32 at least."""
        images = self.check_images(images)
        if tuple(images.shape[2:]) != self.config.image_size:
            height, width = self.config.image_size
            raise ShapeError(
                f"images are {images.shape[2]}x{images.shape[3]} and this network has positions for {height}x{width}; "
                f"resize them, or build it with image_size=({images.shape[2]}, {images.shape[3]})"
            )
        tokens: Tensor = self.patch_embed(images)
        if self.cls_token is not None:
            token = self.cls_token.expand(images.shape[0], -1, -1)
            tokens = torch.cat((tokens[:, : self.middle], token, tokens[:, self.middle :]), dim=1)
        tokens = tokens + self.pos_embed
        return tokens.to(torch.promote_types(tokens.dtype, torch.float32))

    def last_stage(self) -> tuple[str, ...]:
        """The last quarter of the layers counts as the last stage."""
        first = len(self.layers) - math.ceil(len(self.layers) / 4)
        return *(f"layers.{i}." for i in range(first, len(self.layers))), "norm_f.", "head."


def insert_token(visits: Tensor, middle: int) -> Tensor:
    """Visits (k, steps + 1) with a token inserted at place `middle` of the map and of each sequence."""
    visits = visits + (visits >= middle)
    token = visits.new_full((len(visits), 1), middle)
    return torch.cat((visits[:, :middle], token, visits[:, middle:]), dim=1)
