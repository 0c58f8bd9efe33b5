"""The heart of SS2D as two torch.library operators: the scans of a map, and the norm of their sum.

Called bare where nothing is differentiated or compiled: the operators' own overhead is most of a small batch's time.
On a GPU nothing that is large is kept for the backward if it can be made again: the two sequences and the four step
sizes would take six maps a block, and the map they come from is there anyway. On a CPU time is what counts: kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trust_tta.scan import layout


def run_scan_map(
    x: Tensor, project: Tensor, widen: Tensor, A: Tensor, D: Tensor, bias: Tensor, triton: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Scan SiLU(x), x (b, c, h, w), along rows and columns, both ways.

    project (.., 2, 2(r+2n), c) makes steps, B and C of each position, widen (.., 2, 2, c, r) the steps of each channel;
    A (.., 2, 2, c, n), D and bias (.., 2, 2, c). The leading axis is b where each image has its own weights, or absent.
    Returns y (b, 2, c, h*w), and for the backward: steps with B and C (b, 2, 2, r+2n, l), the states of the scan, and
    on a CPU the sequences (b, 2, c, l) and all steps (b, 2, 2, c, l).
    """
    u = layout.spread(x, silu=True, triton=triton)
    parts = (project @ u).unflatten(2, (2, -1))
    delta = widen @ steps_of(parts, widen)
    inputs = as_groups(u, delta, parts, A, D, bias)
    if triton:
        from trust_tta.scan import triton_scan

        y, states = triton_scan.forward(*inputs, True)
        return y.view_as(u), parts, states, u.new_empty(0), u.new_empty(0)
    from trust_tta.scan import cpu

    y = cpu.forward(*inputs, True)
    return y.view_as(u), parts, u.new_empty(0, dtype=torch.float32), u, delta


scan_map = torch.library.custom_op("trust_tta::scan_map", run_scan_map, mutates_args=())


@scan_map.register_fake
def _(
    x: Tensor, project: Tensor, widen: Tensor, A: Tensor, D: Tensor, bias: Tensor, triton: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    b, c, h, w = x.shape
    y = x.new_empty((b, 2, c, h * w))
    parts = x.new_empty((b, 2, 2, project.shape[-2] // 2, h * w))
    if not triton:
        return y, parts, x.new_empty(0, dtype=torch.float32), torch.empty_like(y), x.new_empty((b, 2, 2, c, h * w))
    from trust_tta.scan.triton_scan import states_shape

    images, groups = (1, 2 * b) if A.dim() == 5 else (b, 2)
    states = x.new_empty(states_shape(images, groups, 2, c, h * w, A.shape[-1]), dtype=torch.float32)
    return y, parts, states, x.new_empty(0), x.new_empty(0)


@torch.library.custom_op("trust_tta::scan_map_backward", mutates_args=())
def scan_map_backward(
    dy: Tensor,
    x: Tensor,
    project: Tensor,
    widen: Tensor,
    A: Tensor,
    D: Tensor,
    bias: Tensor,
    parts: Tensor,
    states: Tensor,
    u: Tensor,
    delta: Tensor,
    learning: bool,
    triton: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, project, widen, A, D and bias; those of project and widen are empty unless `learning`."""
    h, w = x.shape[2:]
    steps = steps_of(parts, widen)
    if triton:
        u, delta = layout.spread(x, silu=True, triton=True), widen @ steps
    inputs = as_groups(u, delta, parts, A, D, bias)
    dy = dy.reshape(inputs[0].shape)
    if triton:
        from trust_tta.scan import triton_scan

        gradients: Any = triton_scan.backward(dy, *inputs, True, states)
    else:
        from trust_tta.scan import cpu

        gradients = cpu.backward(dy, *inputs, True)
    du, ddelta, dA, dB, dC, dD, dbias = gradients
    du, ddelta = du.view_as(u), ddelta.view_as(delta)
    dB, dC = (t.view(*parts.shape[:3], -1, h * w) for t in (dB, dC))
    dparts = torch.cat((widen.mT @ ddelta, dB, dC), 3).flatten(2, 3)
    du += project.mT @ dparts
    dx = layout.join(du, h, w, silu_of=x, triton=triton)
    dproject, dwiden = x.new_empty(0), x.new_empty(0)
    if learning:
        dproject, dwiden = _sum_to(dparts @ u.mT, project), _sum_to(ddelta @ steps.mT, widen)
    return (
        dx,
        dproject,
        dwiden,
        dA.view_as(A).to(A.dtype),
        dD.view_as(D).to(D.dtype),
        dbias.view_as(bias).to(bias.dtype),
    )


@scan_map_backward.register_fake
def _(
    dy: Tensor,
    x: Tensor,
    project: Tensor,
    widen: Tensor,
    A: Tensor,
    D: Tensor,
    bias: Tensor,
    parts: Tensor,
    states: Tensor,
    u: Tensor,
    delta: Tensor,
    learning: bool,
    triton: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    dx = x.new_empty((x.shape[0], *x.shape[2:], x.shape[1])).permute(0, 3, 1, 2)
    dproject, dwiden = (t.new_empty(t.shape if learning else 0) for t in (project, widen))
    dA, dD, dbias = (t.new_empty(t.shape) for t in (A, D, bias))
    return dx, dproject, dwiden, dA, dD, dbias


def steps_of(parts: Tensor, widen: Tensor) -> Tensor:
    """The steps (b, 2, 2, r, l) before they are widened to all channels."""
    return parts[:, :, :, : widen.shape[-1]]


def as_groups(
    u: Tensor, delta: Tensor, parts: Tensor, A: Tensor, D: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The scan's inputs; where each image has its own weights, each is a group of its own in a batch of one."""
    n = A.shape[-1]
    B, C = parts[:, :, :, -2 * n : -n], parts[:, :, :, -n:]
    if A.dim() == 4:
        return u, delta, A, B, C, D, bias
    u, delta, B, C = (t.flatten(0, 1)[None] for t in (u, delta, B, C))
    A, D, bias = (t.flatten(0, 1) for t in (A, D, bias))
    return u, delta, A, B, C, D, bias


def _sum_to(gradient: Tensor, weight: Tensor) -> Tensor:
    """The sum over the images (b, ..) where they share the weight."""
    return gradient if gradient.shape == weight.shape else gradient.sum(0)


def _save_map(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.triton = inputs
    ctx.save_for_backward(*tensors, *output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _differentiate_map(ctx: Any, dy: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    learning = any(ctx.needs_input_grad[1:3])
    dx, dproject, dwiden, *rest = scan_map_backward(dy, *ctx.saved_tensors, learning, ctx.triton)
    return (dx, dproject if learning else None, dwiden if learning else None, *rest, None)


scan_map.register_autograd(_differentiate_map, setup_context=_save_map)


def run_join_norm(
    y: Tensor, height: int, width: int, weight: Tensor, bias: Tensor, eps: float, triton: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Both sequences of y (b, 2, c, h*w) in their places, summed, and normalised over the channels, (b, h, w, c)."""
    return layout.join_and_normalise(y, height, width, weight, bias, eps, triton=triton)


join_norm = torch.library.custom_op("trust_tta::join_norm", run_join_norm, mutates_args=())


@join_norm.register_fake
def _(
    y: Tensor, height: int, width: int, weight: Tensor, bias: Tensor, eps: float, triton: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    b, _, c, _ = y.shape
    normal, x = (y.new_empty((b, height, width, c)) for _ in range(2))
    # PyTorch's layer norm on a CPU keeps its statistics in the dtype of its weights.
    dtype = torch.float32 if triton else weight.dtype
    mean, scale = (y.new_empty((b, height, width, 1), dtype=dtype) for _ in range(2))
    return normal, x, mean, scale


@torch.library.custom_op("trust_tta::join_norm_backward", mutates_args=())
def join_norm_backward(
    dnorm: Tensor, x: Tensor, mean: Tensor, scale: Tensor, weight: Tensor, bias: Tensor, learning: bool, triton: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of y (b, 2, c, h*w), weight and bias (c,); the last two are empty unless `learning`."""
    # On a GPU PyTorch has this for weights of the map's dtype only.
    factors = [t.to(x.dtype) if triton else t for t in (weight, bias)]
    dx, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
        dnorm.contiguous(), x, x.shape[-1:], mean, scale, *factors, [True, learning, learning]
    )
    dy = layout.spread(dx.permute(0, 3, 1, 2), silu=False, triton=triton)
    if not learning:
        return dy, weight.new_empty(0), bias.new_empty(0)
    return dy, dweight.to(weight.dtype), dbias.to(bias.dtype)


@join_norm_backward.register_fake
def _(
    dnorm: Tensor, x: Tensor, mean: Tensor, scale: Tensor, weight: Tensor, bias: Tensor, learning: bool, triton: bool
) -> tuple[Tensor, Tensor, Tensor]:
    b, h, w, c = x.shape
    dweight, dbias = (t.new_empty(t.shape if learning else 0) for t in (weight, bias))
    return x.new_empty((b, 2, c, h * w)), dweight, dbias


def _save_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, _, weight, bias, _, ctx.triton = inputs
    ctx.save_for_backward(*output[1:], weight, bias)
    ctx.mark_non_differentiable(*output[1:])


def _differentiate_norm(ctx: Any, dnorm: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    learning = any(ctx.needs_input_grad[3:5])
    dy, dweight, dbias = join_norm_backward(dnorm, *ctx.saved_tensors, learning, ctx.triton)
    return (dy, None, None, dweight if learning else None, dbias if learning else None, None, None)


join_norm.register_autograd(_differentiate_norm, setup_context=_save_norm)
