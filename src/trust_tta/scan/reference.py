"""The selective scan by its definition: one readable loop over time, differentiated by autograd."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def scan_reference(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    delta_bias: Tensor | None,
    delta_softplus: bool,
) -> Tensor:
    """Scan u (b, g, c, l) in m directions, with delta (b, g, m, c, l), A (g, m, c, n), B and C (b, g, m, n, l).

    Direction 0 runs from the first position to the last, direction 1 from the last to the first; their
    results are summed into y (b, g, c, l).
    """
    dtype = torch.promote_types(u.dtype, torch.float32)
    x, dt, A, B, C = (t.to(dtype) for t in (u, delta, A, B, C))
    if delta_bias is not None:
        dt = dt + delta_bias.to(dtype)[..., None]
    if delta_softplus:
        dt = F.softplus(dt)
    y = torch.zeros_like(x)
    for m in range(delta.shape[2]):
        # Taken apart once: a slice at every step would cost the backward a whole sequence each.
        moments = list(zip(*(t.unbind(-1) for t in (x, dt[:, :, m], B[:, :, m], C[:, :, m])), strict=True))
        h = x.new_zeros(*x.shape[:3], A.shape[-1])
        outputs = []
        for x_t, d_t, B_t, C_t in moments if m == 0 else reversed(moments):
            drive = (d_t * x_t)[..., None] * B_t[:, :, None]
            h = torch.exp(d_t[..., None] * A[:, m]) * h + drive
            outputs.append((h * C_t[:, :, None]).sum(-1))
        y = y + torch.stack(outputs if m == 0 else outputs[::-1], dim=-1)
    if D is not None:
        y = y + D.to(dtype).sum(1)[..., None] * x
    return y.to(u.dtype)
