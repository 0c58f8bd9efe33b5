"""SS2D's four groups of parameters in the places that an order names, and what the scan reads there.

A place is a way through the map: rows forwards, rows backwards, columns forwards, columns backwards. `slots` (4,) names
the group in each place, (b, 4) in those of each image. r is the rank of the steps, n the states, c the channels.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

Five: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def take(dtype: torch.dtype, slots: Tensor, parameters: Five) -> Five:
    """Of the parameters x_proj_weight (4, r+2n, c), dt_projs_weight (4, c, r), dt_projs_bias (4, c), A_logs (4c, n) and
    Ds (4c,): project, widen, A = -exp(A_logs), D and bias.

    project (.., 2, 2(r+2n), c) and widen (.., 2, 2, c, r) in `dtype`, A (.., 2, 2, c, n), D and bias (.., 2, 2, c); the
    leading axis is b where each image has its own order, or absent.
    """
    x_proj_weight, dt_projs_weight, dt_projs_bias, A_logs, Ds = parameters
    rows, places, c = slots.flatten(), (*slots.shape[:-1], 2, 2), x_proj_weight.shape[-1]
    project = x_proj_weight.index_select(0, rows).to(dtype).view(*places[:-1], -1, c)
    widen = dt_projs_weight.index_select(0, rows).to(dtype).view(*places, c, -1)
    A = -torch.exp(_wide(A_logs.view(4, c, -1).index_select(0, rows))).view(*places, c, -1)
    D, bias = (_wide(t.view(4, c).index_select(0, rows)).view(*places, c) for t in (Ds, dt_projs_bias))
    return project, widen, A, D, bias


def give(slots: Tensor, gradient: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The adjoint for one parameter of this shape: each group's sum over the places (.., 2, 2, ..) that name it."""
    rows = slots.flatten()
    places = gradient.reshape(len(rows), -1).to(dtype)
    return places.new_zeros(4, places.shape[1]).index_add_(0, rows, places).view(shape)


def parameter_shapes(project: Tensor, widen: Tensor, A: Tensor) -> tuple[tuple[int, ...], ...]:
    """The shapes of the five parameters from which these were taken."""
    (c, rank), n = widen.shape[-2:], A.shape[-1]
    return (4, project.shape[-2] // 2, c), (4, c, rank), (4, c), (4 * c, n), (4 * c,)


def steps_of(parts: Tensor, widen: Tensor) -> Tensor:
    """The steps (b, 2, 2, r, l) before they are widened to all channels; parts (b, 2, 2, r+2n, l) holds B and C too."""
    return parts[:, :, :, : widen.shape[-1]]


def scan_inputs(
    u: Tensor, delta: Tensor, parts: Tensor, A: Tensor, D: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What `reference.scan_reference` takes; an image with weights of its own is a pair of groups in a batch of one."""
    n = A.shape[-1]
    B, C = parts[:, :, :, -2 * n : -n], parts[:, :, :, -n:]
    if A.dim() == 4:
        return u, delta, A, B, C, D, bias
    u, delta, B, C = (t.flatten(0, 1)[None] for t in (u, delta, B, C))
    A, D, bias = (t.flatten(0, 1) for t in (A, D, bias))
    return u, delta, A, B, C, D, bias


def _wide(weight: Tensor) -> Tensor:
    """At least float32: the recurrence multiplies rounding errors along the whole sequence."""
    return weight.to(torch.promote_types(weight.dtype, torch.float32))
