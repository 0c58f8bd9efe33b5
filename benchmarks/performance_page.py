"""Write docs/performance.md from the records in docs/results: python benchmarks/performance_page.py"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, TypeAlias

from trust_tta.atomic import replacing

DOCS = Path(__file__).parents[1] / "docs"
RESULTS = DOCS / "results"
WORKS = (
    "forward",
    "forward by the method 'source'",
    "Tent",
    "TRUST naive",
    "TRUST K=6 sequential",
    "TRUST K=6 parallel replicate",
    "TRUST K=6 parallel split",
)
SEQUENTIAL, REPLICATE, SPLIT = WORKS[4:]

Step: TypeAlias = tuple[str, str, str, str, str]  # change, measured on, before, after, predicted


class Speeds:
    """The rows of one record of `trust-tta speed`."""

    def __init__(self, name: str) -> None:
        self.record = json.loads((RESULTS / name).read_text(encoding="utf-8"))

    def row(self, work: str, dtype: str = "float32", batch: int = 128) -> dict[str, Any] | None:
        found = [
            r
            for r in self.record["rows"]
            if (r["part"], r["work"], r["dtype"], r["batch"]) == ("network", work, dtype, batch)
            and r["backend"] != "reference"
            and not r["failed"]
        ]
        return found[0] if found else None

    def ms(self, work: str, dtype: str = "float32", batch: int = 128) -> str:
        row = self.row(work, dtype, batch)
        return f"{row['median_ms']:.3g}" if row else "–"

    def gib(self, work: str, dtype: str = "float32", batch: int = 128) -> str:
        row = self.row(work, dtype, batch)
        return f"{row['peak_bytes'] / 2**30:.3g}" if row else "–"


def main() -> None:
    final, cpu = Speeds("speed_h200.json"), Speeds("speed_cpu.json")
    authors = json.loads((RESULTS / "authors_h200.json").read_text(encoding="utf-8"))
    fused, recorded, waitless = (Speeds(f"speed_h200_{name}.json") for name in ("fused", "recorded", "waitless"))
    steps = steps_table(final, fused, recorded, waitless, profile("profile_h200_plain.txt"))
    tables = (network_table(final, authors), memory_line(final), scan_table(final))
    measured = [*profile_section(), *scaling_section()]
    write(DOCS / "performance.md", HEAD, "## On one H200", *tables, *measured, "## On a CPU", cpu_lines(cpu))
    write(RESULTS / "speed_history.md", HISTORY, steps, FAILED)


def write(path: Path, *sections: str) -> None:
    with replacing(path) as temporary:
        temporary.write_text("\n\n".join(sections) + "\n", encoding="utf-8")


def profile(name: str) -> dict[str, dict[str, str]]:
    """host, wall and device milliseconds of each piece of work in a profile."""
    pattern = r"== (.+): host ([\d.]+) wall ([\d.]+) gpu busy ([\d.]+) ms, (\d+) kernels"
    lines = (RESULTS / name).read_text(encoding="utf-8")
    return {
        work: {"host": host, "wall": wall, "gpu": gpu, "kernels": kernels}
        for work, host, wall, gpu, kernels in re.findall(pattern, lines)
    }


HEAD = """# Performance

*Written by `python benchmarks/performance_page.py` from the records in [results](results/README.md), which
`trust-tta speed --out FILE` wrote. Run it on your machine: it measures everything side by side and prints this table.*

A step is: adapt on the batch, merge, predict the batch again. The network is VMamba-T (s1l8, batch norm) at 224 pixels
with random weights; float32 is float32, without TF32; bf16 is autocast. Times are medians in milliseconds of the whole
step as a caller sees it; memory is the peak of allocated tensors, the memory of recorded passes included. The rows of
batch 1 in these records were made with the running statistics of training; `trust-tta speed` now takes those of the
batch there too, as methods do by default. How the times fell, change by change, and what did not help, is in
[the history](results/speed_history.md)."""

HISTORY = """# How the times fell

*Written by `python benchmarks/performance_page.py`; times in milliseconds on one H200, as on [the page of today's
figures](../performance.md).*"""


def network_table(final: Speeds, authors: dict[str, Any]) -> str:
    lines = [
        "| work | batch | authors' code, float32 | float32 | bf16 | authors' GiB | GiB, float32 / bf16 |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for batch in (128, 1):
        for work in WORKS:
            if final.row(work, batch=batch) is None:
                continue
            ms, gib = (authors[kind][str(batch)].get(work, "–") for kind in ("ms", "GiB"))
            memory = f"{final.gib(work, batch=batch)} / {final.gib(work, 'bf16', batch)}"
            lines.append(
                f"| {work} | {batch} | {ms} | {final.ms(work, batch=batch)} | "
                f"{final.ms(work, 'bf16', batch)} | {gib} | {memory} |"
            )
    return "\n".join(lines)


def memory_line(final: Speeds) -> str:
    naive = final.row("TRUST naive", batch=1)
    rows = [r for r in final.record["rows"] if r["part"] == "orders" and r["peak_bytes"] and naive]
    ratios = ", ".join(f"K={r['k']} {r['peak_bytes'] / naive['peak_bytes']:.2f}" for r in rows if naive)
    return f"Peak memory of the parallel mode at batch 1 over that of one order, TRUST naive: {ratios}."


def scan_table(final: Speeds) -> str:
    lines = [
        "The scan alone, batch 128, and its ratio to the time in which a copy moves the bytes that it must move:",
        "",
        "| channels x length | dtype | forward | ratio | as four scans | backward | ratio | as four scans |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    rows = [r for r in final.record["rows"] if r["part"] == "scan" and r["backend"] == "triton" and not r["failed"]]
    for forward, backward in zip(rows[::2], rows[1::2], strict=True):
        cells = [f"{forward['channels']} x {forward['size']}", forward["dtype"]]
        for row in (forward, backward):
            cells += [f"{row['median_ms']:.3g}", f"{row['floor_ratio']:.2f}", f"{row['unfused_ratio']:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    note = (
        "\nThe floor is that of the scan as it is used here: two sequences, each read both ways. *As four scans*: over "
        "the bytes that four separate scans would have to move, as other implementations do."
    )
    return "\n".join(lines) + "\n" + note


def optional_record(name: str) -> dict[str, Any] | None:
    path = RESULTS / name
    record: dict[str, Any] | None = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    return record


def profile_section() -> list[str]:
    """Where the time of each step goes by kind of kernel, before the last round of changes and after it."""
    tables = [(batch, profile_table(suffix)) for batch, suffix in ((128, ""), (1, "_b1"))]
    lines = [part for batch, table in tables if table for part in (f"Batch {batch}:", table)]
    if not lines:
        return []
    about = (
        "Milliseconds by kind of kernel before the last round of changes and now, from "
        "`python benchmarks/profile_steps.py`, whose records list the single kernels; the MLPs of one kernel are "
        "among the others. The records are older than the last choice of tiles."
    )
    return ["### Where the time goes", about, *lines]


def profile_table(suffix: str) -> str:
    """The rows of both records with this ending, of which the first may be missing; empty without the second."""
    before, after = (optional_record(f"profile_h200{suffix}{name}.json") for name in ("_before", ""))
    if after is None:
        return ""
    rows = [
        ((row["work"], row["dtype"]), name, row)
        for name, record in (("before", before), ("now", after))
        for row in (record or {"rows": []})["rows"]
    ]
    kinds = list(dict.fromkeys(kind for _, _, row in rows for kind in row["kinds"]))
    lines = [
        f"| work | dtype | | ms | GiB | kernels | {' | '.join(kinds)} |",
        "| --- " * (6 + len(kinds)) + "|",
    ]
    for key in dict.fromkeys(key for key, _, _ in rows):
        for own, name, row in rows:
            if own == key:
                cells = [*key, name, f"{row['median_ms']:.4g}", f"{row['peak_bytes'] / 2**30:.3g}", str(row["kernels"])]
                cells += [f"{row['kinds'].get(kind, 0):.3g}" for kind in kinds]
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def scaling_section() -> list[str]:
    """The cost per image against batch, pixels and orders, with the fitted exponents and the end of the memory."""
    record = optional_record("scaling_h200.json")
    if record is None:
        return []
    lines = ["| axis | work | milliseconds per image | exponent | steepest step | memory ends at |"]
    lines.append("| --- " * 6 + "|")
    for grown in record["grown"]:
        rows = [r for r in record["rows"] if (r["part"], r["work"]) == (grown["part"], grown["work"])]
        lines.append(f"| {' | '.join(scaling_cells(grown, rows, record['device_bytes']))} |")
    plan = record["plan"]
    return [
        "### How it grows",
        f"VMamba-T in bf16. The batch grows at {plan['size']} pixels, the pixels at batch {plan['batch']}, the orders "
        f"at batch {plan['few']}. Exponents are fitted over the upper half of an axis, where the device is full: 1 is "
        "linear in the step, a constant cost per image; the steepest step is that between two neighbors anywhere.",
        "\n".join(lines),
    ]


def scaling_cells(grown: dict[str, Any], rows: list[dict[str, Any]], device_bytes: int | None) -> list[str]:
    names = {"batch": "batch", "pixels": "size", "k": "k"}
    costs = [
        f"{row[names[grown['part']]]}: {row['median_ms'] / row['batch']:.3g}" if row["median_ms"] else row["failed"]
        for row in rows
    ]
    end = "–"
    if device_bytes and grown["bytes_each"] and grown["part"] != "k":
        most = (device_bytes - grown["bytes_fixed"]) / grown["bytes_each"]
        end = f"{most:,.0f} images" if grown["part"] == "batch" else f"{most**0.5:,.0f} x {most**0.5:,.0f} pixels"
    numbers = [f"{grown[name]:.2f}" if grown[name] is not None else "–" for name in ("exponent", "steepest")]
    return [grown["part"], grown["work"], ", ".join(costs), *numbers, end]


def first_steps(fused: Speeds, recorded: Speeds, plain: dict[str, dict[str, str]]) -> list[Step]:
    naive16, naive1 = plain["trust_naive bf16=True"], plain["naive b1"]
    return [
        (
            "SiLU, layout, both projections and the scan as one operator; the sum of the directions and its norm as "
            "another",
            "forward, float32",
            f"{plain['forward fp32']['wall']}",
            fused.ms("forward"),
            "the norm and the two layouts at the speed of a copy: 2 ms less",
        ),
        (
            "sequences and step sizes made again in the backward instead of kept",
            "TRUST K=6, float32, GiB",
            "–",
            fused.gib(SEQUENTIAL),
            "six of seventeen kept maps fewer per block: a third",
        ),
        (
            "passes recorded as CUDA graphs, from the second of a shape on",
            "TRUST naive, bf16",
            naive16["wall"],
            recorded.ms("TRUST naive", "bf16"),
            f"down to the device's own time, {naive16['gpu']} ms",
        ),
        (
            "the same",
            "TRUST naive, float32, batch 1",
            naive1["wall"],
            recorded.ms("TRUST naive", batch=1),
            f"the device's own time is {naive1['gpu']} ms for {naive1['kernels']} kernels",
        ),
    ]


def later_steps(fused: Speeds, recorded: Speeds, waitless: Speeds) -> list[Step]:
    return [
        (
            "orders one after the other from the same weights in the parallel mode, instead of one pass with copies of "
            "every adapted layer",
            "TRUST K=6 parallel replicate, float32, GiB",
            fused.gib(REPLICATE),
            recorded.gib(REPLICATE),
            "the memory of one order",
        ),
        ("the same", "its time", fused.ms(REPLICATE), recorded.ms(REPLICATE), "unchanged"),
        (
            "the same",
            "TRUST K=6 parallel split, float32",
            fused.ms(SPLIT),
            recorded.ms(SPLIT),
            "small batches recorded",
        ),
        (
            "updates that the host does not wait for: the device itself skips one that is not finite; gradients not "
            "copied",
            "TRUST K=6, float32, batch 1",
            recorded.ms(SEQUENTIAL, batch=1),
            waitless.ms(SEQUENTIAL, batch=1),
            "the device's own time, about 45 ms",
        ),
        (
            "the same",
            "TRUST K=6, bf16",
            recorded.ms(SEQUENTIAL, "bf16"),
            waitless.ms(SEQUENTIAL, "bf16"),
            "about 290 ms",
        ),
        (
            "the network's tensors looked up once",
            "forward by the method 'source', bf16",
            recorded.ms("forward by the method 'source'", "bf16"),
            waitless.ms("forward by the method 'source'", "bf16"),
            "a millisecond less",
        ),
    ]


def last_steps(waitless: Speeds, final: Speeds) -> list[Step]:
    return [
        (
            "SS2D's five parameters moved to their places, and their gradients back, by one kernel each way; its thin "
            "products in half precision by one kernel of our own",
            "forward by the method 'source', bf16",
            waitless.ms("forward by the method 'source'", "bf16"),
            final.ms("forward by the method 'source'", "bf16"),
            "1.5 ms less",
        ),
        ("the same", "TRUST K=6, bf16", waitless.ms(SEQUENTIAL, "bf16"), final.ms(SEQUENTIAL, "bf16"), "25 ms less"),
        (
            "the same, and the adapted weights with their moments as one vector",
            "TRUST K=6 parallel replicate, bf16",
            waitless.ms(REPLICATE, "bf16"),
            final.ms(REPLICATE, "bf16"),
            "that of sequential",
        ),
        ("the same", "TRUST K=6 parallel split, bf16", waitless.ms(SPLIT, "bf16"), final.ms(SPLIT, "bf16"), "about 80"),
        (
            "the same",
            "TRUST K=6, float32, batch 1",
            waitless.ms(SEQUENTIAL, batch=1),
            final.ms(SEQUENTIAL, batch=1),
            "a third of 1,100 kernels per pass fewer",
        ),
        (
            "strided float32 convolutions as one product over patches",
            "forward, float32",
            waitless.ms("forward"),
            final.ms("forward"),
            "2.5 ms less",
        ),
    ]


def profiled_steps() -> list[Step]:
    """Changes between the two profiles."""
    before, after = (optional_record(f"profile_h200{name}.json") for name in ("_before", ""))
    if before is None or after is None:
        return []

    def both(work: str, dtype: str, key: str = "median_ms", unit: float = 1.0) -> tuple[str, str]:
        found = [
            next(row[key] for row in record["rows"] if (row["work"], row["dtype"]) == (work, dtype))
            for record in (before, after)
        ]
        return f"{found[0] / unit:.3g}", f"{found[1] / unit:.3g}"

    products = "float32 products on tensor cores, three for one"
    return [
        (products, "forward, float32", *both("forward", "float32"), "half of 32 ms of products less"),
        (
            "the same, with GELU, the residual and the derivatives of both in the products' kernels",
            "TRUST K=6, float32",
            *both("trust K=6", "float32"),
            "150 ms less",
        ),
        (
            "the hidden map of the MLPs made again in the backward",
            "TRUST K=6, bf16, GiB",
            *both("trust K=6", "bf16", "peak_bytes", 2**30),
            "three of eleven kept maps fewer per block",
        ),
        (
            "the same kernels in bf16; batch norm by two passes over the map, the residual's gradient included; the "
            "norm of the merged sequences in smaller tiles, its backward in one kernel",
            "TRUST K=6, bf16",
            *both("trust K=6", "bf16"),
            "60 ms less",
        ),
        ("the same", "Tent, bf16", *both("tent", "bf16"), "10 ms less"),
        ("the same, and the moments of a stream by one kernel", "TIDE, bf16", *both("tide", "bf16"), "20 ms less"),
    ]


def steps_table(
    final: Speeds, fused: Speeds, recorded: Speeds, waitless: Speeds, plain: dict[str, dict[str, str]]
) -> str:
    rows = first_steps(fused, recorded, plain) + later_steps(fused, recorded, waitless) + last_steps(waitless, final)
    rows += profiled_steps()
    head = ["| change | measured on | before | after | predicted |", "| --- | --- | --- | --- | --- |"]
    hosts = ", ".join(speeds.ms("forward", batch=1) for speeds in (fused, recorded, waitless, final))
    note = (
        f"The runs were made on hosts of different speed: a plain forward pass at batch 1, which is the host's time "
        f"alone, took {plain['forward fp32 b1']['wall']} ms in the first and {hosts} ms in the others. Where the host "
        "decides, a part of the gain is the host's."
    )
    return "\n".join([*head, *(f"| {' | '.join(row)} |" for row in rows)]) + f"\n\n{note}"


FAILED = """What did not help, or failed:

- One pass for all K orders, with the weights stacked under `vmap`: six times the memory, and it failed in float32.
- One pass for all K orders, each part of the batch routed to its own copy of every adapted layer: right, but no faster
  than one after the other at any size, and K times the activations.
- `torch.compile` for the elementwise rest of training: slower at the sizes of the shipped network, and half a minute to
  compile; the networks do compile whole, if you want it.
- Recording over the parameters' own autograd leaves: a leaf that an earlier pass keeps alive belongs to another stream
  and breaks the recording. Recordings have leaves of their own over the same memory.
- On a CPU, a fused channel-last scan with vectors over the channels: better for some maps, much worse for others.
- Patches cut out by PyTorch's own copies: a product over them was slower than cuDNN for two of the four strided
  convolutions and faster for two. One kernel cuts them now.
- The partial sums of the scan's backward in one buffer: the kernel took a quarter longer in float32, so each has its
  own again.
- The start of a scan's chunk as a part of its first element, which saves a fifth of the shuffles: 2% faster in bf16, a
  sixth slower in float32, which then needs more registers.
- SS2D's thin products on tensor cores in float32 where maps are small (49 positions): twice the library's time.
- GELU by an error function that is right to the last bit, after a product in the same kernel: its arithmetic takes as
  long in bf16 as a kernel of its own would take to move the map. A polynomial within 4e-7 of GELU needs a third fewer
  instructions.

- Maps to sequences two numbers at a time where maps are small (14 x 14): slower than one at a time.
- MLPs of one kernel with large tiles (128 rows, 96 channels): few fit on a processor at once, and half as many rows are
  faster.

Not done: the stem could be computed once for all orders, but its norms are adapted: only its first convolution would be
saved, 1% of a step. The statistics of batch norm could come out of the kernels before it, whose tiles are so many that
summing them up would take what it saves."""


def cpu_lines(cpu: Speeds) -> str:
    record = cpu.record
    ratios = "\n".join(
        f"- {ratio:.1f} x: {work}" for work, ratio in record["over_reference"].items() if "network" in work
    )
    grown = ", ".join(f"{name}^{value:.2f}" for name, value in record["exponents"].items() if value is not None)
    return (
        f"`vmamba_nano` at 32 pixels, {record['facts']['threads']} threads. How many times as fast as the same code "
        f"with the reference scan:\n\n{ratios}\n\nThe time of a step grows as {grown} (fitted; 1 is linear).\n\n"
        "Left alone, PyTorch's threads spin for a while after each operation and keep a core from the scan's own; the "
        "first scan puts them to sleep, unless `OMP_WAIT_POLICY` or `GOMP_SPINCOUNT` is set ([why](decisions.md))."
    )


if __name__ == "__main__":
    main()
