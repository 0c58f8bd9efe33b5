"""A row per network: parameters, errors against golden numbers, time of one image, and its ONNX file.

    PYTHONPATH=src python -m benchmarks.networks_page [--rounds N] [NETWORK ...]   measures: docs/results/networks.json
    PYTHONPATH=src python -m benchmarks.networks_page --page                       the tables of two guides from it

Weights are random: times and sizes do not depend on them. Each network is timed beside timm's ConvNeXt-T, in turn, and
its row written to the record as soon as it is measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from benchmarks.export import time_in_turn
from benchmarks.pages import GUIDES, RESULTS, fill, read_record, table, write_record
from torch import nn

import trust_tta as tt
from tests.golden import logit_error
from tests.libraries import import_timm
from tests.models.test_backbones import golden_files, open_golden
from trust_tta.errors import TrustError
from trust_tta.export import export_network
from trust_tta.export.check import open_onnx
from trust_tta.export.network import PixelInputNetwork
from trust_tta.models.base import ScanNetwork
from trust_tta.models.pretrained import PRETRAINED
from trust_tta.preprocessing import Preprocessing

RECORD = RESULTS / "networks.json"
NETWORKS = (
    "vmamba_tiny_s1l8", "mambavision_tiny", "msvmambav3_tiny", "msvmamba_tiny", "efficientvmamba_tiny",
    "spatialmamba_tiny", "vssd_micro",
)  # fmt: skip
BASELINE = "convnext_tiny"  # of timm: 4.5 GFLOP at 224 pixels, as MambaVision-T (4.4), VMamba-T s1l8 (4.9)
THREADS, GPU_BATCH = 2, 128
_DATA = {10: "on CIFAR-10", 11: "mean IoU on CamVid", 150: "mean IoU on ADE20K", 1000: "on ImageNet"}
OURS, FILE, OTHER = "PyTorch", "onnxruntime", "ConvNeXt-T"


def measure(name: str, *, rounds: int) -> dict[str, Any]:
    """One row."""
    model = cast(ScanNetwork, tt.create_model(name)).eval()
    size = cast(Preprocessing, model.preprocessing).size
    row: dict[str, Any] = {
        "network": name,
        "image_size": size,
        "parameters": sum(p.numel() for p in model.parameters()),
        "scan_orders": len(model.scan_orders),
        "golden": golden_errors(type(model)),
    }
    with tempfile.TemporaryDirectory() as folder:
        try:
            exported, any_size = export_network(model, "onnx", Path(folder, "network.onnx"), size="any"), True
        except TrustError:
            exported, any_size = export_network(model, "onnx", Path(folder, "network.onnx")), False
        found, image = exported.agreement, torch.rand(1, 3, size, size)
        row["onnx"] = {
            "nodes": exported.details["nodes"],
            "any_size": any_size,
            "relative_error": found.largest_error / found.largest_logit,
        }
        ours = PixelInputNetwork(model, cast(Preprocessing, model.preprocessing), "float", backend="auto")
        works: dict[str, Callable[[], object]] = {
            OURS: partial(torch.inference_mode()(ours), image),
            FILE: partial(open_onnx(exported.path, threads=THREADS), image),
            OTHER: partial(torch.inference_mode()(baseline()), torch.randn(1, 3, 224, 224)),
        }
        row |= time_in_turn(works, (OURS, OTHER), rounds=rounds) | {"threads": torch.get_num_threads()}
    if torch.cuda.is_available():
        row["gpu"] = {"device": torch.cuda.get_device_name(), "milliseconds": gpu_milliseconds(model, size)}
    return row


def golden_errors(kind: type[nn.Module]) -> dict[str, float] | None:
    """The largest error of a logit over all golden files of a class of networks, in float32 and in float64."""
    errors: dict[str, list[float]] = {"float32": [], "float64": []}
    for file in golden_files():
        arrays, _, network, _ = open_golden(file)
        if type(network) is kind:
            images = torch.from_numpy(arrays["x"])
            with torch.no_grad():
                errors["float32"].append(logit_error(network.float()(images).numpy(), arrays["logits"]))
                errors["float64"].append(logit_error(network.double()(images.double()).numpy(), arrays["logits_f64"]))
    return {dtype: max(found) for dtype, found in errors.items()} if errors["float64"] else None


def baseline() -> nn.Module:
    network: nn.Module = import_timm().create_model(BASELINE)
    return network.eval()


def gpu_milliseconds(model: nn.Module, size: int) -> dict[str, float]:
    """The median of 20 forwards of a batch, in float32 and in bf16."""
    images, network = torch.randn(GPU_BATCH, 3, size, size, device="cuda"), model.cuda()
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        taken = []
        for _ in range(25):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            with torch.no_grad(), torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
                network(images)
            end.record()
            torch.cuda.synchronize()
            taken.append(begin.elapsed_time(end))
        found[str(dtype).removeprefix("torch.")] = statistics.median(taken[5:])
    model.cpu()
    return found


def measured_table(record: dict[str, Any]) -> str:
    names = (
        "network", "parameters (million)", "scan orders", "golden error, float32", "float64", "CPU ms", "of ConvNeXt-T",
        "GPU ms", "ONNX nodes", "its error", "its CPU ms",
    )  # fmt: skip
    lines = []
    for row in record["rows"]:
        golden, file, times = row["golden"], row["onnx"], row["milliseconds"]
        gpu = row.get("gpu", {}).get("milliseconds")
        cells = (
            f"`{row['network']}`",
            f"{row['parameters'] / 1e6:.1f}",
            row["scan_orders"] if row["scan_orders"] > 1 else "none",
            *(f"{golden[dtype]:.0e}" if golden else "–" for dtype in ("float32", "float64")),
            f"{times[OURS]['cpu']:.0f}",
            f"{row['ratio']['cpu']:.2f}",
            f"{gpu['float32']:.1f}, bf16 {gpu['bfloat16']:.1f}" if gpu else "not measured",
            f"{file['nodes']:,}{'' if file['any_size'] else ', one size'}",
            f"{file['relative_error']:.0e}",
            f"{times[FILE]['cpu']:.0f}",
        )
        lines.append(cells)
    return table(names, lines)


def published_table(*, vmamba: bool) -> str:
    """The published files of VMambas, or of the other networks."""
    lines = []
    for file in PRETRAINED.values():
        if file.variant.startswith(("vmamba_", "vanilla_", "upernet_")) == vmamba:
            data = _DATA[file.num_classes] + ("" if file.address else "; ships with the package")
            lines.append([f"`{file.name}`", f"{file.accuracy} {data}, {file.preprocessing.size} px", file.license])
    return table(["checkpoint", "accuracy as published (%)", "license"], lines)


def write_pages() -> None:
    for guide, name, content in (
        ("networks.md", "measured", measured_table(read_record(RECORD))),
        ("networks.md", "published", published_table(vmamba=False)),
        ("checkpoints.md", "published", published_table(vmamba=True)),
    ):
        fill(GUIDES / guide, f"<!-- table: {name} -->", "<!-- end -->", f"\n\n{content}\n\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", metavar="NETWORK", default=NETWORKS)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--page", action="store_true", help="write the tables, measure nothing")
    arguments = parser.parse_args()
    if arguments.page:
        write_pages()
        return
    torch.set_num_threads(THREADS)
    rows = read_record(RECORD)["rows"] if RECORD.exists() else []
    for name in arguments.networks:
        torch.manual_seed(0)
        rows = [row for row in rows if row["network"] != name] + [measure(name, rounds=arguments.rounds)]
        write_record(RECORD, {"torch": torch.__version__, "rows": rows})
        print(json.dumps(rows[-1]))


if __name__ == "__main__":
    main()
