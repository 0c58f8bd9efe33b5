"""The scan as torch.library operators: fake and autograd rules around the backends' plain functions.

Layouts as in `reference.scan_reference`. `triton` chooses the kernels; everything else follows from the shapes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("trust_tta::scan", mutates_args=())
def scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    delta_bias: Tensor | None,
    delta_softplus: bool,
    triton: bool,
) -> tuple[Tensor, Tensor]:
    """Return y (b, g, c, l) and the states at chunk starts (empty on a CPU, where rows are recomputed whole)."""
    inputs = (u, delta, A, B, C, D, delta_bias)
    if triton:
        from trust_tta.scan import triton_scan

        return triton_scan.forward(*inputs, delta_softplus)
    from trust_tta.scan import cpu

    return cpu.forward(*inputs, delta_softplus), u.new_empty(0, dtype=torch.float32)


@scan.register_fake
def _(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    delta_bias: Tensor | None,
    delta_softplus: bool,
    triton: bool,
) -> tuple[Tensor, Tensor]:
    batch, groups, directions, channels, length = delta.shape
    shape: tuple[int, ...] = (0,)
    if triton:
        from trust_tta.scan.triton_scan import states_shape

        shape = states_shape(batch, groups, directions, channels, length, A.shape[-1])
    return u.new_empty(u.shape), u.new_empty(shape, dtype=torch.float32)


@torch.library.custom_op("trust_tta::scan_backward", mutates_args=())
def scan_backward(
    dy: Tensor,
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    delta_bias: Tensor | None,
    states: Tensor,
    delta_softplus: bool,
    triton: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of u, delta, A, B, C, D and delta_bias; the last two are empty where the input is None."""
    inputs = (u, delta, A, B, C, D, delta_bias)
    if triton:
        from trust_tta.scan import triton_scan

        gradients = triton_scan.backward(dy, *inputs, delta_softplus, states)
    else:
        from trust_tta.scan import cpu

        gradients = cpu.backward(dy, *inputs, delta_softplus)
    du, ddelta, dA, dB, dC, dD, dbias = gradients
    return du, ddelta, dA, dB, dC, _or_empty(dD, D, A), _or_empty(dbias, delta_bias, A)


@scan_backward.register_fake
def _(
    dy: Tensor,
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    delta_bias: Tensor | None,
    states: Tensor,
    delta_softplus: bool,
    triton: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    dD, dbias = (A.new_empty(0) if t is None else t.new_empty(t.shape) for t in (D, delta_bias))
    du, ddelta, dA, dB, dC = (t.new_empty(t.shape) for t in (u, delta, A, B, C))
    return du, ddelta, dA, dB, dC, dD, dbias


def _or_empty(gradient: Tensor | None, source: Tensor | None, A: Tensor) -> Tensor:
    if gradient is None or source is None:
        return A.new_empty(0)
    return gradient.to(source.dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.delta_softplus, ctx.triton = inputs
    ctx.save_for_backward(*tensors, output[1])
    ctx.mark_non_differentiable(output[1])
    # Else PyTorch would fill a zero gradient for each output that has none.
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    *inputs, states = ctx.saved_tensors
    gradients = scan_backward(dy, *inputs, states, ctx.delta_softplus, ctx.triton)
    present = [g if t is not None else None for g, t in zip(gradients, inputs, strict=True)]
    return (*present, None, None)


scan.register_autograd(_differentiate, setup_context=_save)
