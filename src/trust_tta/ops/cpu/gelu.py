"""GELU and its derivative in one pass on a CPU, so that the backward is a product."""

from __future__ import annotations

from torch import Tensor

from trust_tta.ops.cpu.native import array_fields, load_kernel
from trust_tta.ops.cpu.threads import run_tasks

SPAN = 1 << 14  # elements of a task


def gelu_and_slope(x: Tensor, out: Tensor) -> None:
    """out = GELU(x), and x becomes its derivative there; both contiguous float32 on a CPU."""
    kernel, values, results = load_kernel("gelu", x.dtype), x.view(-1), out.view(-1)

    def work(first: int, last: int) -> None:
        kernel(*array_fields(values[first * SPAN : last * SPAN], results[first * SPAN : last * SPAN]))

    run_tasks(work, -(-x.numel() // SPAN), x.numel())
