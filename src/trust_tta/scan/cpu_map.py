"""The scans of a map on a CPU, forward and backward: time is what counts, so the sequences and the steps are kept."""

from __future__ import annotations

import torch
from torch import Tensor

from trust_tta.scan import cpu, layout
from trust_tta.scan.groups import Five, give, parameter_shapes, scan_inputs, steps_of, take


def forward(x: Tensor, slots: Tensor, parameters: Five) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Five]:
    """As `core.run_scan_map`: y, parts, no states, the sequences u, all steps, and what was taken."""
    taken = project, widen, A, D, bias = take(x.dtype, slots, parameters)
    u = layout.spread(x, silu=True, triton=False)
    parts = (project @ u).unflatten(2, (2, -1))
    delta = widen @ steps_of(parts, widen)
    y = cpu.forward(*scan_inputs(u, delta, parts, A, D, bias), True)
    return y.view_as(u), parts, u.new_empty(0, dtype=torch.float32), u, delta, taken


def backward(
    dy: Tensor,
    x: Tensor,
    slots: Tensor,
    taken: Five,
    parts: Tensor,
    u: Tensor,
    delta: Tensor,
    learn_products: bool,
    learn_scan: bool,
) -> tuple[Tensor, Five]:
    """As `core.scan_map_backward`."""
    project, widen, A, D, bias = taken
    h, w = x.shape[2:]
    steps = steps_of(parts, widen)
    inputs = scan_inputs(u, delta, parts, A, D, bias)
    du, ddelta, dA, dB, dC, dD, dbias = cpu.backward(dy.reshape(inputs[0].shape), *inputs, True)
    du, ddelta = du.view_as(u), ddelta.view_as(delta)
    dB, dC = (t.view(*parts.shape[:3], -1, h * w) for t in (dB, dC))
    dparts = torch.cat((widen.mT @ ddelta, dB, dC), 3).flatten(2, 3)
    du += project.mT @ dparts
    dx = layout.join(du, h, w, silu_of=x, triton=False)
    dproject, dwiden, ddt_bias, dA_logs, dDs = (A.new_empty(0) for _ in range(5))
    shapes = parameter_shapes(project, widen, A)
    if learn_products:
        dproject = give(slots, _sum_to(dparts @ u.mT, project), shapes[0], A.dtype)
        dwiden = give(slots, _sum_to(ddelta @ steps.mT, widen), shapes[1], A.dtype)
    if learn_scan:
        gradients = (dbias, dA.view_as(A) * A, dD)
        ddt_bias, dA_logs, dDs = (give(slots, t, s, A.dtype) for t, s in zip(gradients, shapes[2:], strict=True))
    return dx, (dproject, dwiden, ddt_bias, dA_logs, dDs)


def _sum_to(gradient: Tensor, weight: Tensor) -> Tensor:
    """The sum over the images (b, ..) where they share the weight."""
    return gradient if gradient.shape == weight.shape else gradient.sum(0)
