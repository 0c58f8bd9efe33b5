"""The record of `trust-tta speed` as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trust_tta.report.tables import Entry, Layout, to_text

Record = Mapping[str, Any]


def network_table(rows: Sequence[Record], network: Record) -> str:
    """Times, images a second, memory; for the forward pass also the arithmetic it reaches."""
    flops = network["flops_products"] + network["flops_scan"]
    header = ("", "scan", "dtype", "batch", "ms", "p20", "p80", "n", "images/s", "GiB", "GFLOP/s")
    lines = []
    for row in rows:
        place = (row["work"], row["backend"], row["dtype"], str(row["batch"]))
        if row["failed"]:
            lines.append((*place, "failed", *[""] * 6))
            continue
        rate = 1e3 * row["batch"] / row["median_ms"]
        reached = f"{rate * flops / 1e9:.1f}" if row["work"] == "forward" else ""
        memory = f"{row['peak_bytes'] / 2**30:.2f}" if row["peak_bytes"] else ""
        lines.append((*place, *_times(row), f"{rate:.1f}", memory, reached))
    return _draw(header, lines) + _failures(rows)


def scan_table(rows: Sequence[Record]) -> str:
    """Times, and their ratio to the bytes that must move at the speed of a copy."""
    header = ("", "scan", "dtype", "batch", "channels", "length", "ms", "p20", "p80", "n", "x floor", "x unfused")
    lines = []
    for row in rows:
        shape = (str(row[name]) for name in ("batch", "channels", "size"))
        place = (row["work"], row["backend"], row["dtype"], *shape)
        if row["failed"]:
            lines.append((*place, "failed", *[""] * 5))
        else:
            lines.append((*place, *_times(row), f"{row['floor_ratio']:.2f}", f"{row['unfused_ratio']:.2f}"))
    return _draw(header, lines) + _failures(rows)


def summary_lines(record: Record, *, gpu: bool) -> Iterator[str]:
    """What the rows amount to."""
    network = record["network"]
    yield (
        f"{network['name']}: {network['parameters']:,} parameters, of which Tent adapts "
        f"{network['adapted_by_tent']:,} and TRUST {network['adapted_by_trust']:,}"
    )
    yield (
        f"an image's forward pass: {network['flops_products'] / 1e9:.3f} GFLOP in products and convolutions, "
        f"{network['flops_scan'] / 1e9:.3f} in scans"
    )
    yield f"copying within the {'GPU' if gpu else 'memory'}: {record['copy_bytes_per_second'] / 1e9:.1f} GB/s"
    for place, ratio in record["over_reference"].items():
        if place.startswith("network"):
            yield f"{ratio:.1f} x as fast as with the reference scan: {place.removeprefix('network: ')}"
    grown = {name: value for name, value in record["exponents"].items() if value is not None}
    if grown:
        powers = ", ".join(f"{name}^{value:.2f}" for name, value in grown.items())
        yield f"the time of a step grows as {powers} (fitted; 1 is linear)"
    if record["memory_over_one_order"]:
        ratios = ", ".join(f"K={k} {ratio:.2f}" for k, ratio in record["memory_over_one_order"].items())
        yield f"memory of the parallel mode over one order: {ratios}"
    yield f"{len(record['rows'])} rows in {record['seconds']:.0f} s"


def _times(row: Record) -> tuple[str, ...]:
    times = (
        f"{row[name]:.3g}" if row[name] < 100 else f"{row[name]:.0f}" for name in ("median_ms", "p20_ms", "p80_ms")
    )
    return *times, str(row["repeats"])


def _failures(rows: Sequence[Record]) -> str:
    failed = [row for row in rows if row["failed"]]
    return "".join(f"failed: {row['work']}, {row['dtype']}, batch {row['batch']}: {row['failed']}\n" for row in failed)


def _draw(header: tuple[str, ...], lines: Sequence[tuple[str, ...]]) -> str:
    return to_text(Layout(header, tuple(tuple(Entry(text) for text in line) for line in lines)))
