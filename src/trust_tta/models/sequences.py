"""Maps as sequences of tokens: scan directions, the scan itself, and the way back to the map.

Directions have LocalMamba's names: "h" by rows, "v" by columns, "wK" by windows of KxK tokens, row by row inside each;
"_flip" is the same backwards. A map that windows do not divide is padded with zero tokens on the right and below; they
stay in the sequence, where they let the state decay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from trust_tta.ops.functional import grouped_scan
from trust_tta.ops.map_sequences import Paths
from trust_tta.ops.tensors import Parameters

DIRECTIONS = ("h", "v", "h_flip", "v_flip")  # of networks that scan rows and columns, both ways


def visit(directions: Sequence[str], height: int, width: int, device: torch.device) -> Tensor:
    """The row-major index of the token at each step, (directions, steps); height * width stands for a zero token.

    Shorter sequences end in zero tokens, which nothing follows.
    """
    tokens = torch.arange(height * width, device=device).view(height, width)
    plain = {d: _visit(d, tokens) for d in dict.fromkeys(name.removesuffix("_flip") for name in directions)}
    rows = [plain[n.removesuffix("_flip")].flip(0) if n.endswith("_flip") else plain[n] for n in directions]
    longest = max(len(row) for row in rows)
    return torch.stack([F.pad(row, (0, longest - len(row)), value=height * width) for row in rows])


def _visit(direction: str, tokens: Tensor) -> Tensor:
    height, width = tokens.shape
    if direction == "v":
        return tokens.t().flatten()
    size = int(direction[1:]) if direction.startswith("w") else 1
    padded = F.pad(tokens, (0, -width % size, 0, -height % size), value=height * width)
    windows = padded.unflatten(1, (-1, size)).unflatten(0, (-1, size))
    return (windows.transpose(1, 2) if size > 1 else padded).flatten()


class Route(NamedTuple):
    """The token at each step of k sequences, and the step at which each token is visited; (k, ..) or (b, k, ..)."""

    visits: Tensor
    returns: Tensor

    @classmethod
    def along(cls, visits: Tensor, tokens: int) -> Route:
        steps = torch.arange(visits.shape[-1], device=visits.device).expand_as(visits)
        found = torch.zeros(*visits.shape[:-1], tokens + 1, dtype=visits.dtype, device=visits.device)
        return cls(visits, found.scatter_(-1, visits, steps)[..., :tokens])

    def paths(self, *, joined: bool = False) -> Paths:
        """The sequences, each of all tokens, for `read_map`; `joined`: one after the other, as a single one."""
        sequences, steps = self.visits.shape[-2:]
        places = self.returns + torch.arange(0, sequences * steps, steps, device=self.returns.device)[:, None]
        return Paths(self.visits.flatten(-2).unsqueeze(-2) if joined else self.visits, places)


def scan_sequences(u: Tensor, parameters: Parameters, *, backend: str = "auto") -> Tensor:
    """Scan k sequences u (b, k, c, l) from their first step to the last, each with its own group of parameters."""
    x_proj, dt_proj, dt_bias, A_logs, Ds = parameters
    k, channels, rank = dt_proj.shape
    A = -torch.exp(at_least_float32(A_logs)).view(k, 1, channels, -1)
    n = A.shape[-1]
    low, B, C = (x_proj.to(u.dtype) @ u).split((rank, n, n), dim=2)
    delta = dt_proj.to(u.dtype) @ low
    D, bias = (at_least_float32(t).view(k, 1, channels) for t in (Ds, dt_bias))
    return grouped_scan(u, delta.unsqueeze(2), A, B.unsqueeze(2), C.unsqueeze(2), D, bias, backend=backend)


def at_least_float32(weight: Tensor) -> Tensor:
    """In half precision, rounding errors would multiply along the sequence."""
    return weight.to(torch.promote_types(weight.dtype, torch.float32))
