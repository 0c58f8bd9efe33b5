"""What a step of TRUST costs on a segmentation network, beside as many forward and backward passes of the same network.

    PYTHONPATH=src python benchmarks/segmentation_speed.py OUT.json [--size 512] [--batch 2] [--model NAME]

One step with K = 6 orders in bfloat16, the median of some, and its peak memory; then six passes forward and backward
for the same weights, plain and captured as CUDA graphs. Random weights and images: neither changes the work.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from trust_tta.atomic import replacing
from trust_tta.bench.environment import collect_provenance
from trust_tta.bench.timing import TimingLimits, Work, device_clock, repeat, wall_clock, warm_up
from trust_tta.methods.registry import create_method
from trust_tta.models.typed import create_model
from trust_tta.ops.cuda_graphs import GraphedNetwork

ORDERS = 6


def time_of(work: Work, device: torch.device, limits: TimingLimits) -> dict[str, float]:
    clock = device_clock(device) if device.type == "cuda" else wall_clock(device)
    warm_up(work, clock, limits)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds = statistics.median(repeat(work, clock, limits))
    peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0
    return {"milliseconds": 1e3 * seconds, "peak_gib": peak}


def passes(model: Any, images: torch.Tensor, names: list[str], *, captured: bool) -> Work:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in names)
    weights = [parameter for name, parameter in model.named_parameters() if name in names]
    call, directions = GraphedNetwork(model, weights), model.scan_directions(None, len(images))

    def work() -> None:
        for _ in range(ORDERS):
            torch.autograd.grad(
                call(images, directions, capture=captured).logsumexp(1).mean(), weights, allow_unused=True
            )

    return work


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="upernet_vmamba_tiny_s1l8")
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--classes", type=int, default=21)
    parser.add_argument("--seconds", type=float, default=1.0)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model = create_model(options.model, num_classes=options.classes).to(device).eval()
    images = torch.randn(options.batch, 3, options.size, options.size, device=device)
    limits, found = TimingLimits(seconds=options.seconds), dict[str, Any]()
    with torch.autocast(device.type, torch.bfloat16):
        for name in ("trust", "tide", "tent", "source"):
            method = create_method(name, model)
            found[name] = time_of(lambda method=method: method(images), device, limits)  # type: ignore[misc]
            del method
        names = list(create_method("trust", model).adapted)
        for what, captured in (("six passes", False), ("six recorded passes", True)):
            found[what] = time_of(passes(model, images, names, captured=captured), device, limits)
            found[f"trust / {what}"] = found["trust"]["milliseconds"] / found[what]["milliseconds"]
    settings = {name: getattr(options, name) for name in ("model", "size", "batch", "classes")}
    provenance = collect_provenance(device=device, dtype="bfloat16", config=json.dumps(settings))
    with replacing(options.out) as temporary:
        temporary.write_text(json.dumps({"settings": settings, "found": found, "facts": asdict(provenance)}, indent=1))
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
