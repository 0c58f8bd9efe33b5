"""SS2D: a map scanned along its rows and columns, both ways, by four groups of scan parameters."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trust_tta.models.config import VMambaConfig
from trust_tta.models.layers import LayerNorm2d, Linear2d, reset_steps
from trust_tta.ops.convolution import DepthwiseConv2d
from trust_tta.ops.functional import merge_norm, scan_map
from trust_tta.ops.tensors import Parameters


class SS2D(nn.Module):
    """Project, convolve, scan in four directions, normalize, project back."""

    backend: str = "auto"

    def __init__(self, dim: int, config: VMambaConfig, *, groups: int = 4) -> None:
        super().__init__()
        inner, d_state, dt_rank = int(config.ssm_ratio * dim), config.d_state, config.dt_rank or math.ceil(dim / 16)
        self.gate = config.gate
        self.in_proj = Linear2d(dim, 2 * inner if config.gate else inner, bias=False)
        self.conv2d = DepthwiseConv2d(inner, config.conv_size, bias=config.conv_bias)
        self.x_proj_weight = nn.Parameter(torch.empty(groups, dt_rank + 2 * d_state, inner))
        self.dt_projs_weight = nn.Parameter(torch.empty(groups, inner, dt_rank))
        self.dt_projs_bias = nn.Parameter(torch.empty(groups, inner))
        self.A_logs = nn.Parameter(torch.log(torch.arange(1.0, d_state + 1)).repeat(groups * inner, 1))
        self.Ds = nn.Parameter(torch.ones(groups * inner))
        self.out_norm = LayerNorm2d(inner)
        self.out_proj = Linear2d(inner, dim, bias=False)
        for group in self.x_proj_weight.data:
            nn.init.kaiming_uniform_(group, a=math.sqrt(5))
        reset_steps(self.dt_projs_weight, self.dt_projs_bias)

    def forward(self, x: Tensor, directions: Tensor, residual: Tensor | None = None) -> Tensor:
        """x (b, dim, h, w); `directions` (4,) or (b, 4) as in `functional.scan_map`; plus `residual` (b, dim, h, w)."""
        x = self.in_proj(x)
        if self.gate:
            x, z = x.chunk(2, dim=1)
        y = self.scan(self.conv2d(x), directions)
        return self.out_proj(y * F.silu(z) if self.gate else y, residual)

    def scan_parameters(self) -> Parameters:
        return Parameters(self.x_proj_weight, self.dt_projs_weight, self.dt_projs_bias, self.A_logs, self.Ds)

    def scan(self, x: Tensor, directions: Tensor) -> Tensor:
        """Scan SiLU(x), x (b, c, h, w), in four directions; their sum, normalized, (b, c, h, w)."""
        y = scan_map(x, directions, self.scan_parameters(), backend=self.backend)
        norm = self.out_norm
        return merge_norm(y, x.shape[2], x.shape[3], norm.weight, norm.bias, norm.eps, backend=self.backend)
