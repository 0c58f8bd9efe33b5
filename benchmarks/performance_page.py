"""Write docs/develop/performance.md from the records in docs/results: python -m benchmarks.performance_page"""

from __future__ import annotations

from typing import Any

from benchmarks.pages import DOCS, RESULTS, read_record, table

from trust_tta.atomic import write_whole

WORKS = (
    "forward",
    "forward by the method 'source'",
    "Tent",
    "TRUST naive",
    "TRUST K=6 sequential",
    "TRUST K=6 parallel replicate",
    "TRUST K=6 parallel split",
)


class Speeds:
    """The rows of one record of `trust-tta speed`."""

    def __init__(self, name: str) -> None:
        self.record = read_record(name)

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
        return brief(row["median_ms"]) if row else "–"

    def gib(self, work: str, dtype: str = "float32", batch: int = 128) -> str:
        row = self.row(work, dtype, batch)
        return f"{row['peak_bytes'] / 2**30:.3g}" if row else "–"


def main() -> None:
    write_whole(DOCS / "develop" / "performance.md", page())


def page() -> str:
    final, cpu = Speeds("speed_h200.json"), Speeds("speed_cpu.json")
    authors = read_record("authors_h200.json")
    tables = (network_table(final, authors), record_line(final), memory_line(final), scan_table())
    measured = [*accuracy_section(), *scaling_section("scaling_h200.json")]
    on_cpu = (cpu_lines(cpu), *one_image_section(), *half_precision_section(cpu), *scaling_section("scaling_cpu.json"))
    return "\n\n".join((HEAD, "## On one H200", *tables, *measured, "## On a CPU", *on_cpu)) + "\n"


HEAD = """# Performance

*Written by `python -m benchmarks.performance_page` from [records](../results/README.md). `trust-tta speed` measures the
same on your machine.*

A step adapts on the batch, merges, and predicts the batch again. The network is VMamba-T (s1l8, batch norm) at 224
pixels with random weights; float32 is computed without TF32; bf16 is autocast. Times are medians, in milliseconds, of
the whole step as the caller sees it; memory is the peak of allocated tensors, including that of recorded passes."""


def record_line(final: Speeds) -> str:
    """How long each row was measured, and whether the record is whole."""
    settings = final.record["settings"]
    line = f"Each row was measured for {settings.get('limits', settings)['seconds']:g} seconds."
    if not final.record["facts"]["finished"]:
        line += " The record was stopped before its end: a dash stands for what it does not hold."
    return line


def network_table(final: Speeds, authors: dict[str, Any]) -> str:
    lines = []
    for batch in (128, 1):
        for work in WORKS:
            if final.row(work, batch=batch) is None:
                continue
            ms, gib = (authors[kind][str(batch)].get(work, "–") for kind in ("ms", "GiB"))
            memory = f"{final.gib(work, batch=batch)} / {final.gib(work, 'bf16', batch)}"
            lines.append([work, batch, ms, final.ms(work, batch=batch), final.ms(work, "bf16", batch), gib, memory])
    head = ["work", "batch", "authors' code, float32", "float32", "bf16", "authors' GiB", "GiB, float32 / bf16"]
    return table(head, lines)


def memory_line(final: Speeds) -> str:
    naive, parallel = (final.row(work, batch=1) for work in ("TRUST naive", "TRUST K=6 parallel replicate"))
    ratio = parallel["peak_bytes"] / naive["peak_bytes"] if naive and parallel else float("nan")
    return f"Peak memory of six orders in parallel at batch 1 over that of one order, TRUST naive: {ratio:.2f}."


def scan_table() -> str:
    """The scan alone, from its own record."""
    record = read_record("scan_h200.json")
    lines = []
    for row in record["rows"]:
        cells = [f"{row['channels']} x {row['length']}", row["dtype"]]
        for timed in (row["forward"], row["backward"]):
            floor = 1e3 * timed["bytes"] / record["copy_bytes_per_second"]
            cells += [f"{timed['ms']:.3g}", f"{timed['ms'] / floor:.2f}"]
        lines.append(cells)
    about = "The scan alone, batch 128, and its ratio to the time in which a copy moves the bytes that it must move:"
    note = "The floor is that of the scan as it is used here: two sequences, each read both ways."
    head = ["channels x length", "dtype", "forward", "ratio", "backward", "ratio"]
    return f"{about}\n\n{table(head, lines)}\n\n{note}"


def accuracy_section() -> list[str]:
    """Accuracy with the kernels, against the same methods without them."""
    runs = read_record("six_corruptions_kernels.json")
    lines = []
    for method in ("source", "tent", "trust"):
        found = [runs.get(f"{method}, {d}, {by}") for d in ("float32", "bf16") for by in ("auto", "reference")]
        lines.append([method, *map(percent, found)])
    about = (
        "Accuracy in percent of the shipped network on six corruptions at severity 5 (4,096 images each), by the "
        "kernels and, *plain*, by PyTorch's operators; plain TRUST takes too long:"
    )
    return ["### Accuracy", about, table(["method", "float32", "plain", "bf16", "plain"], lines)]


def percent(run: dict[str, Any] | None) -> str:
    return "–" if run is None else f"{run['mean']:.2f}"


def optional_record(name: str) -> dict[str, Any] | None:
    return read_record(name) if (RESULTS / name).exists() else None


def scaling_section(name: str) -> list[str]:
    """The cost per image against batch, pixels and orders, with the fitted exponents and the end of the memory."""
    record = optional_record(name)
    if record is None:
        return []
    lines = []
    for grown in record["grown"]:
        rows = [r for r in record["rows"] if (r["part"], r["work"]) == (grown["part"], grown["work"])]
        lines.append(scaling_cells(grown, rows, record["device_bytes"]))
    plan = record["plan"]
    return [
        "### How it grows",
        f"`{plan['model']}` in {plan['dtype']}. The batch grows at {plan['size']} pixels, the pixels at batch "
        f"{plan['batch']}, the orders at batch {plan['few']}. Exponents are fitted over the upper half of an axis; "
        "with 1 the cost per image is constant. Where the memory ends is extrapolated from both ends of an axis.",
        table(["axis", "work", "ms per image, at both ends", "exponent", "memory ends at"], lines),
    ]


def scaling_cells(grown: dict[str, Any], rows: list[dict[str, Any]], device_bytes: int | None) -> list[str]:
    names = {"batch": "batch", "pixels": "size", "k": "k"}
    costs = [
        f"{row[names[grown['part']]]}: {brief(row['median_ms'] / row['batch'])}" if row["median_ms"] else row["failed"]
        for row in (rows[0], rows[-1])
    ]
    end = "–"
    if device_bytes and grown["bytes_each"] and grown["part"] != "k":
        most = (device_bytes - grown["bytes_fixed"]) / grown["bytes_each"]
        end = f"{most:,.0f} images" if grown["part"] == "batch" else f"{most**0.5:,.0f} x {most**0.5:,.0f} pixels"
    exponent = f"{grown['exponent']:.2f}" if grown["exponent"] is not None else "–"
    return [grown["part"], grown["work"], ", ".join(costs), exponent, end]


def brief(number: float) -> str:
    """Three digits, or all before the point."""
    return f"{number:.3g}" if number < 1000 else f"{number:,.0f}"


def cpu_lines(cpu: Speeds) -> str:
    record = cpu.record
    ratios = "\n".join(
        f"- {ratio:.1f} x: {work}" for work, ratio in record["over_reference"].items() if "network" in work
    )
    grown = ", ".join(f"{name}^{value:.2f}" for name, value in record.get("exponents", {}).items() if value is not None)
    return (
        f"`vmamba_nano` at 32 pixels, {record['facts']['threads']} threads. How many times as fast as the same code "
        f"with the reference scan:\n\n{ratios}\n\nThe time of a step grows as {grown} (fitted; 1 is linear).\n\n"
        "Left alone, PyTorch's threads spin for a while after each operation and keep a core from the scan's own; the "
        "first scan puts them to sleep, unless `OMP_WAIT_POLICY` or `GOMP_SPINCOUNT` is set ([why](decisions.md)). It "
        "also lets the process keep up to 1 GiB of freed memory, unless `MALLOC_TRIM_THRESHOLD_` or the like is set."
    )


def one_image_section() -> list[str]:
    """One image through VMamba-T, beside other programs and another network."""
    record = optional_record("cpu_forward.json")
    if record is None:
        return []
    times = record["milliseconds"].items()
    lines = [[name, *(brief(ms[kind]) for kind in ("least", "median", "cpu"))] for name, ms in times]
    (ours, many), (other, few) = record["operations"].items()
    about = (
        f"`{ours}` at {record['image_size']} pixels, {many / 1e9:.1f} GFLOP of products and convolutions, beside "
        f"onnxruntime with the exported network and beside timm's `{other}`, {few / 1e9:.1f} GFLOP. "
        f"{record['rounds']} rounds in turn on {record['machine']['threads']} threads of "
        f"{record['machine']['processor']}, by `python -m benchmarks.cpu_forward`:"
    )
    return ["### One image", about, table(["by", "ms, least", "median", "processor"], lines)]


def half_precision_section(cpu: Speeds) -> list[str]:
    """Speed and accuracy of `--dtype bf16` on a CPU."""
    batch = cpu.record["settings"]["batches"][0]
    works = [w for w in ("forward by the method 'source'", "Tent", "TRUST K=6 sequential") if cpu.row(w, "bf16", batch)]
    runs = optional_record("six_corruptions_cpu.json")
    if not works or runs is None:
        return []
    lines = [[f"{work}, ms", cpu.ms(work, batch=batch), cpu.ms(work, "bf16", batch)] for work in works]
    for method in ("source", "tent"):
        found = (percent(runs.get(f"{method}, {dtype}, auto")) for dtype in ("float32", "bf16"))
        lines.append([f"{method}, accuracy in percent", *found])
    about = (
        f'bf16, which is `dtype = "bf16"` or `torch.autocast` around the calls, on a CPU whose products take it '
        f"(AVX-512 BF16): times at batch {batch}, and the accuracy of the shipped network on the six corruptions above:"
    )
    return ["### bf16", about, table(["work", "float32", "bf16"], lines)]


if __name__ == "__main__":
    main()
