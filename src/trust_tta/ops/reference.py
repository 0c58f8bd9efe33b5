"""The definition of each scan in plain PyTorch, differentiated by autograd. Every backend is tested against it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from trust_tta.ops.tensors import Gathered, Parameters


def scan_grouped(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    delta_bias: Tensor | None,
    delta_softplus: bool,
) -> Tensor:
    """The grouped scan of `ScanInputs`, one loop over time for each direction; their sum is y (b, g, c, l)."""
    dtype = torch.promote_types(u.dtype, torch.float32)
    x, dt, A, B, C = (t.to(dtype) for t in (u, delta, A, B, C))
    if delta_bias is not None:
        dt = dt + delta_bias.to(dtype)[..., None]
    if delta_softplus:
        dt = F.softplus(dt)
    y = torch.zeros_like(x)
    for m in range(delta.shape[2]):
        # Unbound once: the gradient of a slice at every step would be a whole sequence each.
        moments = list(zip(*(t.unbind(-1) for t in (x, dt[:, :, m], B[:, :, m], C[:, :, m])), strict=True))
        h = x.new_zeros(*x.shape[:3], A.shape[-1])
        outputs = []
        for x_t, d_t, B_t, C_t in moments if m == 0 else reversed(moments):
            h = torch.exp(d_t[..., None] * A[:, m]) * h + (d_t * x_t)[..., None] * B_t[:, :, None]
            outputs.append((h * C_t[:, :, None]).sum(-1))
        y = y + torch.stack(outputs if m == 0 else outputs[::-1], dim=-1)
    if D is not None:
        y = y + D.to(dtype).sum(1)[..., None] * x
    return y.to(u.dtype)


def cross_scan(x: Tensor) -> Tensor:
    """x (b, c, h, w) -> (b, 2, c, h*w): its pixels along the rows, and along the columns."""
    return torch.stack((x.flatten(2), x.transpose(2, 3).flatten(2)), dim=1)


def cross_merge(y: Tensor, height: int, width: int) -> Tensor:
    """y (b, 2, c, h*w) -> (b, c, h, w): both sequences back in place and summed, the adjoint of `cross_scan`."""
    b, _, c, _ = y.shape
    rows, columns = y.unbind(1)
    return rows.reshape(b, c, height, width) + columns.reshape(b, c, width, height).transpose(2, 3)


def gather(parameters: Parameters, slots: Tensor, dtype: torch.dtype) -> Gathered:
    """The parameter group that `slots` (4,) or (b, 4) names for each direction.

    The directions are rows forward, rows backward, columns forward, columns backward; A = -exp(A_logs). A, D and the
    bias are at least float32, because the recurrence multiplies rounding errors along the whole sequence.
    """
    x_proj_weight, dt_projs_weight, dt_projs_bias, A_logs, Ds = parameters
    rows, directions, c = slots.flatten(), (*slots.shape[:-1], 2, 2), x_proj_weight.shape[-1]
    x_proj = x_proj_weight.index_select(0, rows).to(dtype).view(*directions[:-1], -1, c)
    dt_proj = dt_projs_weight.index_select(0, rows).to(dtype).view(*directions, c, -1)
    A = -torch.exp(_at_least_float32(A_logs.view(4, c, -1).index_select(0, rows))).view(*directions, c, -1)
    D, dt_bias = (
        _at_least_float32(t.view(4, c).index_select(0, rows)).view(*directions, c) for t in (Ds, dt_projs_bias)
    )
    return Gathered(x_proj, dt_proj, A, D, dt_bias)


def scatter_add(gradient: Tensor, slots: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The adjoint of `gather` for one parameter: for each group, the sum over the directions (.., 2, 2, ..) it read."""
    rows = slots.flatten()
    source = gradient.reshape(len(rows), -1).to(dtype)
    readers = rows == torch.arange(4, device=rows.device)[:, None]
    return (readers.to(dtype) @ source).view(shape)  # sooner than index_add_


def scan_map(x: Tensor, slots: Tensor, parameters: Parameters) -> Tensor:
    """SiLU of the map x (b, c, h, w) scanned along rows and columns, both ways: y (b, 2, c, h*w)."""
    gathered = gather(parameters, slots, x.dtype)
    u = cross_scan(F.silu(x))
    projected = (gathered.x_proj @ u).unflatten(2, (2, -1))
    delta = gathered.dt_proj @ gathered.low_rank(projected)
    return scan_grouped(*gathered.scan_inputs(u, delta, projected)).view_as(u)


def merge_norm(y: Tensor, height: int, width: int, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """y (b, 2, c, h*w) merged, then normalized over the channels: (b, c, height, width)."""
    x = cross_merge(y, height, width).permute(0, 2, 3, 1)
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps).permute(0, 3, 1, 2)


def _at_least_float32(weight: Tensor) -> Tensor:
    return weight.to(torch.promote_types(weight.dtype, torch.float32))
