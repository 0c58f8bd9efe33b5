"""Export networks to ONNX and measure them beside PyTorch, on two threads: docs/results/export.json, and its table.

    PYTHONPATH=src python -m benchmarks.export [--rounds N] [--seconds S] [--record FILE] [NETWORK ...]
    PYTHONPATH=src python -m benchmarks.export --page        the table in docs/guides/export.md, from the record

Networks without a shipped checkpoint have random weights: neither time nor size depends on them. Each network is
written to the record as soon as it is measured, in place of its former row, with the machine it was measured on. Nano
and VMamba-T, the default, take two minutes.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from benchmarks import pages
from benchmarks.pages import GUIDES, RESULTS, fill, read_record, write_record
from torch import Tensor

import trust_tta as tt
from trust_tta.data.sample import load_sample
from trust_tta.export import export_network
from trust_tta.export.check import Run, open_onnx
from trust_tta.export.network import InputSpec, PixelInputNetwork
from trust_tta.export.onnx import quantize
from trust_tta.models.base import ScanNetwork
from trust_tta.optional import require
from trust_tta.preprocessing import Preprocessing

RECORD, PAGE = RESULTS / "export.json", GUIDES / "export.md"
NETWORKS = ("vmamba_nano", "vmamba_tiny_s1l8")
SHIPPED = {"vmamba_nano": "vmamba_nano_cifar10"}
THREADS = 2
FILE, SMALL, OURS = "onnxruntime", "onnxruntime, int8", "PyTorch, our scan"
HEAD = (
    "",
    "## Measured",
    "",
    "Made by `python -m benchmarks.export`. Times are of one image, in milliseconds: the least on the wall, and in\n"
    "brackets what the processors spent, the median.",
    "",
)


def measure(name: str, *, rounds: int, seconds: float) -> dict[str, Any]:
    """One row: the file, its agreement, and the times of one image."""
    checkpoint = SHIPPED.get(name)
    model = cast(ScanNetwork, tt.create_model(name, checkpoint=checkpoint).eval())
    preprocessing = cast(Preprocessing, model.preprocessing)
    size = preprocessing.size
    with tempfile.TemporaryDirectory() as folder:
        begun = time.process_time()
        exported = export_network(model, "onnx", Path(folder, "network.onnx"))
        spent = time.process_time() - begun
        small = shutil.copyfile(exported.path, Path(folder, "int8.onnx"))
        quantize(small)
        files = {FILE: open_onnx(exported.path, threads=THREADS), SMALL: open_onnx(small, threads=THREADS)}
        ours = PixelInputNetwork(model, preprocessing, "float", backend="auto")
        image = torch.rand(1, 3, size, size)
        works: dict[str, Callable[[], object]] = {
            FILE: partial(files[FILE], image),
            SMALL: partial(files[SMALL], image),
            OURS: partial(torch.inference_mode()(ours), image),
        }
        return {
            "network": name,
            "weights": checkpoint or "random",
            "image_size": size,
            "export_cpu_seconds": spent,
            **exported.details,
            "agreement": vars(exported.agreement),
            "int8_bytes": small.stat().st_size,
            "int8_error": error_between(files[FILE], files[SMALL], size),
            "accuracy": {kind: accuracy(run, InputSpec("float", 32)) for kind, run in files.items()}
            if checkpoint
            else None,
            **time_in_turn(works, rounds=rounds, seconds=seconds),
        }


def accuracy(run: Run, spec: InputSpec) -> float:
    """The accuracy in percent on the shipped CIFAR-10 images."""
    images, labels = load_sample()
    with torch.inference_mode():
        predicted = torch.cat([run(batch).argmax(1) for batch in spec.from_images(images).split(100)])
    return 100 * (predicted == torch.from_numpy(labels)).double().mean().item()


def time_in_turn(
    works: dict[str, Callable[[], object]], ratio: tuple[str, str] = (FILE, OURS), *, rounds: int, seconds: float = 600
) -> dict[str, Any]:
    """Milliseconds of each work, by the wall clock and of the processor, in turns that rotate the order.

    `ratio` names two works: the median over the rounds of the first one's time over the second's.
    """
    wall: dict[str, list[float]] = {name: [] for name in works}
    spent: dict[str, list[float]] = {name: [] for name in works}
    names = list(works)
    for name in names:
        works[name]()
    begun, load = time.perf_counter(), os.getloadavg()[0]
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            started, used = time.perf_counter(), time.process_time()
            works[name]()
            wall[name].append(1e3 * (time.perf_counter() - started))
            spent[name].append(1e3 * (time.process_time() - used))
        if turn >= 2 and time.perf_counter() - begun > seconds:
            break
    first, second = ratio
    ratios = {
        kind: [x / y for x, y in zip(t[first], t[second], strict=True)] for kind, t in (("wall", wall), ("cpu", spent))
    }
    return {
        "rounds": len(wall[first]),
        "load": [load, os.getloadavg()[0]],
        "milliseconds": {
            name: {
                "least": min(wall[name]),
                "median": statistics.median(wall[name]),
                "cpu": statistics.median(spent[name]),
            }
            for name in works
        },
        "ratio": {kind: statistics.median(values) for kind, values in ratios.items()},
    }


def error_between(one: Callable[[Tensor], Tensor], other: Callable[[Tensor], Tensor], size: int) -> float:
    """The largest difference of logits on four images of noise, relative to the largest logit."""
    images = torch.rand(4, 3, size, size, generator=torch.Generator().manual_seed(0))
    expected = one(images)
    return float((expected - other(images)).abs().max() / expected.abs().max())


def table(record: dict[str, Any]) -> str:
    """The rows as Markdown."""
    names = ("network", "image", "MB", "nodes", "largest error", "same class", FILE, OURS, "ratio, wall (CPU)", "int8")
    lines = []
    for row in record["rows"]:
        found = row["agreement"]
        file, small, ours = (
            f"{t['least']:.3g} ({t['cpu']:.3g})" for t in map(row["milliseconds"].get, (FILE, SMALL, OURS))
        )
        cells = (
            f"`{row['network']}`", row["image_size"], f"{row['bytes'] / 1e6:.1f}", row["nodes"],
            f"{found['largest_error']:.1g} of {found['largest_logit']:.2g}",
            f"{found['equal_classes']} of {found['images']}", file, ours,
            f"{row['ratio']['wall']:.2f} ({row['ratio']['cpu']:.2f})",
            f"{row['int8_bytes'] / 1e6:.1f} MB, {small}",
        )  # fmt: skip
        lines.append(cells)
    return "\n".join([pages.table(names, lines), "", *map(circumstances, record["rows"])])


def page(record: dict[str, Any]) -> str:
    return "\n".join([*HEAD, table(record), ""])


def circumstances(row: dict[str, Any]) -> str:
    """Conditions of a measurement, and the accuracy of real weights."""
    made, right = row["machine"], row["accuracy"]
    text = (
        f"`{row['network']}`: {row['rounds']} rounds in turn on {made['threads']} threads of {made['processor']}, load "
        f"{row['load'][0]:.1f} to {row['load'][1]:.1f}; onnxruntime {made['onnxruntime']}, PyTorch {made['torch']}."
    )
    if right:
        text += f" {right[FILE]:.2f} % of the shipped images are right as float32, {right[SMALL]:.2f} % as int8."
    return text + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("networks", nargs="*", default=NETWORKS)
    parser.add_argument("--rounds", type=int, default=20, help="measurements of each, in turn (default 20)")
    parser.add_argument("--seconds", type=float, default=30, help="most, for the rounds of a network (default 30)")
    parser.add_argument("--record", type=Path, default=RECORD)
    parser.add_argument("--page", action="store_true", help="write the table in docs/guides/export.md, measure nothing")
    arguments = parser.parse_args()
    if not arguments.page:
        restart_with_passive_threads("benchmarks.export")
        for name in arguments.networks:
            row = measure(name, rounds=arguments.rounds, seconds=arguments.seconds) | {"machine": machine()}
            known = read_record(arguments.record.resolve())["rows"] if arguments.record.exists() else []
            rows = {old["network"]: old for old in known} | {name: row}
            order = [*NETWORKS, *(other for other in rows if other not in NETWORKS)]
            write_record(arguments.record, {"rows": [rows[other] for other in order if other in rows]})
            print(table({"rows": [row]}), flush=True)
    if arguments.page or arguments.record == RECORD:
        fill(PAGE, "<!-- table: export -->\n", "<!-- end -->", page(read_record(arguments.record.resolve())))


def restart_with_passive_threads(module: str) -> None:
    """Run the module in a process whose idle threads sleep, since spinning would count as work, on THREADS threads."""
    if "OMP_WAIT_POLICY" not in os.environ:
        command = [sys.executable, "-m", module, *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, "OMP_WAIT_POLICY": "passive"})
    torch.set_num_threads(THREADS)


def machine() -> dict[str, Any]:
    runtime = require("onnxruntime", extra="export")
    try:
        model = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text("utf-8"), re.MULTILINE)
    except OSError:  # not Linux
        model = None
    return {
        "processor": f"{os.cpu_count()} cores ({model[1] if model else platform.machine()})",
        "threads": THREADS,
        "torch": torch.__version__,
        "onnxruntime": runtime.__version__,
    }


if __name__ == "__main__":
    main()
