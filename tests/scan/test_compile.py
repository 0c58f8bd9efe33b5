"""Every Triton kernel compiles to machine code for a Hopper GPU, on a machine that has none."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import sys
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from trust_tta.scan import triton_backward, triton_forward, triton_layout, triton_scan

def build(kernel, kinds, constants, warps):
    names = [n for n in kernel.arg_names if n not in constants]
    signature = {n: kinds(n) for n in names} | dict.fromkeys(constants, "constexpr")
    places = {(kernel.arg_names.index(n),): v for n, v in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=places)
    made = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, "enable_fp_fusion": True})
    print(kernel.__name__, len(made.asm["cubin"]))

name, length = sys.argv[1], int(sys.argv[2])
dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[name]
channels, state, side = 96, 1, 7 if length == 49 else 56

def scan_kind(n):
    if n == "groups":
        return "i32"
    wide = n in ("p_A", "p_D", "p_bias", "p_states", "p_adjoints", "p_dA", "p_dB", "p_dC", "p_dD", "p_dbias")
    return "*fp32" if wide else "*" + name

delta, A = torch.empty(1, 2, 2, channels, length, device="meta"), torch.empty(2, 2, channels, state, device="meta")
B = torch.empty(1, 2, 2, state, length, device="meta")
sizes = triton_scan.choose_tiling(channels, length, dtype)
for kernel, tile in ((triton_forward.forward_kernel, sizes.forward), (triton_backward.backward_kernel, sizes.backward)):
    constants = triton_scan._constants(delta, A, B, A, A, True, tile, sizes.spacing)
    options = {"num_warps", "maxnreg", "enable_fp_fusion"}
    build(kernel, scan_kind, {n: v for n, v in constants.items() if n not in options}, tile.warps)

def map_kind(n):
    if n == "eps":
        return "fp32"
    if n[:2] in ("s_", "t_"):
        return "i32"
    return "*fp32" if n in ("mean", "scale", "weight", "bias") else "*" + name

block, few, warps = triton_layout._tile_sizes(torch.empty(1, dtype=dtype), side, side)
place = {"CHANNELS": channels, "HEIGHT": side, "WIDTH": side, "BLOCK_C": few, "BLOCK_S": block}
build(triton_layout.norm_kernel, map_kind, place, warps)
for flag in (True, False):
    build(triton_layout.spread_kernel, map_kind, place | {"SILU": flag}, warps)
    build(triton_layout.join_kernel, map_kind, place | {"SLOPE": flag}, warps)
"""


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("length", [3136, 49])
def test_kernels_compile(dtype: str, length: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", SCRIPT, dtype, str(length)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    sizes = [int(line.split()[1]) for line in run.stdout.splitlines()]
    assert len(sizes) == 7
    assert all(size > 1000 for size in sizes)
