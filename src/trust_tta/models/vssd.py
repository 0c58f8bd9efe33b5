"""VSSD: a Spatial-Mamba whose mixer sums over all tokens instead of scanning them, with attention in the last stage.

Shi et al., "VSSD: Vision Mamba with Non-Causal State Space Duality", ICCV 2025.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trust_tta.errors import ShapeError
from trust_tta.models.config import VSSDConfig
from trust_tta.models.layers import LayerNorm2d, Linear2d
from trust_tta.models.spatialmamba import SpatialMamba
from trust_tta.models.staged import Attention
from trust_tta.ops.convolution import DepthwiseConv2d

REDUCTION = 32  # of the last map


class NonCausalSSD(nn.Module):
    """Project, convolve, sum the states of all tokens, read them out, normalize, gate, project back."""

    def __init__(self, dim: int, heads: int, d_state: int, *, positive_decay: bool) -> None:
        super().__init__()
        inner = 2 * dim
        self.heads, self.d_state, self.sign = heads, d_state, 1 if positive_decay else -1
        self.dt_bias = nn.Parameter(torch.zeros(heads))
        self.A_log = nn.Parameter(torch.zeros(heads))
        self.D = nn.Parameter(torch.ones(heads))
        self.in_proj = Linear2d(dim, 2 * inner + 2 * d_state + heads, bias=False)
        self.conv2d = DepthwiseConv2d(inner + 2 * d_state, 3, bias=True)
        self.norm = LayerNorm2d(inner)
        self.out_proj = Linear2d(inner, dim, bias=False)

    def forward(self, x: Tensor, directions: Tensor | None) -> Tensor:
        """x (b, dim, h, w)."""
        b, dim, height, width = x.shape
        inner, n = 2 * dim, self.d_state
        z, mixed, dt = self.in_proj(x).split((inner, inner + 2 * n, self.heads), dim=1)
        u, B, C = F.silu(self.conv2d(mixed)).flatten(2).split((inner, n, n), dim=1)
        weights = self.sign * F.softplus(dt.flatten(2) + self.dt_bias[:, None]) * torch.exp(self.A_log)[:, None]
        u = u.unflatten(1, (self.heads, -1))  # (b, heads, inner / heads, l)
        states = (weights.unsqueeze(2) * u) @ B.mT.unsqueeze(1)  # summed over all tokens
        y = states @ C.unsqueeze(1) + self.D[:, None, None] * u
        return self.out_proj(self.norm(y.reshape(b, inner, height, width)) * z)


class VSSD(SpatialMamba):
    """Maps images (n, channels, h, w) to logits (n, classes); the sides of the images are multiples of 32."""

    orders: ClassVar[Mapping[str, Sequence[int]]] = {"any": ()}
    order_free: ClassVar[bool] = True
    mixer: ClassVar[str] = r"\.attn\."
    part_names: ClassVar[tuple[str, str, str]] = ("norm1", "attn", "norm2")
    config: VSSDConfig

    def make_mixer(self, stage: int) -> nn.Module:
        config = self.config
        dim, heads = config.dims[stage], config.heads[stage]
        if config.attention[stage]:
            return Attention(dim, heads, ("to_qkv", "to_out"), bias=False)
        return NonCausalSSD(dim, heads, config.d_state, positive_decay=config.positive_decay)

    def check_images(self, images: Tensor) -> Tensor:
        images = super().check_images(images)
        sides = images.shape[2:]
        if not torch.compiler.is_exporting() and any(side % REDUCTION for side in sides):
            nearest = [max(REDUCTION, round(side / REDUCTION) * REDUCTION) for side in sides]
            raise ShapeError(
                f"images are {sides[0]}x{sides[1]}; VSSD takes sides that are multiples of {REDUCTION}: "
                f"resize them to {nearest[0]}x{nearest[1]}"
            )
        return images
