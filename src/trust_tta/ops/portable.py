"""The scans in standard operators, for export to ONNX and other runtimes: no custom kernel.

A sequence is cut into chunks, which are scanned side by side, one step of all chunks after the other; the states at
their ends are a shorter sequence, and scanned likewise. Decays are multiplied, never divided and never summed as
logarithms, so that nothing overflows. Tokens are rows (.., l, c): a step is made of whole rows.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trust_tta.ops import reference
from trust_tta.ops.tensors import Parameters

CHUNK = 8


def scan_in_chunks(decay: Tensor, x: Tensor) -> Tensor:
    """h_t = decay_t h_{t-1} + x_t along the second axis from the end, for decay and x (.., l, c)."""
    length = x.shape[-2]
    size = min(CHUNK, length)
    filled = (F.pad(t, (0, 0, 0, -length % size)) for t in (decay, x))
    decays, states = (list(t.unflatten(-2, (-1, size)).unbind(-2)) for t in filled)
    for t in range(1, size):
        states[t] = states[t] + decays[t] * states[t - 1]
        decays[t] = decays[t] * decays[t - 1]
    h: Tensor = torch.stack(states, dim=-2)
    if length > size:
        ends = scan_in_chunks(decays[-1], states[-1])
        h = h + torch.stack(decays, dim=-2) * F.pad(ends, (0, 0, 1, -1)).unsqueeze(-2)
    return h.flatten(-3, -2)[..., :length, :]


scan_operator = torch.library.custom_op(
    "trust_tta::scan_linear",
    lambda decay, x: scan_in_chunks(decay, x).contiguous(),
    mutates_args=(),
    schema="(Tensor decay, Tensor x) -> Tensor",
)


@scan_operator.register_fake
def _(decay: Tensor, x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def scan_linear(decay: Tensor, x: Tensor) -> Tensor:
    """`scan_in_chunks` as one operator, which exporters translate or decompose."""
    return scan_operator(decay, x) if torch.compiler.is_exporting() else scan_in_chunks(decay, x)


def scan_grouped(*inputs: Any) -> Tensor:
    """Portable version of `reference.scan_grouped`."""
    u, delta, A, B, C, D, delta_bias, delta_softplus = inputs
    dtype = torch.promote_types(u.dtype, torch.float32)
    x, A, *sequences = (t if t.dtype == dtype else t.to(dtype) for t in (u.mT, A, delta.mT, B.mT, C.mT))
    if delta.shape[2] == 2:
        sequences = [_turn(t) for t in sequences]
    bias = None if delta_bias is None else delta_bias.to(dtype)
    y = scan_rows(x, sequences[0], A, *sequences[1:], bias=bias, softplus=delta_softplus)
    return (y if D is None else y + D.to(dtype).sum(1).unsqueeze(-2) * x).mT.to(u.dtype)


def scan_rows(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, *, bias: Tensor | None, softplus: bool = True
) -> Tensor:
    """Scan u (b, g, l, c) in m directions and sum them; without D.

    delta (b, g, m, l, c), B and C (b, g, m, l, n), with direction 1 from the last token on; A (.., g, m, c, n).
    """
    x = u.unsqueeze(2) if delta.shape[2] == 1 else torch.stack((u, u.flip(2)), dim=2)
    delta = delta if bias is None else delta + bias.unsqueeze(-2)
    delta = F.softplus(delta) if softplus else delta
    if A.shape[-1] == 1:
        y: Tensor = C * scan_linear(torch.exp(delta * A.mT), delta * x * B)
    else:  # the states of all channels beside each other: a row has n * c numbers
        decay = torch.exp(delta.unsqueeze(-2) * A.mT.unsqueeze(-3)).flatten(-2)
        h = scan_linear(decay, ((delta * x).unsqueeze(-2) * B.unsqueeze(-1)).flatten(-2))
        y = (C.unsqueeze(-2) @ h.unflatten(-1, (A.shape[-1], -1))).squeeze(-2)
    return y[:, :, 0] if y.shape[2] == 1 else y[:, :, 0] + y[:, :, 1].flip(2)


def _turn(x: Tensor) -> Tensor:
    """x (b, g, 2, l, c) with direction 1 from the last token to the first."""
    return torch.stack((x[:, :, 0], x[:, :, 1].flip(2)), dim=2)


def scan_map(x: Tensor, directions: Tensor, parameters: Parameters) -> Tensor:
    """Portable version of `reference.scan_map`."""
    x_proj, dt_proj, A, D, bias = reference.gather(parameters, directions, x.dtype)
    n, rank = A.shape[-1], dt_proj.shape[-1]
    rows = F.silu(x).permute(0, 2, 3, 1)
    u = torch.stack((rows.flatten(1, 2), rows.transpose(1, 2).flatten(1, 2)), dim=1)  # (b, 2, l, c)
    projected = _turn((u @ x_proj.mT).unflatten(-1, (2, -1)).transpose(2, 3))
    low, B, C = projected.split((rank, n, n), dim=-1)
    u, delta, B, C = (t if t.dtype == A.dtype else t.to(A.dtype) for t in (u, low @ dt_proj.mT, B, C))
    y = scan_rows(u, delta, A, B, C, bias=bias) + D.sum(-2).unsqueeze(-2) * u
    return (y if y.dtype == x.dtype else y.to(x.dtype)).mT


def merge_norm(y: Tensor, height: int, width: int, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Portable version of `reference.merge_norm`."""
    rows, columns = y.mT.unbind(1)
    x = rows.unflatten(1, (height, width)) + columns.unflatten(1, (width, height)).transpose(1, 2)
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps).permute(0, 3, 1, 2)
