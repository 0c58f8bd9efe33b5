"""The selective scan on a CPU: compiled loops over rows, forward and backward, spread over threads.

A row is one channel of one image in one direction. What is elementwise (softplus, exp, products) runs
over the whole row in vector registers; only `h = a h + x` is a loop over time, interleaved over four
channels to hide its latency. The backward recomputes the states of a row instead of storing them.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from trust_tta.scan import cpu_kernels
from trust_tta.scan.cpu_kernels import LANES
from trust_tta.scan.threads import CHUNKS, run_tasks


def forward(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    delta_bias: Tensor | None,
    delta_softplus: bool,
) -> Tensor:
    """Shapes as in `reference.scan_reference`; any float dtype, computed in float32 or float64."""
    inputs = _prepare(u, delta, A, B, C, D, delta_bias)
    y = torch.empty_like(inputs[0])
    arrays = [t.numpy() for t in (*inputs, y)]

    def work(first: int, last: int) -> None:
        scratch = np.empty((3, LANES, u.shape[3]), arrays[0].dtype)
        cpu_kernels.forward(scratch, *arrays, delta_softplus, CHUNKS, first, last)

    run_tasks(work, u.shape[0] * u.shape[1] * CHUNKS, delta.numel())
    return y.to(u.dtype)


def backward(
    dy: Tensor,
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    delta_bias: Tensor | None,
    delta_softplus: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of u, delta, A, B, C, D and delta_bias, each in the dtype of its input (D and bias: A's)."""
    inputs = _prepare(u, delta, A, B, C, D, delta_bias)
    x, dt, a, b, c, d, _ = inputs
    batch = x.shape[0]
    dy = dy.to(x.dtype).contiguous()
    du, ddelta = torch.empty_like(x), torch.empty_like(dt)
    # One partial sum for each image (A, D, bias) or channel chunk (B, C), added up in a fixed order.
    dA, dD, dbias = (t.new_empty(batch, *t.shape) for t in (a, d, d))
    dB, dC = b.new_zeros(CHUNKS, *b.shape), c.new_zeros(CHUNKS, *c.shape)
    arrays = [t.numpy() for t in (dy, *inputs, du, ddelta, dA, dB, dC, dD, dbias)]

    def work(first: int, last: int) -> None:
        scratch = np.empty((5, LANES, u.shape[3]), arrays[0].dtype)
        cpu_kernels.backward(scratch, *arrays, delta_softplus, CHUNKS, first, last)

    run_tasks(work, batch * u.shape[1] * CHUNKS, delta.numel())
    return (
        du.to(u.dtype),
        ddelta.to(delta.dtype),
        dA.sum(0).to(A.dtype),
        dB.sum(0).to(B.dtype),
        dC.sum(0).to(C.dtype),
        dD.sum(0).to(A.dtype),
        dbias.sum(0).to(A.dtype),
    )


def _prepare(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, delta_bias: Tensor | None
) -> list[Tensor]:
    dtype = torch.promote_types(u.dtype, torch.float32)
    zeros = A.new_zeros(A.shape[:3]) if D is None or delta_bias is None else A
    tensors = (u, delta, A, B, C, zeros if D is None else D, zeros if delta_bias is None else delta_bias)
    return [t.detach().to(dtype).contiguous() for t in tensors]
