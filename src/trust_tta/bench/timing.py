"""Timing of a piece of work: warm-up, repeats, spread, peak memory, or the reason for its failure."""

from __future__ import annotations

import gc
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from trust_tta.bench.environment import autocast, synchronize
from trust_tta.errors import TrustWarning, reason_of

Work: TypeAlias = Callable[[], object]
Clock: TypeAlias = Callable[[Work], float]
Prepare: TypeAlias = Callable[[], AbstractContextManager[Work]]

STEADY = 0.8  # of the time of the call before: a call that is faster than this shows that the one before compiled


@dataclass(frozen=True, kw_only=True)
class TimingLimits:
    """Measure until there are `min_repeats` and `seconds` have passed, or one repeat took `max_seconds`."""

    seconds: float = 1.0
    min_repeats: int = 3
    max_repeats: int = 200
    max_warmups: int = 6
    max_seconds: float = 15.0


@dataclass(frozen=True, kw_only=True)
class Timing:
    """One measured piece of work. `size`: pixels of a side, or positions of a scan; `k`: the number of orders.

    `first_ms` is the first call, which compiles; it is not among the repeats. `failed` says why there are no numbers.
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
    first_ms: float | None = None
    failed: str = ""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A timing to take: `prepare` gives the work and cleans up after it."""

    timing: Timing
    prepare: Prepare
    limits: TimingLimits


def measure(case: Case, device: torch.device) -> Timing:
    """The timing with its numbers, or with the reason for its failure."""
    clock, peak, on_gpu = wall_clock(device), None, device.type == "cuda"
    try:
        with warnings.catch_warnings(), autocast(device, case.timing.dtype), case.prepare() as work:
            warnings.simplefilter("ignore", TrustWarning)  # about poor predictions, which do not matter here
            if on_gpu:
                torch.cuda.reset_peak_memory_stats(device)
            first = warm_up(work, clock, case.limits)
            if on_gpu:  # the warm-up captures graphs, whose replays allocate nothing
                peak = torch.cuda.max_memory_allocated(device)
            times = repeat(work, clock, case.limits)
        cuts = statistics.quantiles(times, n=5, method="inclusive") if len(times) > 1 else times
        return replace(
            case.timing,
            median_ms=1e3 * statistics.median(times),
            p20_ms=1e3 * cuts[0],
            p80_ms=1e3 * cuts[-1],
            repeats=len(times),
            peak_bytes=peak,
            first_ms=1e3 * first,
        )
    except Exception as error:  # too little memory, or a kernel that this device cannot run, is a result
        return replace(case.timing, failed=f"{type(error).__name__}: {reason_of(error)}")
    finally:
        if on_gpu:
            gc.collect()
            torch.cuda.empty_cache()


def warm_up(work: Work, clock: Clock, limits: TimingLimits) -> float:
    """Call the work until it no longer gets faster, at least twice; returns the seconds of the first call.

    The first calls compile kernels and capture CUDA graphs, however long that takes; they are not among the repeats.
    """
    first = last = clock(work)
    for _ in range(max(1, limits.max_warmups)):
        before, last = last, clock(work)
        if last > STEADY * before:
            break
    return first


def repeat(work: Work, clock: Clock, limits: TimingLimits) -> list[float]:
    times: list[float] = []
    while len(times) < limits.min_repeats or (sum(times) < limits.seconds and len(times) < limits.max_repeats):
        times.append(clock(work))
        if times[-1] > limits.max_seconds:
            break
    return times


def wall_clock(device: torch.device) -> Clock:
    """Seconds by the host's clock, the device's work included."""

    def clock(work: Work) -> float:
        synchronize(device)
        start = time.perf_counter()
        work()
        synchronize(device)
        return time.perf_counter() - start

    return clock


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
