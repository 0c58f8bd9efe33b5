"""Cost of a batch under each method: passes, milliseconds and memory, VMamba-T at 224 pixels, every image counting.

    python -m benchmarks.method_costs RECORD.json [--batch 128] [--dtype bf16] [--methods tent,trust]
    python -m benchmarks.method_costs RECORD.json --page PAGE.md    the table of a record

The record is written after every method, so that a run that is cut short keeps what it has.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from benchmarks.pages import read_record, table, write_record

from trust_tta.atomic import write_whole
from trust_tta.bench.environment import collect_provenance
from trust_tta.bench.timing import Case, Timing, TimingLimits, Work, float32_only, measure
from trust_tta.methods import create_method, gather_fisher, gather_source_statistics
from trust_tta.models import create_model

METHODS = (
    "source", "bn", "tent", "eta", "eata", "sar", "shot", "deyo", "roid", "cmf", "rotta", "cotta", "rdumb", "lame",
    "neo", "t3a", "dpcore", "trust_naive", "trust", "trust+mirror", "tide",
)  # fmt: skip
PAGE = "docs/results/method_costs_h200.json", "docs/results/tables/method_costs.md"
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {"trust+mirror": ("trust", {"views": "mirror"})}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("--page", type=Path)
    parser.add_argument("--model", default="vmamba_tiny_s1l8_bn")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--seconds", type=float, default=0.5)
    wanted = parser.parse_args()
    if wanted.page:
        write_whole(wanted.page, page(read_record(wanted.record.resolve())))
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    images = torch.randn(wanted.batch, 3, wanted.size, wanted.size, generator=torch.Generator().manual_seed(0))
    settings = {key: value for key, value in vars(wanted).items() if key not in ("record", "page")}
    facts = asdict(collect_provenance(device=device, dtype=wanted.dtype, config=json.dumps(settings)))
    rows: list[dict[str, Any]] = []
    for name in wanted.methods.split(","):
        rows.append(cost_of(name, wanted, images.to(device)))
        print(rows[-1], flush=True)
        write_record(wanted.record, {"settings": settings, "facts": facts, "rows": rows})


def cost_of(name: str, wanted: argparse.Namespace, images: torch.Tensor) -> dict[str, Any]:
    """Medians of whole calls, and the passes that the last of them made."""
    passes: dict[str, int] = {}

    @contextmanager
    def prepare() -> Iterator[Work]:
        model = create_model(wanted.model).to(images.device)
        base, options = VARIANTS.get(name, (name, {}))
        method = create_method(base, model, **options, **needs(name, model, images))

        def work() -> None:
            before = method.counters.forwards, method.counters.backwards
            method(images)
            passes["forwards"] = method.counters.forwards - before[0]
            passes["backwards"] = method.counters.backwards - before[1]

        yield work

    timing = Timing(part="network", work=name, backend="auto", dtype=wanted.dtype, batch=wanted.batch, size=wanted.size)
    with float32_only(images.device):
        done = measure(Case(timing=timing, prepare=prepare, limits=TimingLimits(seconds=wanted.seconds)), images.device)
    times = {"ms": done.median_ms, "p20_ms": done.p20_ms, "p80_ms": done.p80_ms, "peak_bytes": done.peak_bytes}
    return {"method": name, **passes, **times, "failed": done.failed}


def needs(name: str, model: torch.nn.Module, images: torch.Tensor) -> dict[str, Any]:
    """Options that a method requires, and margins at which each image of a random network counts."""
    every: dict[str, Any] = {"margin": 2.0}
    if name in ("eta", "rdumb"):
        return every | {"d_margin": 2.0}
    if name == "eata":
        return every | {"d_margin": 2.0, "fisher": gather_fisher(model, [images])}
    if name == "sar":
        return every | {"reset_threshold": 0.0}
    if name == "deyo":
        return every | {"plpd": -1.0}
    if name == "dpcore":
        return {"source_statistics": gather_source_statistics(model, [images])}
    return {}


def page(record: dict[str, Any]) -> str:
    settings, facts, rows = record["settings"], record["facts"], record["rows"]
    source = next((row["ms"] for row in rows if row["method"] == "source"), None)
    about = (
        f"*Written by `python -m benchmarks.method_costs {PAGE[0]} --page {PAGE[1]}`.* `{settings['model']}` with "
        f"random weights, {settings['size']} pixels, batches of {settings['batch']}, {settings['dtype']}; each method "
        "with its defaults, but margins that let every image count. Passes over the batch (a mirrored batch counts as "
        f"two) and medians of whole calls; {facts['device']}, PyTorch {facts['torch']}."
    )
    lines = []
    for row in sorted(rows, key=lambda row: METHODS.index(row["method"])):
        if row["failed"]:
            lines.append([row["method"], row.get("forwards", ""), row.get("backwards", ""), f"{row['failed']} | |"])
            continue
        times = f"{row['ms'] / source:.1f}" if source else ""
        memory = f"{row['peak_bytes'] / 2**30:.1f}" if row["peak_bytes"] else ""
        lines.append([row["method"], row["forwards"], row["backwards"], f"{row['ms']:.1f}", times, memory])
    head = ["method", "forward", "backward", "ms per batch", "times source", "peak GiB"]
    return f"# What a batch costs\n\n{about}\n\n{table(head, lines)}\n"


if __name__ == "__main__":
    main()
