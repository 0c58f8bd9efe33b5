"""SS2D's scan of a feature map on a CUDA device, forward and backward, in few kernels.

The two sequences and the four step sizes are computed again in the backward: they would take the memory of six maps per
block, and the map they come from is there anyway.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trust_tta.ops.tensors import Gathered, Parameters, Saved
from trust_tta.ops.triton.backward import differentiate, sum_rows
from trust_tta.ops.triton.cross_scan_merge import cross_merge, cross_scan
from trust_tta.ops.triton.forward import scan_forward
from trust_tta.ops.triton.matmul import matmul, weight_gradient
from trust_tta.ops.triton.ss2d_parameters import gather, scatter_add


def scan_map_forward(x: Tensor, directions: Tensor, parameters: Parameters) -> tuple[Tensor, Saved]:
    """See `operators.Backend`."""
    gathered = gather(parameters, directions, x.dtype)
    u = cross_scan(x, silu=True)
    projected = u.new_empty((len(x), 2, 2, gathered.x_proj.shape[-2] // 2, u.shape[-1]))
    matmul(gathered.x_proj, u, projected.flatten(2, 3))
    delta = _step_sizes(gathered, projected)
    y, states = scan_forward(gathered.scan_inputs(u, delta, projected))
    return y.view_as(u), Saved(projected, states, u.new_empty(0), gathered)


def scan_map_backward(
    dy: Tensor, x: Tensor, directions: Tensor, saved: Saved, *, train_projections: bool, train_scan: bool
) -> tuple[Tensor, Parameters]:
    """See `operators.Backend`."""
    projected, states, _, gathered = saved
    u = cross_scan(x, silu=True)
    delta = _step_sizes(gathered, projected)
    inputs = gathered.scan_inputs(u, delta, projected)
    du, ddelta, partial = differentiate(dy.reshape(inputs.u.shape), inputs, states)
    du, ddelta = du.view_as(u), ddelta.view_as(delta).flatten(1, 2)
    dprojected = torch.empty_like(projected)
    dsteps, per_image = gathered.low_rank(dprojected).flatten(1, 2), directions.dim() == 2
    steps, dt_proj = gathered.low_rank(projected).flatten(1, 2), gathered.dt_proj.flatten(-4, -3)
    matmul(dt_proj.mT, ddelta, dsteps)
    sum_rows(partial, dprojected)
    dprojected = dprojected.flatten(2, 3)
    matmul(gathered.x_proj.mT, dprojected, du, add=True)
    dx = cross_merge(du, *x.shape[2:], silu_of=x)
    dx_proj = ddt_proj = None
    if train_projections:
        ddt_proj = weight_gradient(ddelta, steps, per_image=per_image)
        dx_proj = weight_gradient(dprojected, u, per_image=per_image)
    return dx, scatter_add(directions, gathered, dx_proj, ddt_proj, partial if train_scan else None)


def _step_sizes(gathered: Gathered, projected: Tensor) -> Tensor:
    """The step sizes (b, 2, 2, c, l) of all channels."""
    b, _, _, _, length = projected.shape
    delta = projected.new_empty((b, 2, 2, gathered.dt_proj.shape[-2], length))
    matmul(gathered.dt_proj.flatten(-4, -3), gathered.low_rank(projected).flatten(1, 2), delta.flatten(1, 2))
    return delta
