"""How the cost of an image grows with the batch, the pixels and the number of orders, on one device.

    python -m benchmarks.scaling --out docs/results/scaling_h200.json
    python -m benchmarks.scaling --device cpu --out docs/results/scaling_cpu.json

On a GPU VMamba-T in bf16, on a CPU `vmamba_nano` in float32, both with random weights. On a CPU every point has a
process of its own, whose largest resident memory is its peak. A run that was broken off goes on from its record, whose
facts are then those of the last run. `--quick --device cpu` tries the script.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import resource
import statistics
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from benchmarks.order_analysis import take_orders
from benchmarks.pages import write_record

from trust_tta.bench.environment import collect_provenance
from trust_tta.bench.timing import Case, Timing, TimingLimits, Work, measure
from trust_tta.methods.registry import create_method
from trust_tta.models.typed import create_model


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The settings to measure: each axis in turn, the other two fixed."""

    model: str = "vmamba_tiny_s1l8_bn"
    dtype: str = "bf16"
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
    sizes: tuple[int, ...] = (32, 64, 128, 224, 384, 512, 768, 1024)
    orders: tuple[int, ...] = (1, 2, 4, 6, 12, 24)
    size: int = 224  # of the batches and the orders
    batch: int = 8  # of the sizes
    few: int = 32  # images of the orders


ON_CPU = Plan(
    model="vmamba_nano",
    dtype="float32",
    sizes=(32, 64, 128, 224, 384, 512, 768, 1024),
    size=32,
    batch=1,
)
WORKS = ("source", "trust_naive", "tide")  # of the batches and the sizes
QUICK = Plan(model="vmamba_nano", batches=(1, 2), sizes=(16, 32), orders=(1, 2), size=16, batch=2, few=2)


def timings(plan: Plan, backend: str) -> Iterator[Timing]:
    """Every point of every axis, without its numbers."""
    fixed: dict[str, Any] = {"backend": backend, "dtype": plan.dtype}
    yield from (Timing(part="k", work="trust", batch=plan.few, size=plan.size, k=k, **fixed) for k in plan.orders)
    for work in WORKS:
        yield from (Timing(part="batch", work=work, batch=b, size=plan.size, **fixed) for b in plan.batches)
        yield from (Timing(part="pixels", work=work, batch=plan.batch, size=s, **fixed) for s in plan.sizes)


def point(timing: Timing, model: Any, device: torch.device, limits: TimingLimits) -> Timing:
    """The timing with its numbers."""

    @contextmanager
    def prepare() -> Iterator[Work]:
        draw = torch.Generator().manual_seed(0)
        images = torch.randn(timing.batch, 3, timing.size, timing.size, generator=draw).to(device)
        options = {} if timing.k is None else {"orders": take_orders(timing.k)}
        method = create_method(timing.work, model, **options)
        try:
            yield lambda: method(images)
        finally:
            method.reset()

    return measure(Case(timing=timing, prepare=prepare, limits=limits), device)


def physical_memory() -> int:
    """Bytes of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def point_alone(timing: Timing, plan: Plan, limits: TimingLimits) -> Timing:
    """The same on a CPU, for a process of its own, which leaves others some of the memory."""
    most = int(0.8 * physical_memory())
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    torch.manual_seed(0)
    found = point(timing, create_model(plan.model).eval(), torch.device("cpu"), limits)
    return replace(found, peak_bytes=1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def points(plan: Plan, device: torch.device, limits: TimingLimits, known: Sequence[Timing]) -> Iterator[Timing]:
    """All timings with their numbers, as they come; those that are `known` come as they are."""
    found = {_point(timing): timing for timing in known}
    if device.type == "cpu":
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as pool:
            for timing in timings(plan, "cpu"):
                yield found.get(_point(timing)) or pool.submit(point_alone, timing, plan, limits).result()
        return
    torch.manual_seed(0)
    model = create_model(plan.model).to(device).eval()
    for timing in timings(plan, "triton"):
        yield found.get(_point(timing)) or point(timing, model, device, limits)


def _point(timing: Timing) -> tuple[Any, ...]:
    return timing.part, timing.work, timing.batch, timing.size, timing.k


def read_known(path: Path, plan: Plan) -> list[Timing]:
    """The timings of a record that was broken off."""
    record = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if record and record["plan"] != json.loads(json.dumps(asdict(plan))):
        raise SystemExit(f"{path} has another plan; name another file for --out")
    return [Timing(**row) for row in record.get("rows", ())]


def compile_size(plan: Plan, size: int, device: str) -> None:
    """Compile the kernels for images of one size into the shared cache: their lengths are constants."""
    model = create_model(plan.model).to(device).eval()
    limits = TimingLimits(seconds=0.0, min_repeats=1)
    batches = (plan.batch,) if size != plan.size else (plan.batch, *plan.batches[:-1])
    for batch in batches:
        for work in WORKS:
            place = Timing(part="", work=work, backend="", dtype=plan.dtype, batch=batch, size=size)
            point(place, model, torch.device(device), limits)


def conclude(rows: Sequence[Timing]) -> list[dict[str, Any]]:
    """For each axis and work: the exponent of the upper half, where the device is full, the steepest step, memory."""
    found = []
    for part, work in dict.fromkeys((row.part, row.work) for row in rows):
        chosen = [row for row in rows if (row.part, row.work) == (part, work) and row.median_ms]
        points = [(place(row), float(row.median_ms or 0)) for row in chosen]
        steps = [
            math.log(later / sooner) / math.log(x2 / x1)
            for (x1, sooner), (x2, later) in zip(points, points[1:], strict=False)
        ]
        memory = [(place(row), float(row.peak_bytes)) for row in chosen if row.peak_bytes]
        found.append(
            {
                "part": part,
                "work": work,
                "exponent": exponent(points[len(points) // 2 :]),
                "steepest": max(steps, default=None),
                "bytes_each": (memory[-1][1] - memory[0][1]) / (memory[-1][0] - memory[0][0]) if memory[1:] else None,
                "bytes_fixed": memory[0][1] if memory else None,
            }
        )
    return found


def exponent(points: Sequence[tuple[float, float]]) -> float | None:
    """b of the least-squares fit y = a x^b, None for fewer than three points."""
    if len(points) < 3:
        return None
    logs = [(math.log(x), math.log(y)) for x, y in points]
    return statistics.linear_regression(*zip(*logs, strict=True)).slope


def place(row: Timing) -> float:
    return float({"batch": row.batch, "pixels": row.size**2, "k": row.k or 1}[row.part])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the record to write")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="a tiny network; its numbers mean nothing")
    parser.add_argument("--seconds", type=float, default=0.25, help="how long each point is timed")
    parser.add_argument("--compile", choices=("first", "only", "no"), default="first", help="the kernels, in parallel")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    plan = QUICK if arguments.quick else Plan() if device.type == "cuda" else ON_CPU
    if device.type == "cuda" and arguments.compile != "no":
        context = multiprocessing.get_context("spawn")
        sizes = [plan.size, *sorted(set(plan.sizes) - {plan.size}, reverse=True)]
        with ProcessPoolExecutor(min(len(sizes), os.cpu_count() or 1), mp_context=context) as pool:
            list(pool.map(compile_size, [plan] * len(sizes), sizes, [arguments.device] * len(sizes)))
    if arguments.compile == "only":
        return
    provenance = collect_provenance(device=device, dtype=plan.dtype, config=json.dumps(asdict(plan)))
    total = physical_memory()
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
    rows: list[Timing] = []
    limits = TimingLimits(seconds=arguments.seconds, min_repeats=2, max_seconds=5.0)
    for timing in points(plan, device, limits, read_known(arguments.out, plan)):
        rows.append(timing)
        record = {
            "facts": asdict(provenance),
            "plan": asdict(plan),
            "device_bytes": total,
            "rows": [asdict(r) for r in rows],
        }
        write_record(arguments.out, {**record, "grown": conclude(rows)})
        each = f"{rows[-1].median_ms / timing.batch:.4g} ms an image" if rows[-1].median_ms else rows[-1].failed
        print(f"{timing.part} {timing.work} batch {timing.batch} size {timing.size} k {timing.k}: {each}", flush=True)


if __name__ == "__main__":
    main()
