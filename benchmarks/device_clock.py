"""The clock of a CUDA device, for timings without the host's share."""

from __future__ import annotations

import torch

from trust_tta.bench.timing import Clock, Work

_CACHE_BYTES = 256 << 20  # more than the L2 cache of any device


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
