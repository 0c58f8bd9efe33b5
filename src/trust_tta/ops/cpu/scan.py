"""The grouped scan on a CPU: compiled loops over rows, forward and backward, spread over threads.

A row is one channel of one image in one direction. What is elementwise (softplus, exp, products) runs over the whole
row in vector registers; only `h = a h + x` is a loop over time, interleaved over four channels to hide its latency. The
backward recomputes the states of a row instead of storing them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trust_tta.ops.cpu.native import array_fields, load_kernel
from trust_tta.ops.cpu.threads import CHUNKS, run_tasks
from trust_tta.ops.cpu.tiling import LANES
from trust_tta.ops.tensors import ScanGradients, ScanInputs


def scan_forward(inputs: ScanInputs) -> tuple[Tensor, Tensor]:
    """See `operators.Backend`; any float dtype, computed in float32 or float64."""
    u = inputs.u
    tensors = _prepare(inputs)
    y = torch.empty_like(tensors[0])
    kernel, arrays = load_kernel("scan_forward", y.dtype), array_fields(*tensors, y)

    def work(first: int, last: int) -> None:
        scratch = torch.empty(3, LANES, u.shape[3], dtype=y.dtype)
        kernel(*array_fields(scratch), *arrays, inputs.delta_softplus, CHUNKS, first, last)

    run_tasks(work, u.shape[0] * u.shape[1] * CHUNKS, inputs.delta.numel())
    return y.to(u.dtype), u.new_empty(0, dtype=torch.float32)


def scan_backward(dy: Tensor, inputs: ScanInputs, states: Tensor) -> ScanGradients:
    """See `operators.Backend`; `states` is not used."""
    tensors = u, delta, A, B, C, D, _ = _prepare(inputs)
    batch, groups, _, length = u.shape
    dy = dy.to(u.dtype).contiguous()
    du, ddelta = torch.empty_like(u), torch.empty_like(delta)
    # One partial sum for each image (A, D, bias) or channel chunk (B, C), added up in a fixed order.
    dA, dD, dbias = (t.new_empty(batch, *t.shape) for t in (A, D, D))
    dB, dC = B.new_zeros(CHUNKS, *B.shape), C.new_zeros(CHUNKS, *C.shape)
    arrays = array_fields(dy, *tensors, du, ddelta, dA, dB, dC, dD, dbias)
    kernel = load_kernel("scan_backward", u.dtype)

    def work(first: int, last: int) -> None:
        scratch = torch.empty(5, LANES, length, dtype=u.dtype)
        kernel(*array_fields(scratch), *arrays, inputs.delta_softplus, CHUNKS, first, last)

    run_tasks(work, batch * groups * CHUNKS, delta.numel())
    gradients = (du, ddelta, dA.sum(0), dB.sum(0), dC.sum(0), dD.sum(0), dbias.sum(0))
    pairs = zip(gradients, inputs[:7], strict=True)
    return ScanGradients(*(inputs.A.new_empty(0) if t is None else g.to(t.dtype) for g, t in pairs))


def states_shape(delta: Sequence[int], state: int) -> tuple[int, ...]:
    """No states are saved."""
    return (0,)


def _prepare(inputs: ScanInputs) -> list[Tensor]:
    """The seven tensors, contiguous and of one dtype; zeros for those that are None."""
    dtype = torch.promote_types(inputs.u.dtype, torch.float32)
    weights = inputs.A.shape[:3]
    tensors = (inputs.A.new_zeros(weights) if t is None else t for t in inputs[:7])
    return [t.detach().to(dtype).contiguous() for t in tensors]
