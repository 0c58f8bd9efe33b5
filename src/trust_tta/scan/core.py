"""The heart of SS2D as two torch.library operators: the scans of a map, and the norm of their sum.

Called bare where nothing is differentiated or compiled: the operators' own overhead is most of a small batch's time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trust_tta.scan import groups, layout


def run_scan_map(
    x: Tensor,
    slots: Tensor,
    x_proj_weight: Tensor,
    dt_projs_weight: Tensor,
    dt_projs_bias: Tensor,
    A_logs: Tensor,
    Ds: Tensor,
    triton: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Scan SiLU(x), x (b, c, h, w), along rows and columns, both ways, by the groups that `slots` names in each place.

    Returns y (b, 2, c, h*w), and for the backward: steps with B and C (b, 2, 2, r+2n, l), the states of the scan, on a
    CPU the sequences (b, 2, c, l) and all steps (b, 2, 2, c, l), and the five of `groups.take`.
    """
    parameters = (x_proj_weight, dt_projs_weight, dt_projs_bias, A_logs, Ds)
    if triton:
        from trust_tta.scan import triton_map

        *results, taken = triton_map.forward(x, slots, parameters)
    else:
        from trust_tta.scan import cpu_map

        *results, taken = cpu_map.forward(x, slots, parameters)
    return *results, *taken  # type: ignore[return-value]


scan_map = torch.library.custom_op("trust_tta::scan_map", run_scan_map, mutates_args=())


@scan_map.register_fake
def _(
    x: Tensor,
    slots: Tensor,
    x_proj_weight: Tensor,
    dt_projs_weight: Tensor,
    dt_projs_bias: Tensor,
    A_logs: Tensor,
    Ds: Tensor,
    triton: bool,
) -> tuple[Tensor, ...]:
    b, c, h, w = x.shape
    y = x.new_empty((b, 2, c, h * w))
    parts = x.new_empty((b, 2, 2, x_proj_weight.shape[1], h * w))
    taken = groups.take(x.dtype, slots, (x_proj_weight, dt_projs_weight, dt_projs_bias, A_logs, Ds))
    if not triton:
        states = x.new_empty(0, dtype=torch.float32)
        return y, parts, states, torch.empty_like(y), x.new_empty((b, 2, 2, c, h * w)), *taken
    from trust_tta.scan.triton_scan import states_shape

    images, pairs = (b, 2) if slots.dim() == 1 else (1, 2 * b)
    states = x.new_empty(states_shape(images, pairs, 2, c, h * w, A_logs.shape[1]), dtype=torch.float32)
    return y, parts, states, x.new_empty(0), x.new_empty(0), *taken


@torch.library.custom_op("trust_tta::scan_map_backward", mutates_args=())
def scan_map_backward(
    dy: Tensor,
    x: Tensor,
    slots: Tensor,
    parts: Tensor,
    states: Tensor,
    u: Tensor,
    delta: Tensor,
    project: Tensor,
    widen: Tensor,
    A: Tensor,
    D: Tensor,
    bias: Tensor,
    learn_products: bool,
    learn_scan: bool,
    triton: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x and, in A's dtype, of the five parameters.

    Those of x_proj_weight and dt_projs_weight are empty unless `learn_products`, the others unless `learn_scan`.
    """
    taken = (project, widen, A, D, bias)
    if triton:
        from trust_tta.scan import triton_map

        dx, five = triton_map.backward(dy, x, slots, taken, parts, states, learn_products, learn_scan)
    else:
        from trust_tta.scan import cpu_map

        dx, five = cpu_map.backward(dy, x, slots, taken, parts, u, delta, learn_products, learn_scan)
    return dx, *five


@scan_map_backward.register_fake
def _(
    dy: Tensor,
    x: Tensor,
    slots: Tensor,
    parts: Tensor,
    states: Tensor,
    u: Tensor,
    delta: Tensor,
    project: Tensor,
    widen: Tensor,
    A: Tensor,
    D: Tensor,
    bias: Tensor,
    learn_products: bool,
    learn_scan: bool,
    triton: bool,
) -> tuple[Tensor, ...]:
    dx = x.new_empty((x.shape[0], *x.shape[2:], x.shape[1])).permute(0, 3, 1, 2)
    wanted = (learn_products, learn_products, learn_scan, learn_scan, learn_scan)
    shapes = groups.parameter_shapes(project, widen, A)
    return dx, *(A.new_empty(shape if w else 0) for shape, w in zip(shapes, wanted, strict=True))


def _save_map(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.triton = inputs[-1]
    ctx.save_for_backward(*inputs[:2], *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    # Else PyTorch would fill a zero gradient for each output that has none.
    ctx.set_materialize_grads(False)


def _differentiate_map(ctx: Any, dy: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    wanted = ctx.needs_input_grad[2:7]
    learning = any(wanted[:2]), any(wanted[2:])
    dx, *five = scan_map_backward(dy, *ctx.saved_tensors, *learning, ctx.triton)
    return (dx, None, *(gradient if w else None for gradient, w in zip(five, wanted, strict=True)), None)


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
    # On a GPU PyTorch has this for weights of the map's dtype only; the bias it asks for, but does not read.
    factor = weight.to(x.dtype) if triton else weight
    dx, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
        dnorm.contiguous(), x, x.shape[-1:], mean, scale, factor, factor, [True, learning, learning]
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
    # Else PyTorch would fill a zero gradient for each output that has none.
    ctx.set_materialize_grads(False)


def _differentiate_norm(ctx: Any, dnorm: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    learning = any(ctx.needs_input_grad[3:5])
    dy, dweight, dbias = join_norm_backward(dnorm, *ctx.saved_tensors, learning, ctx.triton)
    return (dy, None, None, dweight if learning else None, dbias if learning else None, None, None)


join_norm.register_autograd(_differentiate_norm, setup_context=_save_norm)
