"""Export networks to ONNX and measure them beside PyTorch, on two threads: docs/results/export.json, and its table.

    PYTHONPATH=src python -m benchmarks.export [--record FILE] [NETWORK ...]
    PYTHONPATH=src python -m benchmarks.export --page        the table in docs/export.md, from the record

Networks without a shipped checkpoint have random weights: neither time nor size depends on them. Each network is
written to the record as soon as it is measured, in place of its former row.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

import trust_tta as tt
from trust_tta.atomic import replacing
from trust_tta.data.embedded import load_sample
from trust_tta.export import export_network
from trust_tta.export.check import open_onnx
from trust_tta.export.network import Input
from trust_tta.export.onnx import quantize
from trust_tta.models.base import ScanNetwork
from trust_tta.optional import require

DOCS = Path(__file__).parents[1] / "docs"
RECORD = DOCS / "results" / "export.json"
PAGE = DOCS / "export.md"
NETWORKS = (
    "vmamba_nano", "vmamba_tiny_s1l8", "vanilla_vmamba_tiny", "vim_tiny", "localvmamba_tiny", "groupmamba_tiny",
)  # fmt: skip
SHIPPED = {"vmamba_nano": "vmamba_nano_cifar10"}
THREADS, ROUNDS, MOST_SECONDS = 2, 20, 40.0
HEAD = (
    "",
    "## Measured",
    "Made by `python -m benchmarks.export`; [the record](results/export.json). Each network comes with its int8 file.",
    "",
)
_TABLE = re.compile(r"(<!-- table: export -->\n).*?(<!-- end -->)", re.DOTALL)


def measure(name: str) -> dict[str, Any]:
    """One row: the file, its agreement, and the times of one image in turn, so that all meet the same machine."""
    checkpoint = SHIPPED.get(name)
    model = cast(ScanNetwork, tt.create_model(name, checkpoint=checkpoint).eval())
    size = model.preprocessing.size if model.preprocessing else 224
    with tempfile.TemporaryDirectory() as folder:
        begun = time.process_time()
        exported = export_network(model, "onnx", Path(folder, "network.onnx"))
        row = {
            "network": name,
            "weights": checkpoint or "random",
            "image_size": size,
            "export_cpu_seconds": time.process_time() - begun,
            **exported.details,
            "agreement": exported.agreement.as_dict(),
            "accuracy": accuracy(open_onnx(exported.path, threads=THREADS), checkpoint),
        }
        small = shutil.copyfile(exported.path, Path(folder, "int8.onnx"))
        quantize(small)
        works: dict[str, Callable[[], object]] = {
            "onnxruntime": runner(exported.path, size),
            "onnxruntime, int8": runner(small, size),
            "PyTorch, our scan": network_runner(model, size),
        }
        row["milliseconds"] = times(works)
        row["int8"] = {
            "bytes": small.stat().st_size,
            "accuracy": accuracy(open_onnx(small, threads=THREADS), checkpoint),
            "error": error_between(open_onnx(exported.path), open_onnx(small), size),
        }
    return row


def runner(path: Path, size: int) -> Callable[[], object]:
    run, image = open_onnx(path, threads=THREADS), torch.rand(1, 3, size, size)
    return lambda: run(image)


def network_runner(model: ScanNetwork, size: int) -> Callable[[], object]:
    image = torch.rand(1, 3, size, size)

    def run() -> object:
        with torch.inference_mode():
            return model(image)

    return run


def times(works: dict[str, Callable[[], object]]) -> dict[str, dict[str, float]]:
    """The least and the median wall time of each, and the least time of the processor, in milliseconds."""
    wall: dict[str, list[float]] = {name: [] for name in works}
    spent: dict[str, list[float]] = {name: [] for name in works}
    for run in works.values():
        run()
    begun = time.perf_counter()
    while len(next(iter(wall.values()))) < ROUNDS and time.perf_counter() - begun < MOST_SECONDS:
        for name, run in works.items():
            started, used = time.perf_counter(), time.process_time()
            run()
            wall[name].append(1e3 * (time.perf_counter() - started))
            spent[name].append(1e3 * (time.process_time() - used))
    return {
        name: {"least": min(wall[name]), "median": statistics.median(wall[name]), "processor": min(spent[name])}
        for name in works
    }


def accuracy(run: Callable[[Tensor], Tensor], checkpoint: str | None) -> float | None:
    """In percent, on the 2,000 images that ship with the package; None where the weights are random."""
    if checkpoint is None:
        return None
    images, labels = load_sample()
    batches = Input("float", 32).from_pictures(images).split(100)
    predicted = torch.cat([run(batch).argmax(1) for batch in batches])
    return 100 * (predicted == torch.from_numpy(labels)).float().mean().item()


def error_between(one: Callable[[Tensor], Tensor], other: Callable[[Tensor], Tensor], size: int) -> float:
    """The largest difference of logits on four images of noise, relative to the largest logit."""
    images = torch.rand(4, 3, size, size, generator=torch.Generator().manual_seed(0))
    expected = one(images)
    return float((expected - other(images)).abs().max() / expected.abs().max())


def table(record: dict[str, Any]) -> str:
    """The rows as Markdown."""
    head = (
        "| network | image | MB | nodes | largest error | same class | onnxruntime | PyTorch, our scan | ratio | int8 |"
    )
    lines = [head, "|" + " --- |" * 10]
    for row in record["rows"]:
        found, spent = row["agreement"], {k: v["least"] for k, v in row["milliseconds"].items()}
        ratio = spent["onnxruntime"] / spent["PyTorch, our scan"]
        cells = (
            f"`{row['network']}`", row["image_size"], f"{row['bytes'] / 1e6:.1f}", row["nodes"],
            f"{found['largest_error']:.1g} of {found['largest_logit']:.2g}",
            f"{found['equal_classes']} of {found['images']}",
            f"{spent['onnxruntime']:.0f} ms", f"{spent['PyTorch, our scan']:.0f} ms", f"{ratio:.2f}",
            f"{row['int8']['bytes'] / 1e6:.1f} MB, {spent['onnxruntime, int8']:.0f} ms",
        )  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join([*HEAD, *lines, "", *accuracies(record), machine(record), "", ""])


def accuracies(record: dict[str, Any]) -> list[str]:
    """A sentence on each network whose weights are real."""
    return [
        f"`{row['network']}` has {row['accuracy']:.2f} % of the shipped images right as float32 and "
        f"{row['int8']['accuracy']:.2f} % as int8.\n"
        for row in record["rows"]
        if row["accuracy"] is not None
    ]


def machine(record: dict[str, Any]) -> str:
    made = record["machine"]
    return (
        f"One image on {made['threads']} threads, the least of several times, taken in turn on a machine that others "
        f"used as well ({made['processor']}); onnxruntime {made['onnxruntime']}, PyTorch {made['torch']}."
    )


def read(path: Path) -> dict[str, Any]:
    return cast(dict[str, Any], json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {"rows": []}


def write(path: Path, record: dict[str, Any]) -> None:
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("networks", nargs="*", default=NETWORKS)
    parser.add_argument("--record", type=Path, default=RECORD)
    parser.add_argument("--page", action="store_true", help="write the table in docs/export.md, measure nothing")
    arguments = parser.parse_args()
    if not arguments.page:
        torch.set_num_threads(THREADS)
        for name in arguments.networks:
            record, row = read(arguments.record), measure(name)
            rows = {old["network"]: old for old in record["rows"]} | {name: row}
            order = [*NETWORKS, *(other for other in rows if other not in NETWORKS)]
            record = {"machine": environment(), "rows": [rows[other] for other in order if other in rows]}
            write(arguments.record, record)
            print(table({**record, "rows": [row]}))
    filled = _TABLE.sub(lambda found: f"{found[1]}{table(read(arguments.record))}{found[2]}", PAGE.read_text("utf-8"))
    with replacing(PAGE) as temporary:
        temporary.write_text(filled, encoding="utf-8")


def environment() -> dict[str, Any]:
    runtime = require("onnxruntime", extra="export")
    cores = os.cpu_count()
    return {
        "processor": f"{platform.machine()}, {cores} cores",
        "threads": THREADS,
        "torch": torch.__version__,
        "onnxruntime": runtime.__version__,
        "load": os.getloadavg()[0],
    }


if __name__ == "__main__":
    main()
