"""`trust-tta speed`: times and memory of the forward pass, Tent, TRUST, tide and the scan, and of first calls."""

from __future__ import annotations

import json
import time
from argparse import ArgumentParser, BooleanOptionalAction, Namespace
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from trust_tta.atomic import write_whole
from trust_tta.cli.arguments import add_network_arguments, integers, names_list, use_passive_threads
from trust_tta.cli.output import ProgressDisplay, say, writable_file
from trust_tta.config_io import read_class_names
from trust_tta.errors import BackendError, ConfigError
from trust_tta.preprocessing import find_preset
from trust_tta.report.formats import plain_table, to_text
from trust_tta.schema import validate

if TYPE_CHECKING:
    import torch

    from trust_tta.bench.speed import SpeedSettings

EXAMPLES = """\
  trust-tta speed                                  the shipped network on a CPU, VMamba-T at 224 pixels on a GPU
  trust-tta speed --out speed.json                 the same, with its record there
  trust-tta speed --batch 64,1 --dtype bf16        other batch sizes and number formats
  trust-tta speed --quick                          every part once, in seconds, to see that it runs"""

Record: TypeAlias = Mapping[str, Any]


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add_network_arguments(parser)
    batches = "batch sizes (default: 64 on a CPU, 128,1 on a GPU)"
    add("--batch", dest="batches", type=integers, metavar="N[,N]", help=batches)
    add("--size", type=int, metavar="N", help="pixels of a side (default: 32 on a CPU, 224 on a GPU)")
    dtypes = "float32, bf16 or both (default: float32; on a GPU both)"
    add("--dtype", dest="dtypes", type=names_list, metavar="A[,B]", help=dtypes)
    add("--device", default="auto", metavar="DEVICE", help="auto, cpu, cuda or cuda:1")
    add("--startup", action=BooleanOptionalAction, help="time imports and first batches, too (default: yes)")
    add("--repeats", type=int, metavar="N", help="fewest repeats of each row (default 3)")
    add("--seconds", type=float, metavar="S", help="how long each row is repeated at least (default 1)")
    add("--quick", action="store_true", help="tiny sizes and one repeat, to see that it runs")
    add("--out", metavar="FILE", help="the record, as JSON (default: runs/speed-DATE-TIME.json)")


def run(arguments: Namespace) -> None:
    """Measure, print and write; fails if a backend fails its self-check, which is then not timed."""
    use_passive_threads()
    out = writable_file("--out", arguments.out or time.strftime("runs/speed-%Y%m%d-%H%M%S.json"))
    from trust_tta.bench.environment import choose_device
    from trust_tta.bench.speed import measure_speed

    device = choose_device(arguments.device)
    with ProgressDisplay() as progress:
        record = measure_speed(
            make_settings(arguments, device),
            device=device,
            keep=lambda record: write_whole(out, json.dumps(record, indent=1) + "\n"),
            progress=progress,
        )
    show(record)
    say(f"the record is in {out}")
    if failed := [name for name, check in record["parity"].items() if not check["passed"]]:
        raise BackendError(
            f"the scan backend {', '.join(failed)} does not agree with the reference and was not timed; "
            "run `trust-tta doctor` and report what it says"
        )


def make_settings(arguments: Namespace, device: torch.device) -> SpeedSettings:
    """The paper's network on a GPU, the shipped one on a CPU, with --quick tiny sizes; flags change these defaults."""
    from trust_tta.bench.speed import SpeedSettings

    values: dict[str, Any] = {"model": "vmamba_nano", "batches": (64,), "size": 32, "dtypes": ("float32",)}
    if device.type == "cuda":
        values = {"model": "vmamba_tiny_s1l8_bn", "batches": (128, 1), "size": 224, "dtypes": ("float32", "bf16")}
    if arguments.quick:
        values |= {"model": "vmamba_nano", "batches": (8,), "size": 16, "seconds": 0.0, "repeats": 1, "warmups": 0}
    values["startup"] = not arguments.quick
    if arguments.checkpoint or ":" in (arguments.model or ""):  # a network of the user's: its own size
        values |= {"model": arguments.model, "size": None}
    if arguments.preprocessing:
        values["size"] = find_preset(arguments.preprocessing).size
    if arguments.classes:
        values["classes"] = len(read_class_names(arguments.classes))
    for name in ("model", "checkpoint", "batches", "size", "dtypes", "startup", "repeats", "seconds"):
        if getattr(arguments, name) is not None:
            values[name] = getattr(arguments, name)
    flags = {name: f"--{name}" for name in values} | {"batches": "--batch", "dtypes": "--dtype"}
    settings, mistakes = validate(SpeedSettings, values, flags=flags)
    if settings is None:
        raise ConfigError("; ".join(mistakes))
    return settings


def show(record: dict[str, Any]) -> None:
    rows, facts = record["rows"], record["facts"]
    say(f"{facts['device']}, PyTorch {facts['torch']}, {facts['threads']} threads; median of the repeats, in ms\n")
    say(f"network\n{timing_table([row for row in rows if row['part'] == 'network'], ('batch',), rates=True)}")
    if scans := [row for row in rows if row["part"] == "scan"]:
        say(f"scan alone\n{timing_table(scans, ('batch', 'channels', 'size'))}")
    if started := [row for row in rows if row["part"] == "start"]:  # a cold cache is an empty folder
        lines = [(row["work"], row["failed"] or f"{row['median_ms'] / 1e3:.2f}") for row in started]
        say(f"first calls, each in a new process\n{to_text(plain_table(('', 'seconds'), lines))}")
    network = record["network"]
    say(f"{network['name']}: {network['parameters']:,} parameters")
    for place, ratio in record["over_reference"].items():
        if place.startswith("network"):
            say(f"{ratio:.1f} x as fast as with the reference scan: {place.removeprefix('network: ')}")
    say(f"{len(rows)} rows in {record['seconds']:.0f} s")


def timing_table(rows: Sequence[Record], sizes: Sequence[str], *, rates: bool = False) -> str:
    """A table of times in ms, with `rates` also of images per second and memory, and the failures below it."""
    titles = ["", "scan", "dtype", *("length" if name == "size" else name for name in sizes)]
    titles += ["ms", "p20", "p80", "first call", "n", *(("images/s", "GiB") if rates else ())]
    lines = []
    for row in rows:
        line = [row["work"], row["backend"], row["dtype"], *(str(row[name]) for name in sizes)]
        if row["failed"]:
            line.append("failed")
        else:
            times = [row[name] for name in ("median_ms", "p20_ms", "p80_ms", "first_ms")]
            line += [*(f"{ms:.3g}" if ms < 100 else f"{ms:.0f}" for ms in times), str(row["repeats"])]
            if rates:
                memory = f"{row['peak_bytes'] / 2**30:.2f}" if row["peak_bytes"] else ""
                line += [f"{1e3 * row['batch'] / row['median_ms']:.1f}", memory]
        lines.append(line + [""] * (len(titles) - len(line)))
    failed = [row for row in rows if row["failed"]]
    return to_text(plain_table(titles, lines)) + "".join(
        f"failed: {r['work']}, {r['dtype']}, batch {r['batch']}: {r['failed']}\n" for r in failed
    )
