"""What one run of `trust-tta speed` measures, and what is worked out from its rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from trust_tta.bench.speed import Job, Limits, Row, exponent
from trust_tta.bench.speed_network import network_jobs, order_jobs, reference_jobs, scaling_jobs
from trust_tta.bench.speed_scan import DTYPES, Scan, scan_jobs, stage_shapes
from trust_tta.errors import ConfigError
from trust_tta.models.vmamba import VMamba
from trust_tta.orders import ScanOrder

NATIVE = {"cpu": "cpu", "cuda": "triton"}  # the backend that "auto" takes on a device


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The network and the sizes of a run; the largest batch is the one that scans and growth are measured at."""

    model: str
    batches: tuple[int, ...]
    size: int
    dtypes: tuple[str, ...]
    orders: tuple[int, ...] = (1, 2, 4, 6, 8)
    memory: bool = False  # also the parallel mode by the number of orders, at the smallest batch
    limits: Limits = Limits()

    def __post_init__(self) -> None:
        many = len(ScanOrder.all())
        checks = (
            ("batch", self.batches, all(b >= 1 for b in self.batches), "whole numbers from 1 on"),
            ("size", self.size, self.size >= 16, "at least 16 pixels"),
            ("dtype", self.dtypes, all(d in DTYPES for d in self.dtypes), f"some of {', '.join(DTYPES)}"),
            ("orders", self.orders, all(1 <= k <= many for k in self.orders), f"numbers from 1 to {many}"),
            ("repeats", self.limits.least, self.limits.least >= 1, "at least 1"),
        )
        wrong = [
            f"--{name} is {value} but must be {wanted}"
            for name, value, fits, wanted in checks
            if not fits or value == ()
        ]
        if wrong:
            raise ConfigError("; ".join(wrong))


def default_settings(device: torch.device) -> Settings:
    """What each device is compared on: the paper's network on a GPU, the shipped one on a CPU."""
    if device.type == "cuda":
        return Settings(
            model="vmamba_tiny_s1l8_bn", batches=(128, 1), size=224, dtypes=("float32", "bf16"), memory=True
        )
    return Settings(model="vmamba_nano", batches=(64,), size=32, dtypes=("float32",))


def quick(settings: Settings) -> Settings:
    """A run of a few seconds that goes through every part once; its numbers mean nothing."""
    limits = Limits(seconds=0.0, least=1, warmups=0)
    return replace(settings, model="vmamba_nano", batches=(8,), size=16, orders=(1, 2), memory=True, limits=limits)


def make_jobs(settings: Settings, model: VMamba, scan: Scan, *, device: torch.device, bandwidth: float) -> list[Job]:
    """Networks, each beside the same with the reference scan; memory by orders, growth, the scan alone."""
    backend, limits, size = NATIVE[device.type], settings.limits, settings.size
    largest, smallest = max(settings.batches), min(settings.batches)
    jobs = [
        job
        for batch in settings.batches
        for dtype in settings.dtypes
        for job in network_jobs(model, backend=backend, dtype=dtype, batch=batch, size=size, limits=limits)
    ]
    brief = replace(limits, seconds=limits.seconds / 4)
    # Seconds a pass on a GPU: a few repeats tell the ratio.
    reference = limits if device.type == "cpu" else replace(brief, warmups=1, least=min(2, limits.least), long=5.0)
    slow = reference_jobs(model, batch=largest, size=size, whole_step=device.type == "cpu", limits=reference)
    jobs = [job for fast in jobs for job in (fast, *(s for s in slow if _is_twin(s.row, fast.row)))]
    if settings.memory:
        jobs += order_jobs(
            model, settings.orders, backend=backend, dtype="float32", batch=smallest, size=size, limits=brief
        )
    if device.type == "cpu":  # a GPU is not full at small sizes: its exponents say nothing
        jobs += scaling_jobs(model, backend=backend, batch=largest, size=size, limits=brief)
    # The scans come last: recording a graph that fails can leave the device's random numbers unusable.
    for shape in stage_shapes(model, batch=largest, size=size):
        for name, dtype in [*((backend, d) for d in settings.dtypes), ("reference", "float32")]:
            jobs += scan_jobs(scan, shape, backend=name, dtype=dtype, device=device, bandwidth=bandwidth, limits=brief)
    return jobs


def _is_twin(slow: Row, fast: Row) -> bool:
    """Whether two rows differ in their backend alone: they are timed one after the other, as machines have moods."""
    return replace(slow, backend=fast.backend) == fast


def exponents(rows: Iterable[Row]) -> dict[str, float | None]:
    """The exponents b with which the time of a step grows: cost ~ x^b, over batch, pixels and orders."""
    points: dict[str, list[tuple[float, float]]] = {"batch": [], "pixels": [], "k": []}
    for row in rows:
        if row.part in points and row.median_ms:
            x = {"batch": row.batch, "pixels": row.size**2, "k": row.k or 1}[row.part]
            points[row.part].append((x, row.median_ms))
    return {part: exponent(measured) for part, measured in points.items()}


def over_reference(rows: Sequence[Row]) -> dict[str, float]:
    """How many times faster than with the reference scan each piece of work is."""
    slow = {_place(r): r.median_ms for r in rows if r.backend == "reference" and r.median_ms}
    fast = [r for r in rows if r.backend != "reference" and r.median_ms and r.dtype == "float32"]
    return {
        f"{r.part}: {r.work}, batch {r.batch}, size {r.size}": slow[_place(r)] / r.median_ms  # type: ignore[operator]
        for r in fast
        if _place(r) in slow
    }


def memory_over_one(rows: Iterable[Row]) -> dict[int, float]:
    """Peak memory of the parallel mode with K orders over that with one."""
    peaks = {r.k: r.peak_bytes for r in rows if r.part == "orders" and r.peak_bytes and r.k}
    return {k: peak / peaks[1] for k, peak in peaks.items()} if 1 in peaks else {}


def _place(row: Row) -> tuple[object, ...]:
    return row.part, row.work, row.batch, row.size, row.channels
