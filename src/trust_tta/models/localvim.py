"""LocalVim: a Vim whose layers scan in four directions of their own, some of them by windows.

Huang et al., "LocalMamba: Visual State Space Model with Windowed Selective Scan", 2024.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trust_tta.models.base import FOUR_DIRECTIONS
from trust_tta.models.config import LocalVimConfig
from trust_tta.models.localvmamba import ChannelAttention
from trust_tta.models.sequences import Route, visit
from trust_tta.models.vim import Mixer, Vim, insert_token

BASE, SIDE = 10_000, 14  # of the rotary embedding: its longest wave, and the side it was made for


class LocalMixer(Mixer):
    """A mixer of four directions; each is gated and weighted by one channel attention before they are summed."""

    suffixes = ("_0", "_1", "_2", "_3")
    decay = "A_log{}"

    def __init__(self, dim: int, *, d_state: int) -> None:
        super().__init__(dim, d_state=d_state, halve=False)
        self.attn = ChannelAttention(2 * dim)

    def forward(self, x: Tensor, route: Route) -> Tensor:
        u, z = self.in_proj(x).transpose(1, 2).chunk(2, dim=1)
        y = self.scan(F.pad(u, (0, 1)), route) * F.silu(z).unsqueeze(1)  # u ends in the zero token
        return self.out_proj(self.attn(y).sum(1).transpose(1, 2))


class Rotary(nn.Module):
    """Rotary embedding: half of the channels are rotated by the token's row, the other half by its column."""

    freqs_cos: Tensor
    freqs_sin: Tensor

    def __init__(self, dim: int, grid: tuple[int, int]) -> None:
        super().__init__()
        waves = BASE ** -(torch.arange(0, dim // 2, 2, dtype=torch.float64)[: dim // 4] / (dim // 2))
        waves = waves.repeat_interleave(2)
        rows, columns = (torch.arange(n, dtype=torch.float64)[:, None] * (SIDE / n) * waves for n in grid)
        shape = (*grid, dim // 2)
        angles = torch.cat((rows[:, None].expand(shape), columns[None].expand(shape)), dim=-1).flatten(0, 1)
        self.register_buffer("freqs_cos", angles.cos().float())
        self.register_buffer("freqs_sin", angles.sin().float())

    def forward(self, x: Tensor) -> Tensor:
        """x (b, tokens, dim), rotated."""
        rotated = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
        return x * self.freqs_cos + rotated * self.freqs_sin


class LocalVim(Vim):
    """images (n, channels, h, w) of one size -> logits (n, classes).

    A scan order permutes the four directions of every layer among its sets of parameters.
    """

    orders = FOUR_DIRECTIONS
    config: LocalVimConfig

    def __init__(self, config: LocalVimConfig) -> None:
        super().__init__(config)
        self.rope = Rotary(config.dim, config.grid) if config.rotary else None

    def make_mixer(self) -> Mixer:
        return LocalMixer(self.config.dim, d_state=self.config.d_state)

    def routes(self, directions: Tensor) -> list[Route]:
        """The route of each layer; a class token comes in the middle of every sequence."""
        routes = {}
        for names in dict.fromkeys(self.config.directions):
            visits = visit(names, *self.config.grid, directions.device)
            visits = visits if self.cls_token is None else insert_token(visits, self.middle)
            routes[names] = Route.along(visits[directions], self.pos_embed.shape[1])
        return [routes[names] for names in self.config.directions]
