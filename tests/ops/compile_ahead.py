"""Compile a few kernels side by side for an H100, without a GPU: `python -m tests.ops.compile_ahead [PYTHON]`.

Prints for each of four passes how many kernels this process compiled, how many it read from the folder, and how many of
these in the main thread, which launches none of them. PYTHON: the interpreter of the processes that compile.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

from tests.ops.compile_kernels import Driver  # first, as it switches the interpreter off

# isort: split
import torch
from torch import Tensor
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from trust_tta.ops.triton import batch_norm
from trust_tta.ops.triton.compilation import compile_ahead

seen: list[tuple[bool, int]] = []


class Twice(torch.autograd.Function):
    """Launches one kernel in its forward and another in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        vector = torch.zeros(x.shape[1])
        return batch_norm.normalize(x, vector, vector, vector, vector, 1e-5)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        vector = torch.zeros(dy.shape[1])
        return batch_norm.normalize_small(dy[:200].contiguous(), vector, vector, 1e-5)[0].new_zeros(dy.shape)


def work() -> None:
    for c in (32, 64):
        x = torch.zeros(300, c, requires_grad=True)
        y = Twice.apply(x)  # type: ignore[no-untyped-call]
        torch.autograd.grad(y, x, torch.zeros_like(y))


def passed() -> str:
    """The kernels that the listener has seen since the last call."""
    found = seen.copy()
    seen.clear()
    hits = sum(hit for hit, _ in found)
    in_main = sum(thread == MAIN for _, thread in found)
    return f"compiled {len(found) - hits}, cached {hits}, in the main thread {in_main}"


def forget() -> None:
    """Empty the memory of compiled kernels, as in a new process; the folder stays."""
    for value in vars(batch_norm).values():
        if isinstance(value, JITFunction):
            value.device_caches.clear()


MAIN = threading.get_ident()

if __name__ == "__main__":
    sys.executable = next(iter(sys.argv[1:]), sys.executable)
    driver.set_active(Driver())
    knobs.compilation.listener = lambda *, cache_hit, **_: seen.append((cache_hit, threading.get_ident()))
    run = JITFunction.run
    like = torch.zeros(())
    for kind, restart in (("a", False), ("b", False), ("c", True), ("c", True)):
        if restart:
            forget()
        compile_ahead(work, like, kind)
        kinds = {
            type(kernel).__name__
            for value in vars(batch_norm).values()
            if isinstance(value, JITFunction)
            for kernels, *_ in value.device_caches.values()
            for kernel in kernels.values()
        }
        sys.stdout.write(f"{passed()}, kept {kinds}\n")
    assert JITFunction.run is run
