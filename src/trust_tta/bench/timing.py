"""Timing pieces of work: warm-up, repeats, spread, peak memory; a failure is a result, too."""

from __future__ import annotations

import gc
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from trust_tta.bench.environment import autocast, wait_for
from trust_tta.errors import TrustWarning, reason_of

Work: TypeAlias = Callable[[], object]
Clock: TypeAlias = Callable[[Work], float]
Prepare: TypeAlias = Callable[[], AbstractContextManager[Work]]

_CACHE_BYTES = 256 << 20  # more than the L2 cache of any device


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long to measure: until there are `least` repeats and `seconds` have passed, or one repeat took `long`."""

    seconds: float = 1.0
    least: int = 3
    most: int = 200
    warmups: int = 3
    long: float = 15.0


@dataclass(frozen=True, kw_only=True)
class Timing:
    """One measured piece of work. `size`: pixels of a side, or positions of a scan; `k`: the number of orders.

    `floor_ratio` and `unfused_ratio` are the time over the byte floor of the work as it is, and as four separate
    scans. `failed` says why there are no numbers.
    """

    part: str
    work: str
    backend: str
    dtype: str
    batch: int
    size: int
    k: int | None = None
    channels: int | None = None
    median_ms: float | None = None
    p20_ms: float | None = None
    p80_ms: float | None = None
    repeats: int = 0
    peak_bytes: int | None = None
    floor_ratio: float | None = None
    unfused_ratio: float | None = None
    failed: str = ""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A timing to take: `prepare` gives the work and cleans up after it; floors are in seconds."""

    timing: Timing
    prepare: Prepare
    limits: Limits
    on_device: bool = False  # use the device's own clock, and flush its cache before each repeat
    floor: float | None = None
    unfused: float | None = None


def measure(case: Case, device: torch.device) -> Timing:
    """The timing with its numbers, or with the reason for their absence."""
    try:
        with warnings.catch_warnings(), autocast(device, case.timing.dtype), case.prepare() as work:
            warnings.simplefilter("ignore", TrustWarning)  # about poor predictions, which do not matter here
            times, peak = _times(work, device, case)
        return _filled(case, times, peak)
    except Exception as error:  # too little memory, or a kernel that this device cannot run, is a result
        return replace(case.timing, failed=f"{type(error).__name__}: {reason_of(error)}")
    finally:
        _free(device)


def refuse(case: Case, reason: str) -> Timing:
    return replace(case.timing, failed=f"refused: {reason}")


def repeat(work: Work, clock: Clock, limits: Limits) -> list[float]:
    """Seconds of each repeat, after the warm-up."""
    for _ in range(limits.warmups):
        if clock(work) > limits.seconds:
            break
    times: list[float] = []
    while len(times) < limits.least or (sum(times) < limits.seconds and len(times) < limits.most):
        times.append(clock(work))
        if times[-1] > limits.long:
            break
    return times


def wall_clock(device: torch.device) -> Clock:
    """Seconds by the host's clock, the device's work included."""

    def clock(work: Work) -> float:
        wait_for(device)
        start = time.perf_counter()
        work()
        wait_for(device)
        return time.perf_counter() - start

    return clock


def device_clock(device: torch.device) -> Clock:
    """Seconds by the clock of a CUDA device; the launch on the host is hidden behind the flushing of the cache."""
    cache = torch.empty(_CACHE_BYTES, dtype=torch.int8, device=device)

    def clock(work: Work) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        cache.zero_()
        start.record()
        work()
        end.record()
        torch.cuda.synchronize(device)
        return float(start.elapsed_time(end)) / 1e3

    return clock


def copy_bandwidth(device: torch.device, *, limits: Limits) -> float:
    """Bytes per second that a copy from the device to itself reads and writes."""
    source = torch.ones(1 << (27 if device.type == "cuda" else 25), device=device)
    target = torch.empty_like(source)
    clock = device_clock(device) if device.type == "cuda" else wall_clock(device)
    seconds = statistics.median(repeat(lambda: target.copy_(source), clock, limits))
    return 2 * source.nbytes / seconds


def exponent(points: Sequence[tuple[float, float]]) -> float | None:
    """b of the least-squares fit y = a x^b, None for fewer than three points."""
    if len(points) < 3:
        return None
    logs = [(math.log(x), math.log(y)) for x, y in points]
    return statistics.linear_regression(*zip(*logs, strict=True)).slope


@contextmanager
def float32_only(device: torch.device) -> Iterator[None]:
    """Keep float32 products in float32 on a CUDA device, where convolutions round to TF32 by default."""
    if device.type != "cuda":
        yield
        return
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.allow_tf32, matmul.allow_tf32
    cudnn.allow_tf32 = matmul.allow_tf32 = False
    try:
        yield
    finally:
        cudnn.allow_tf32, matmul.allow_tf32 = before


def _times(work: Work, device: torch.device, case: Case) -> tuple[list[float], int | None]:
    if device.type != "cuda":
        return repeat(work, wall_clock(device), case.limits), None
    torch.cuda.reset_peak_memory_stats(device)
    for _ in range(2):  # the second run shows the memory of recorded passes, which replays do not count
        first = wall_clock(device)(work)
        if first > case.limits.long:  # once more would take as long
            return [first], torch.cuda.max_memory_allocated(device)
    peak = torch.cuda.max_memory_allocated(device)
    warmed = replace(case.limits, warmups=max(0, case.limits.warmups - 2))
    if case.on_device:
        return repeat(work, device_clock(device), warmed), None  # a recorded graph has memory of its own
    return repeat(work, wall_clock(device), warmed), peak


def _filled(case: Case, times: Sequence[float], peak: int | None) -> Timing:
    median, (low, high) = statistics.median(times), _spread(times)
    return replace(
        case.timing,
        median_ms=1e3 * median,
        p20_ms=1e3 * low,
        p80_ms=1e3 * high,
        repeats=len(times),
        peak_bytes=peak,
        floor_ratio=median / case.floor if case.floor else None,
        unfused_ratio=median / case.unfused if case.unfused else None,
    )


def _spread(times: Sequence[float]) -> tuple[float, float]:
    """The 20th and the 80th percentile."""
    if len(times) == 1:
        return times[0], times[0]
    cuts = statistics.quantiles(times, n=5, method="inclusive")
    return cuts[0], cuts[3]


def _free(device: torch.device) -> None:
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
