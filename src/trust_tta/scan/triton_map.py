"""The scans of a map on a CUDA device, forward and backward, in few kernels.

Nothing that is large is kept for the backward if it can be made again: the two sequences and the four step sizes would
take six maps a block, and the map they come from is there anyway.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trust_tta.scan import triton_groups, triton_layout, triton_scan
from trust_tta.scan.groups import Five, scan_inputs, steps_of
from trust_tta.scan.triton_products import correlate, multiply


def forward(x: Tensor, slots: Tensor, parameters: Five) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Five]:
    """As `core.run_scan_map`: y, parts, the states, no sequences, no steps, and what was taken."""
    taken = project, widen, A, D, bias = triton_groups.take(x.dtype, slots, parameters)
    u = triton_layout.spread(x, silu=True)
    parts = u.new_empty((len(x), 2, 2, project.shape[-2] // 2, u.shape[-1]))
    multiply(project, u, parts.flatten(2, 3))
    delta = _widened(widen, parts)
    y, states = triton_scan.forward(*scan_inputs(u, delta, parts, A, D, bias), True)
    return y.view_as(u), parts, states, u.new_empty(0), u.new_empty(0), taken


def backward(
    dy: Tensor,
    x: Tensor,
    slots: Tensor,
    taken: Five,
    parts: Tensor,
    states: Tensor,
    learn_products: bool,
    learn_scan: bool,
) -> tuple[Tensor, Five]:
    """As `core.scan_map_backward`."""
    project, widen, A, D, bias = taken
    h, w = x.shape[2:]
    u = triton_layout.spread(x, silu=True)
    delta = _widened(widen, parts)
    inputs = scan_inputs(u, delta, parts, A, D, bias)
    du, ddelta, waiting = triton_scan.differentiate(dy.reshape(inputs[0].shape), *inputs, True, states)
    du, ddelta = du.view_as(u), ddelta.view_as(delta)
    dparts = torch.empty_like(parts)
    multiply(widen.mT.flatten(-4, -3), ddelta.flatten(1, 2), steps_of(dparts, widen).flatten(1, 2))
    triton_scan.sum_rows(waiting, dparts)
    multiply(project.mT, dparts.flatten(2, 3), du, add=True)
    dx = triton_layout.join(du, h, w, silu_of=x)
    dproject = dwiden = None
    if learn_products:
        dproject = correlate(dparts.flatten(2, 3), u, own=slots.dim() == 2)
        dwiden = correlate(ddelta.flatten(1, 2), steps_of(parts, widen).flatten(1, 2), own=slots.dim() == 2)
    return dx, triton_groups.give(slots, taken, dproject, dwiden, waiting if learn_scan else None)


def _widened(widen: Tensor, parts: Tensor) -> Tensor:
    """The steps (b, 2, 2, c, l) of all channels."""
    b, _, _, _, length = parts.shape
    delta = parts.new_empty((b, 2, 2, widen.shape[-2], length))
    multiply(widen.flatten(-4, -3), steps_of(parts, widen).flatten(1, 2), delta.flatten(1, 2))
    return delta
