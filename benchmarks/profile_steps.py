"""Where the time of a step goes on a CUDA device, by kernel: VMamba-T at 224 pixels with random weights.

    PYTHONPATH=src python benchmarks/profile_steps.py --out FOLDER

Writes FOLDER/profile.json and FOLDER/profile.md: for each work and dtype the median time and the peak memory, then the
kernels that take the most. On a CPU, which is there to try the script, operators stand in for kernels.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from trust_tta.bench.environment import collect_provenance
from trust_tta.bench.timing import TimingLimits, Work, device_clock, float32_only, repeat, wall_clock, warm_up
from trust_tta.methods.registry import create_method
from trust_tta.models.typed import create_model

KINDS = (  # the first pattern found in a kernel's name says what it does
    ("scan", r"scan_(forward|backward)_kernel"),
    (
        "around the scan",
        r"^(cross|merge|matmul|weight_gradient|sum_rows|gather|scatter_add)_?\w*_?kernel",
    ),
    ("around the scan", r"^norm_backward_kernel|layer_?norm"),
    (
        "batch norm",
        r"batch_?norm|bn_(fw|bw)|welford|^(sum|finish|normalize\w*|input_gradient|small_gradients|follow_stream\w*)_kernel",
    ),
    ("convolution", r"conv|dgrad|wgrad|fprop|cudnn|_patches"),
    (
        "product",
        r"gemm|nvjet|cutlass|addmm|splitk|dot_product|xmma|^(product|add_parts|split|hidden_gradient|mlp\w*)_kernel",
    ),
    ("copy", r"memcpy|memset|copy|CatArray"),
    ("elementwise", r"elementwise|gelu|vectorized|multi_tensor"),
    ("sum", r"reduce|softmax"),
)


def works(model: Any, images: Tensor) -> dict[str, Callable[[], Work]]:
    """Functions to measure, by name; making one makes the method."""

    def forward() -> Work:
        model.eval()
        return torch.no_grad()(lambda: model(images))

    def method(name: str, **options: Any) -> Callable[[], Work]:
        def make() -> Work:
            made = create_method(name, model, **options)
            return lambda: made(images)

        return make

    return {
        "forward": forward,
        "source": method("source"),
        "tent": method("tent"),
        "trust K=6": method("trust"),
        "tide": method("tide"),
    }


def kind_of(kernel: str) -> str:
    return next((kind for kind, pattern in KINDS if re.search(pattern, kernel, re.IGNORECASE)), "other")


def kernels_of(work: Work, device: torch.device) -> list[dict[str, Any]]:
    """Milliseconds and launches of each kernel in one repeat of the work, the longest first."""
    cuda = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as trace:
        work()
        if cuda:
            torch.cuda.synchronize(device)
    totals: dict[str, list[float]] = defaultdict(list)
    for event in trace.events() or ():
        if event.device_type.name.lower() == device.type and not getattr(event, "is_user_annotation", False):
            totals[event.name].append(event.time_range.elapsed_us() if cuda else event.self_cpu_time_total)
    busy = sum(map(sum, totals.values())) or 1.0
    rows = [
        {"kernel": name, "kind": kind_of(name), "ms": sum(us) / 1e3, "calls": len(us), "share": sum(us) / busy}
        for name, us in totals.items()
    ]
    return sorted(rows, key=lambda row: -float(row["ms"]))


def measure(make: Callable[[], Work], device: torch.device, limits: TimingLimits, top: int) -> dict[str, Any]:
    """Median time of a work, its peak memory, and where its time goes by kind and by kernel."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    work = make()
    warm_up(work, wall_clock(device), limits)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    times = repeat(work, device_clock(device) if device.type == "cuda" else wall_clock(device), limits)
    kernels = kernels_of(work, device)
    kinds: dict[str, float] = defaultdict(float)
    for row in kernels:
        kinds[row["kind"]] += row["ms"]
    return {
        "median_ms": 1e3 * statistics.median(times),
        "repeats": len(times),
        "peak_bytes": peak,
        "busy_ms": sum(kinds.values()),
        "kernels": sum(int(row["calls"]) for row in kernels),
        "kinds": dict(sorted(kinds.items(), key=lambda pair: -pair[1])),
        "top": kernels[:top],
    }


def table(record: dict[str, Any]) -> Iterator[str]:
    """The record as Markdown."""
    yield "| work | dtype | ms | device busy | kernels | GiB | by kind (ms) |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for row in record["rows"]:
        kinds = ", ".join(f"{kind} {ms:.3g}" for kind, ms in row["kinds"].items())
        memory = "–" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**30:.3g}"
        yield (
            f"| {row['work']} | {row['dtype']} | {row['median_ms']:.4g} | {row['busy_ms']:.4g} | {row['kernels']} "
            f"| {memory} | {kinds} |"
        )
    for row in record["rows"]:
        yield from ("", f"## {row['work']}, {row['dtype']}", "", "| ms | calls | share | kind | kernel |")
        yield "| --- | --- | --- | --- | --- |"
        for kernel in row["top"]:
            name = kernel["kernel"].replace("|", "\\|")[:110]
            yield (f"| {kernel['ms']:.4g} | {kernel['calls']} | {kernel['share']:.1%} | {kernel['kind']} | `{name}` |")


@contextmanager
def precision(device: torch.device, dtype: str) -> Iterator[None]:
    with torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bf16"), float32_only(device):
        yield


def write(folder: Path, record: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    texts = {"profile.json": json.dumps(record, indent=1), "profile.md": "\n".join(table(record)) + "\n"}
    for name, text in texts.items():
        temporary = folder / f"{name}.part"
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(folder / name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the folder to write into")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default="vmamba_tiny_s1l8_bn")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--dtype", nargs="+", default=["bf16", "float32"], choices=("bf16", "float32"))
    parser.add_argument("--work", nargs="+", help="some of the works; all by default")
    parser.add_argument("--top", type=int, default=25, help="kernels listed for each work")
    parser.add_argument("--seconds", type=float, default=1.0, help="how long each work is timed")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    torch.manual_seed(0)
    model = create_model(arguments.model).to(device).eval()
    images = torch.randn(arguments.batch, 3, arguments.size, arguments.size, device=device)
    chosen = {k: v for k, v in works(model, images).items() if arguments.work is None or k in arguments.work}
    settings = {k: v for k, v in vars(arguments).items() if k != "out"}
    provenance = collect_provenance(device=device, dtype=",".join(arguments.dtype), config=json.dumps(settings))
    record: dict[str, Any] = {"facts": provenance.__dict__, "settings": settings, "rows": []}
    limits = TimingLimits(seconds=arguments.seconds, min_repeats=3)
    for dtype in arguments.dtype:
        for name, make in chosen.items():
            with precision(device, dtype):
                row = {"work": name, "dtype": dtype, **measure(make, device, limits, arguments.top)}
            record["rows"].append(row)
            write(arguments.out, record)
            memory = "" if row["peak_bytes"] is None else f", {row['peak_bytes'] / 2**30:.3g} GiB"
            print(f"{name}, {dtype}: {row['median_ms']:.4g} ms, busy {row['busy_ms']:.4g} ms{memory}", flush=True)
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
