"""SS2D's scan of a map on a CPU, where time counts and memory does not: sequences and step sizes are kept."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from trust_tta.scan import reference
from trust_tta.scan.cpu import kernels
from trust_tta.scan.cpu.scan import scan_backward, scan_forward
from trust_tta.scan.cpu.threads import CHUNKS, run_tasks
from trust_tta.scan.reference import scatter_add
from trust_tta.scan.tensors import Parameters, Saved

COMPILED = (torch.float32, torch.float64)


def scan_map_forward(x: Tensor, slots: Tensor, parameters: Parameters) -> tuple[Tensor, Saved]:
    """See `operators.Backend`."""
    gathered = reference.gather(parameters, slots, x.dtype)
    u = cross_scan(x, silu=True)
    projected = (gathered.x_proj @ u).unflatten(2, (2, -1))
    delta = gathered.dt_proj @ gathered.low_rank(projected)
    y, states = scan_forward(gathered.scan_inputs(u, delta, projected))
    return y.view_as(u), Saved(projected, states, u, delta, gathered)


def scan_map_backward(
    dy: Tensor, x: Tensor, slots: Tensor, saved: Saved, *, train_projections: bool, train_scan: bool
) -> tuple[Tensor, Parameters]:
    """See `operators.Backend`."""
    projected, states, u, delta, gathered = saved
    x_proj, dt_proj, A, _, _ = gathered
    inputs = gathered.scan_inputs(u, delta, projected)
    gradients = scan_backward(dy.reshape(inputs.u.shape), inputs, states)
    du, ddelta = gradients.u.view_as(u), gradients.delta.view_as(delta)
    dB, dC = (t.view(*projected.shape[:3], -1, u.shape[-1]) for t in (gradients.B, gradients.C))
    dprojected = torch.cat((dt_proj.mT @ ddelta, dB, dC), 3).flatten(2, 3)
    du += x_proj.mT @ dprojected
    dx = cross_merge(du, *x.shape[2:], silu_of=x)

    sources: list[Tensor | None] = [None] * 5
    if train_projections:
        sources[0] = _sum_to(dprojected @ u.mT, x_proj)
        sources[1] = _sum_to(ddelta @ gathered.low_rank(projected).mT, dt_proj)
    if train_scan:
        sources[2:] = [gradients.delta_bias, gradients.A.view_as(A) * A, gradients.D]
    shapes = zip(sources, gathered.parameter_shapes(), strict=True)
    return dx, Parameters(*(A.new_empty(0) if t is None else scatter_add(t, slots, s, A.dtype) for t, s in shapes))


def _sum_to(gradient: Tensor, weight: Tensor) -> Tensor:
    """The sum over the images (b, ..) where they share the weight."""
    return gradient if gradient.shape == weight.shape else gradient.sum(0)


def cross_scan(x: Tensor, *, silu: bool) -> Tensor:
    """See `operators.Backend`."""
    x = F.silu(x) if silu else x
    if x.dtype not in COMPILED:
        return reference.cross_scan(x)
    b, c, h, w = x.shape
    u = x.new_empty((b, 2, c, h * w))
    source, target = x.detach().permute(0, 2, 3, 1).contiguous().numpy(), u.numpy()
    run_tasks(lambda first, last: kernels.cross_scan(source, target, CHUNKS, first, last), b * CHUNKS, u.numel())
    return u


def cross_merge(y: Tensor, height: int, width: int, *, silu_of: Tensor | None = None) -> Tensor:
    """See `operators.Backend`."""
    x = _merge(y, height, width).permute(0, 3, 1, 2)
    return x if silu_of is None else torch.ops.aten.silu_backward(x, silu_of)


def _merge(y: Tensor, height: int, width: int) -> Tensor:
    """y (b, 2, c, h*w) merged into (b, height, width, c)."""
    if y.dtype not in COMPILED:
        return reference.cross_merge(y, height, width).permute(0, 2, 3, 1).contiguous()
    b, _, c, length = y.shape
    x = y.new_empty((b, height, width, c))
    source, target = y.detach().contiguous().numpy(), x.numpy()

    def work(first: int, last: int) -> None:
        scratch = np.empty((kernels.TILE, length), target.dtype)
        kernels.cross_merge(source, target, scratch, CHUNKS, first, last)

    run_tasks(work, b * CHUNKS, y.numel())
    return x


def merge_norm(
    y: Tensor, height: int, width: int, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `operators.Backend`."""
    x = _merge(y, height, width)
    norm, mean, scale = torch.ops.aten.native_layer_norm(x, x.shape[-1:], weight, bias, eps)
    return norm, x, mean, scale
