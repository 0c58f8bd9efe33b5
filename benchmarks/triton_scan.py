"""Parity and speed of the Triton scan on a CUDA device, at the shapes of VMamba-T.

python benchmarks/triton_scan.py RESULT.json [--sweep] [--batch 128]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from trust_tta.ops.tensors import ScanInputs
from trust_tta.ops.triton import scan_backward, scan_forward
from trust_tta.ops.triton.tiling import Tile, Tiling, make_tiling

STAGES = ((96, 3136), (192, 784), (384, 196), (768, 49))
FORMS = ((2, 2), (4, 1))
DTYPES = (torch.float32, torch.bfloat16)
NAMES = ("y", "du", "ddelta", "dA", "dB", "dC", "dD", "dbias")
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class Shape:
    """A scan: u (batch, groups, channels, length), in so many directions, with so many states."""

    batch: int
    groups: int
    directions: int
    channels: int
    length: int
    state: int = 1


Job = tuple[Shape, torch.dtype, Tiling | None]


def random_inputs(shape: Shape, dtype: torch.dtype) -> ScanInputs:
    """u, delta, A, B, C, D and delta_bias; B and C are slices of one projection, as in the network."""
    b, g, m, c, n, length = shape.batch, shape.groups, shape.directions, shape.channels, shape.state, shape.length

    def normal(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(size, device="cuda", dtype=dtype)

    u, delta = normal(b, g, c, length, dtype=dtype), normal(b, g, m, c, length, dtype=dtype)
    projected = normal(b, g, m, 2 + 2 * n, length, dtype=dtype)
    A, D, bias = -torch.exp(normal(g, m, c, n)), normal(g, m, c), normal(g, m, c) - 4
    return ScanInputs(u, delta, A, projected[..., 2 : 2 + n, :], projected[..., 2 + n :, :], D, bias)


def reference(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, bias: Tensor) -> Tensor:
    """The scan in float64 by doubling: after step s each state has gathered its last 2 s inputs."""
    u, delta, A, B, C, D, bias = (t.double() for t in (u, delta, A, B, C, D, bias))
    x = delta + bias[..., None]
    d = torch.where(x > 20, x, torch.log1p(torch.exp(x.clamp(max=20))))
    a = torch.exp(d.unsqueeze(-2) * A[..., None])
    h = (d * u.unsqueeze(2)).unsqueeze(-2) * B.unsqueeze(3)
    a, h = _turn(a), _turn(h)
    step = 1
    while step < a.shape[-1]:
        h = h + a * F.pad(h[..., :-step], (step, 0))
        a = a * F.pad(a[..., :-step], (step, 0), value=1.0)
        step *= 2
    y = (_turn(h) * C.unsqueeze(3)).sum(-2) + D[..., None] * u.unsqueeze(2)
    return y.sum(2)


def _turn(x: Tensor) -> Tensor:
    """x (b, g, m, ...) with direction 1 back to front, if there is one."""
    return x if x.shape[2] == 1 else torch.stack((x[:, :, 0], x[:, :, 1].flip(-1)), 2)


def parity(shape: Shape, dtype: torch.dtype) -> dict[str, Any]:
    """Relative errors of y and of every gradient against float64, and whether two backward runs agree bit for bit."""
    inputs = random_inputs(shape, dtype)
    leaves = [t.double().requires_grad_() for t in inputs[:7] if t is not None]
    expected = reference(*leaves)
    dy = torch.randn_like(inputs.u)
    wanted = [expected.detach(), *torch.autograd.grad(expected, leaves, dy.double())]
    y, states = scan_forward(inputs)
    found, again = (scan_backward(dy, inputs, states) for _ in range(2))
    errors = {
        name: ((f.double() - w).norm() / w.norm()).item() for name, f, w in zip(NAMES, (y, *found), wanted, strict=True)
    }
    repeats = all(torch.equal(f, a) for f, a in zip(found, again, strict=True))
    passed = repeats and all(error <= TOLERANCES[dtype] for error in errors.values())
    return {**asdict(shape), "dtype": str(dtype), "errors": errors, "repeats": repeats, "passed": passed}


def floor_bytes(inputs: ScanInputs) -> tuple[int, int]:
    """Bytes that forward and backward must move: each input read once, each output written once."""
    u, delta, B, C = (t.numel() * t.element_size() for t in (inputs.u, inputs.delta, inputs.B, inputs.C))
    return 2 * u + delta + B + C, 3 * u + 2 * (delta + B + C)


def device_ms(work: Callable[[], object]) -> float:
    """Median time of a replayed graph of `work`, so that launching from Python does not count."""
    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return float(triton.testing.do_bench(graph.replay, warmup=5, rep=25, return_mode="median"))


def host_us(work: Callable[[], object], calls: int = 200) -> float:
    """Time in which Python launches `work` once, the device keeping up."""
    work()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        work()
    seconds = time.perf_counter() - start
    torch.cuda.synchronize()
    return seconds / calls * 1e6


def launching() -> dict[str, float]:
    """Host time of a call at batch 1, where it is what counts."""
    inputs = random_inputs(Shape(1, 2, 2, 768, 49), torch.float32)
    y, states = scan_forward(inputs)
    return {
        "forward_us": host_us(lambda: scan_forward(inputs)),
        "backward_us": host_us(lambda: scan_backward(y, inputs, states)),
    }


def timing(shape: Shape, dtype: torch.dtype, tiling: Tiling | None, bandwidth: float) -> dict[str, Any]:
    """Median times of forward and backward on the device in ms, and their ratios to the byte floor."""
    inputs = random_inputs(shape, dtype)
    dy = torch.randn_like(inputs.u)
    _, states = scan_forward(inputs, tiling=tiling)
    forward = device_ms(lambda: scan_forward(inputs, tiling=tiling))
    backward = device_ms(lambda: scan_backward(dy, inputs, states, tiling=tiling))
    torch.cuda.empty_cache()  # the graphs' pools are freed only here
    floors = [bytes_ / bandwidth * 1e3 for bytes_ in floor_bytes(inputs)]
    return {
        **asdict(shape),
        "dtype": str(dtype),
        "sizes": None if tiling is None else asdict(tiling),
        "forward_ms": forward,
        "backward_ms": backward,
        "forward_ratio": forward / floors[0],
        "backward_ratio": backward / floors[1],
    }


def copy_bandwidth() -> float:
    """Bytes per second of a device-to-device copy, read and written."""
    source = torch.randn(1 << 29, device="cuda")
    target = torch.empty_like(source)
    ms = float(triton.testing.do_bench(lambda: target.copy_(source), warmup=5, rep=40, return_mode="median"))
    return 2 * source.numel() * source.element_size() / ms * 1e3


def candidates(length: int, dtype: torch.dtype) -> list[Tile]:
    """A handful of tiles for rows of this length."""
    # A warp reads 128 positions at once in float32, 256 in bfloat16.
    full = 128 if dtype == torch.float32 else 256
    if length <= 64:
        pairs = ((1, 1), (2, 1), (4, 1), (8, 1), (4, 2), (8, 2), (16, 2), (8, 4), (16, 4), (32, 4), (16, 8), (32, 8))
        return [Tile(c, 64, w) for c, w in pairs]
    tiles = [
        Tile(1, full, 1),
        Tile(2, full, 1),
        Tile(4, full, 2),
        Tile(4, full, 4),
        Tile(4, full, 4, 128),
        Tile(8, full, 4),
        Tile(8, full, 4, 168),
        Tile(8, full, 8),
        Tile(8, full, 8, 128),
        Tile(8, full, 8, 96),
        Tile(16, full, 8, 128),
        Tile(16, full, 16, 128),
    ]
    others = [Tile(1, 256, 1), Tile(2, 256, 1)] if full == 128 else [Tile(2, 128, 1), Tile(8, 128, 4)]
    return [*tiles, *others, *([Tile(1, 512, 1)] if length > 256 else [])]


def warm(job: Job) -> str | None:
    """Compile both kernels for one job into the shared cache; the error, if there is one."""
    shape, dtype, tiling = job
    try:
        inputs = random_inputs(shape, dtype)
        y, states = scan_forward(inputs, tiling=tiling)
        scan_backward(y, inputs, states, tiling=tiling)
        torch.cuda.synchronize()
    except Exception as error:  # a launch size that the device cannot take is a result, not a failure
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None


def sweep_jobs(batch: int) -> list[Job]:
    return [
        (Shape(batch, 2, 2, channels, length), dtype, make_tiling(channels, length, forward=tile, backward=tile))
        for channels, length in STAGES
        for dtype in DTYPES
        for tile in candidates(length, dtype)
    ]


def where(r: dict[str, Any]) -> str:
    return f"G{r['groups']} M{r['directions']} C{r['channels']:<4} L{r['length']:<5}N{r['state']} {r['dtype'][6:]:9}"


def print_check(check: dict[str, Any]) -> None:
    errors = check["errors"]
    worst = max(errors, key=errors.get)
    verdict = "ok " if check["passed"] else "BAD"
    print(
        f"{verdict} {where(check)} y {errors['y']:.1e}, worst {worst} {errors[worst]:.1e}, repeats {check['repeats']}"
    )


def print_times(r: dict[str, Any]) -> None:
    forward = f"forward {r['forward_ms']:.3f} ms {r['forward_ratio']:5.2f}x"
    print(f"{where(r)} {forward}   backward {r['backward_ms']:.3f} ms {r['backward_ratio']:5.2f}x")


def print_best(swept: list[dict[str, Any]], count: int = 5) -> None:
    """The fastest tiles of each stage and dtype: (channels, positions, warps, stages) and ms."""
    for place in dict.fromkeys(where(r) for r in swept):
        for kind in ("forward", "backward"):
            rows = sorted((r for r in swept if where(r) == place), key=lambda r: float(r[f"{kind}_ms"]))
            tiles = [f"{tuple(r['sizes'][kind].values())} {r[f'{kind}_ms']:.3f}" for r in rows]
            print(f"{place} {kind:8} {'  '.join(tiles[:count])}".replace("None", "-"))


def write(path: Path, record: dict[str, Any]) -> None:
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(json.dumps(record, indent=1))
    temporary.replace(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", type=Path)
    parser.add_argument("--sweep", action="store_true", help="also time several launch sizes at each stage")
    parser.add_argument("--batch", type=int, default=128)
    arguments = parser.parse_args()
    start = time.perf_counter()
    places = [(g, m, c, n, dtype) for g, m in FORMS for c, n in STAGES for dtype in DTYPES]
    jobs: list[Job] = [(Shape(1, *place), dtype, None) for *place, dtype in places]
    jobs += sweep_jobs(1) if arguments.sweep else []
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(12, os.cpu_count() or 1), mp_context=context) as pool:
        errors = list(pool.map(warm, jobs))
    print(f"compiled {len(jobs)} jobs in {time.perf_counter() - start:.0f} s")
    for job, error in zip(jobs, errors, strict=True):
        if error is not None:
            print("cannot run", job, error)

    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, triton {triton.__version__}, copy {bandwidth / 1e12:.2f} TB/s")
    checks = [parity(Shape(2, *place), dtype) for *place, dtype in places]
    checks.append(parity(Shape(2, 2, 2, 40, 300, 16), torch.float32))
    for check in checks:
        print_check(check)
    times = [timing(Shape(arguments.batch, *place), dtype, None, bandwidth) for *place, dtype in places]
    for row in times:
        print_times(row)
    host = launching()
    print(f"host at batch 1: forward {host['forward_us']:.0f} us, backward {host['backward_us']:.0f} us")
    record: dict[str, Any] = {"bandwidth": bandwidth, "host": host, "parity": checks, "times": times}
    write(arguments.result, record)
    if arguments.sweep:
        runnable = [j for j, e in zip(sweep_jobs(arguments.batch), errors[len(places) :], strict=True) if e is None]
        swept = [timing(*job, bandwidth) for job in runnable]
        print_best(swept)
        write(arguments.result, {**record, "sweep": swept})
    print(f"{time.perf_counter() - start:.0f} s")
    return 0 if all(check["passed"] for check in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
