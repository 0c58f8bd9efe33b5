"""One image through VMamba-T on a CPU beside onnxruntime and a ConvNeXt-T: docs/results/cpu_forward.json.

    PYTHONPATH=src python -m benchmarks.cpu_forward [--rounds N] [--record FILE]

On two threads, in turn. ConvNeXt-T is timm's, in PyTorch, channel-last. Weights are random: no time depends on them.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from benchmarks.export import FILE, OURS, THREADS, machine, restart_with_passive_threads, time_in_turn
from benchmarks.pages import RESULTS, write_record
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import trust_tta as tt
from tests.libraries import import_timm
from trust_tta.export import export_network
from trust_tta.export.check import open_onnx

RECORD = RESULTS / "cpu_forward.json"
NETWORK, OTHER, SIZE = "vmamba_tiny_s1l8", "convnext_tiny", 224


def measure(rounds: int) -> dict[str, Any]:
    """Milliseconds of one image by each, and the floating-point operations of both networks' layers."""
    ours: Any = tt.create_model(NETWORK).eval()
    theirs = import_timm().create_model(OTHER).eval().to(memory_format=torch.channels_last)
    image = torch.rand(1, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0))
    with tempfile.TemporaryDirectory() as folder:
        file = open_onnx(export_network(ours, "onnx", Path(folder, "network.onnx")).path, threads=THREADS)
        last = image.to(memory_format=torch.channels_last)
        works: dict[str, Callable[[], object]] = {
            FILE: partial(file, image),
            OURS: partial(call, ours, image),
            f"{OURS}, bf16": partial(call, ours, image, bf16=True),
            f"PyTorch, {OTHER}": partial(call, theirs, last),
            f"PyTorch, {OTHER}, bf16": partial(call, theirs, last, bf16=True),
        }
        found = time_in_turn(works, rounds=rounds)
    ours.set_scan_backend("reference")  # whose layers are PyTorch's own, which the counter knows
    operations = {name: count(network, image) for name, network in ((NETWORK, ours), (OTHER, theirs))}
    return {"network": NETWORK, "image_size": SIZE, "operations": operations, **found, "machine": machine()}


@torch.inference_mode()
def call(network: nn.Module, image: Tensor, *, bf16: bool = False) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        logits: Tensor = network(image)
        return logits


def count(network: nn.Module, image: Tensor) -> int:
    """Operations of products and convolutions; those of the scans, less than a hundredth, are not counted."""
    with FlopCounterMode(display=False) as counter:
        call(network, image)
    return int(counter.get_total_flops())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=30, help="measurements of each, in turn (default 30)")
    parser.add_argument("--record", type=Path, default=RECORD)
    arguments = parser.parse_args()
    restart_with_passive_threads("benchmarks.cpu_forward")
    write_record(arguments.record, measure(arguments.rounds))


if __name__ == "__main__":
    main()
