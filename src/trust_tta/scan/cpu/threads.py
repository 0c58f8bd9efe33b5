"""Spread independent tasks over as many threads as PyTorch uses."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

CHUNKS = 4  # channel chunks of an image: fixed, so that sums do not depend on the number of threads
SMALL = 1 << 15  # below this many elements, threads cost more than they bring


def run_tasks(work: Callable[[int, int], None], tasks: int, elements: int) -> None:
    """Call `work(first, last)` over all tasks; compiled work lets go of Python's lock, so spans run side by side."""
    threads = min(torch.get_num_threads(), tasks) if elements >= SMALL else 1
    if threads == 1:
        work(0, tasks)
        return
    bounds = [tasks * i // threads for i in range(threads + 1)]
    pool = _pool(os.getpid(), threads - 1)
    futures = [pool.submit(work, *span) for span in itertools.pairwise(bounds[1:])]
    try:
        work(0, bounds[1])  # the caller works too: one thread less to wake
    finally:
        for future in futures:
            future.result()


@functools.cache
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """Threads kept between calls; keyed by process because threads do not survive a fork."""
    return ThreadPoolExecutor(threads, thread_name_prefix="trust-tta-scan")
