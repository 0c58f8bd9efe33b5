"""Independent tasks on as many threads as PyTorch uses, which must not spin meanwhile, in memory that is kept."""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

CHUNKS = 4  # channel chunks of an image: fixed, so that sums do not depend on the number of threads
SMALL = 1 << 15  # below this many elements, threads cost more than they bring
KEPT = 1 << 30  # bytes of freed memory that the process keeps for the next pass
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of mallopt: what stays at the end; blocks with a life of their own


def run_tasks(work: Callable[[int, int], None], tasks: int, elements: int) -> None:
    """Call `work(first, last)` over all tasks; compiled work releases the GIL, so that spans run side by side."""
    allowed = torch.get_num_threads() if elements >= SMALL else 1
    threads = min(allowed, tasks)
    if elements >= SMALL:
        _keep_freed_memory()
    if threads == 1:
        work(0, tasks)
        return
    _let_openmp_sleep(allowed)
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


@functools.cache
def _keep_freed_memory() -> None:
    """Let the C library keep what a pass has freed, unless the user has configured it.

    It gives large blocks back at once, and the system clears every page of the next pass anew: a tenth of its time.
    """
    chosen = os.environ.keys() & {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_"}
    if chosen or "malloc" in os.environ.get("GLIBC_TUNABLES", "") or sys.platform != "linux":
        return
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)  # not every C library has it
    if set_option is not None:
        for option in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD):
            set_option(ctypes.c_int(option), ctypes.c_int(KEPT))


@functools.cache
def _let_openmp_sleep(threads: int) -> None:
    """Keep PyTorch's OpenMP threads from spinning between operations, unless the user has configured how they wait.

    GNU OpenMP spins for milliseconds after each operation, and on a busy machine takes the cores from the scan's own
    threads. It reads its variables when PyTorch is imported, too early for us; but while it manages more threads than
    there are CPUs it hardly spins. So a thread of ours keeps a second team as large as PyTorch's, asleep. Where both
    teams fit on the CPUs, spinning does no harm and nothing is done.
    """
    if os.environ.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}:
        return
    try:
        # Symbols are looked up in the runtime that PyTorch itself was linked to.
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        start_team, cpus = library.GOMP_parallel, library.omp_get_num_procs()
    except (OSError, AttributeError):  # another OpenMP, or none
        return
    if 2 * threads <= cpus:
        return
    nothing = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: None)
    started = threading.Event()

    def keep_team() -> None:
        start_team(nothing, None, ctypes.c_uint(threads + 1), ctypes.c_uint(0))
        started.set()
        threading.Event().wait()  # a team ends with the thread that started it

    threading.Thread(target=keep_team, name="trust-tta-openmp", daemon=True).start()
    started.wait()
