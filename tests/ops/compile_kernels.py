"""Compile the Triton kernels for an H100 or H200 without a GPU: `python -m tests.ops.compile_kernels`.

The launchers are called with CPU tensors; instead of
being launched, a kernel is compiled to a binary of the device by the assembler that comes with Triton.
"""

from __future__ import annotations

import os
import sys

os.environ["TRITON_INTERPRET"] = "0"

from itertools import product  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime import driver  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from trust_tta.ops.tensors import Parameters  # noqa: E402
from trust_tta.ops.triton import (  # noqa: E402
    batch_norm,
    convolution,
    cross_scan_merge,
    depthwise,
    layer_norm,
    linear,
    map_sequences,
    mlp,
    ss2d,
    tiling,
)

MAX_SHARED = 232448  # bytes that a program may use on an H100 or H200
HALF = torch.bfloat16
compiled: set[tuple[str, str]] = set()
run = JITFunction.run


class Driver:
    """An H100, as far as compilation asks."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device


def compile_only(kernel: JITFunction, *arguments: Any, grid: Any, warmup: bool, **constants: Any) -> None:
    """Takes the place of `JITFunction.run`."""
    del warmup
    if "INTERPRETED" in constants:  # the launchers take a CPU tensor for an interpreted one
        constants["INTERPRETED"] = False
    binary = run(kernel, *arguments, grid=grid, warmup=True, **constants)
    name, shared = kernel.__name__, binary.metadata.shared
    compiled.add((name, binary.hash))
    if shared > MAX_SHARED:
        raise RuntimeError(f"{name} takes {shared} bytes of shared memory: {constants}")


def compile_scans() -> None:
    """SS2D's kernels at the stages of VMamba-T, with 16 states, and at odd sizes."""
    shapes = ((96, 56, 6, 1), (192, 28, 12, 1), (384, 14, 24, 1), (768, 7, 48, 1), (96, 17, 6, 1), (48, 32, 3, 16))
    for dtype, (c, side, rank, n) in product((HALF, torch.float32), shapes):
        sizes = ((4, rank + 2 * n, c), (4, c, rank), (4, c), (4 * c, n), (4 * c,))
        parameters, weight = Parameters(*map(torch.zeros, sizes)), torch.zeros(c)
        x = torch.zeros(2, c, side, side, dtype=dtype).contiguous(memory_format=torch.channels_last)
        for directions in (torch.zeros(4, dtype=torch.int64), torch.zeros(2, 4, dtype=torch.int64))[: 1 + (side == 28)]:
            y, saved = ss2d.scan_map_forward(x, directions, parameters)
            for train in (True, False):
                ss2d.scan_map_backward(y, x, directions, saved, train_projections=train, train_scan=train)
        norm, merged, mean, scale = cross_scan_merge.merge_norm(y, side, side, weight, weight, 1e-5)
        for train in (True, False):
            cross_scan_merge.merge_norm_backward(norm, merged, mean, scale, weight, train=train)


def compile_sequences() -> None:
    """The sequences of MSVMamba and EfficientVMamba."""
    for dtype, (c, side, parts) in product((HALF, torch.float32), ((96, 56, 1), (384, 14, 3), (768, 7, 3), (20, 5, 1))):
        x, steps = torch.zeros(2, side, side, c, dtype=dtype), side * side
        for batch in ((), (2,)):
            visits = torch.zeros(*batch, 1, parts * steps, dtype=torch.int64)
            for silu in (True, False):
                u = map_sequences.read_map(x, visits, silu=silu)
                map_sequences.merge_map(
                    u, visits.unflatten(-1, (parts, steps)).squeeze(-3), side, side,
                    add=None if silu else x, silu_of=x if silu else None,
                )  # fmt: skip


def compile_norms() -> None:
    for dtype, (rows, c) in product((HALF, torch.float32), ((1 << 16, 96), (1 << 14, 768), (60000, 20))):
        x, vector, number = torch.zeros(rows, c, dtype=dtype), torch.zeros(c), torch.zeros(())
        batch_norm.moments(x)
        batch_norm.sums(x, x, vector, vector, 1e-5)
        batch_norm.normalize(x, vector, vector, vector, vector, 1e-5)
        few = x[:200]
        batch_norm.normalize_small(few, vector, vector, 1e-5)
        for add in (None, x):
            saved = (vector, vector, vector)
            batch_norm.input_gradient(x, x, saved, (vector, vector), 1e-5, add=add)
            batch_norm.small_gradients(few, few, saved, 1e-5, add=add)
        for add in (None, x):
            norm, mean, scale = layer_norm.layer_norm(x, vector, vector, 1e-5, add=add)
            layer_norm.layer_norm_backward(norm, x, mean, scale, vector, train=add is None, add=add)
        fields = {name: vector if "mean" in name else number for name in batch_norm.StreamStatistics._fields}
        stream = batch_norm.StreamStatistics(**fields)
        for mixing in (None, (4.0, 0.01)):
            batch_norm.follow_stream((vector, vector, number), stream, (vector, vector), mixing, 1e-5, -1 / 1024)


def compile_layers() -> None:
    for dtype, (rows, k, n) in product((HALF, torch.float32), ((12544, 96, 384), (12544, 384, 1536), (49, 768, 3072))):
        x, weight1, weight2 = (torch.zeros(*size, dtype=dtype) for size in ((rows, k), (n, k), (k, n)))
        bias1, bias2 = torch.zeros(n, dtype=dtype), torch.zeros(k, dtype=dtype)
        first, second = (linear.prepare(w, rows=rows) for w in (weight1, weight2))
        turned = linear.prepare(weight2, rows=rows, transposed=True)
        hidden = linear.product(x, first, bias1, gelu=True)
        linear.product(hidden, second, bias2, add=x)
        linear.product(x, turned, slope_at=hidden)
        if dtype == torch.float32:
            linear.weight_gradient(hidden, x)
            linear.hidden_gradient(x, x, first, bias1, turned)
        elif mlp.supports(k, n):
            mlp.mlp(x, weight1, bias1, weight2, bias2, x)
            mlp.mlp_input_gradient(x, x, weight1, bias1, weight2)
        for width in (7, 56):
            maps, taps = torch.zeros(2, 14, width, k, dtype=dtype), torch.zeros(k, 1, 3, 3)
            depthwise.convolve_with_shortcut(maps, taps, taps[:, 0, 0, 0].contiguous(), gelu=True)
            depthwise.convolve_with_shortcut(maps, taps, taps[:, 0, 0, 0].contiguous(), slope_times=maps)
            depthwise.convolve_with_shortcut(maps, taps, None)
    x = torch.zeros(2, 96, 56, 56)
    convolution.sum_patches(convolution.extract_patches(x, 3, 2, 1), x.shape, 2, 1)


def approximate(x: Tensor) -> bool:
    return x.dtype != torch.float32


if __name__ == "__main__":
    driver.set_active(Driver())
    JITFunction.run = compile_only
    for module in (tiling, cross_scan_merge, map_sequences):
        vars(module)["may_approximate"] = approximate
    compile_scans()
    compile_sequences()
    compile_norms()
    compile_layers()
    kernels = {name for name, _ in compiled}
    modules = [module for name, module in sys.modules.items() if name.startswith("trust_tta.ops.triton.")]
    launched = {name for module in modules for name in vars(module) if name.endswith("_kernel")}
    left = ", ".join(sorted(launched - kernels)) or "none"
    sys.stdout.write(f"{len(compiled)} variants of {len(kernels)} kernels; not compiled: {left}\n")
