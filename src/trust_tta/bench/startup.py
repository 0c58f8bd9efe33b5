"""First-call times in fresh processes: imports, help, and the first batch with an empty and with a filled cache."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from trust_tta.bench.timing import Timing
from trust_tta.errors import one_line

CACHE_VARIABLES = (
    "TRUST_TTA_CACHE",
    "NUMBA_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "XDG_CACHE_HOME",
)
TIMEOUT_SECONDS = 600

# The work of `fill_gpu_caches`: the kernels depend on the size of a batch through their tiles, and on TRUST's mode.
GPU_WORK = ("model", "tent", "trust", "trust split", "tide")
GPU_BATCHES = (16, 1, 128)

# Prints the seconds from the end of the imports to the first logits on the host.
FIRST_BATCH = """
import sys, time
import torch, trust_tta as tt
model, checkpoint, work, device, batch, size, dtype = sys.argv[1:]
method, _, mode = work.partition(" ")
options = {"mode": mode} if mode else {}
begin = time.perf_counter()
network = tt.create_model(model or None, checkpoint=checkpoint or None).to(device).eval()
network = network if method == "model" else tt.create_method(method, network, **options)
images = torch.randn(int(batch), 3, int(size), int(size), device=device)
mixed = torch.autocast(device.split(":")[0], torch.bfloat16, enabled=dtype == "bf16")
with mixed, torch.no_grad() if method == "model" else torch.enable_grad():
    network(images).cpu()
print(time.perf_counter() - begin)
"""


def startup_timings(
    model: str, methods: Sequence[str], *, checkpoint: str = "", device: str, backend: str, batch: int, size: int
) -> Iterator[Timing]:
    """Rows of the part "start": one process each, the cache folder empty ("cold") or filled by the one before ("warm").

    `methods`: first batches to time, "model" for the network itself.
    """
    row = Timing(part="start", work="", backend=backend, dtype="float32", batch=batch, size=size)
    help_command = [sys.executable, "-m", "trust_tta", "--help"]
    yield _time_process(
        replace(row, work="import trust_tta"), [sys.executable, "-c", "import trust_tta"], {}, whole=True
    )
    yield _time_process(replace(row, work="trust-tta --help"), help_command, {}, whole=True)
    for method in methods:
        with tempfile.TemporaryDirectory(prefix="trust-tta-") as folder:
            caches = dict.fromkeys(CACHE_VARIABLES, folder)
            for state in ("cold cache", "warm cache"):
                timed = _time_first_batch(replace(row, work=method), model, checkpoint, device, caches)
                yield replace(timed, work=f"{timed.work}, {state}")


def fill_gpu_caches(
    model: str = "vmamba_tiny_s1l8_bn",
    *,
    device: str = "cuda",
    batches: Sequence[int] = GPU_BATCHES,
    size: int = 224,
) -> list[Timing]:
    """Compile the Triton kernels of a network and of the methods into the user's cache, in processes side by side.

    One row for each batch size, piece of work and dtype. A process compiles the kernels of a pass side by side itself,
    but waits for its imports, and for kernels outside such passes one after another.
    """
    row = Timing(part="start", work="", backend="triton", dtype="", batch=0, size=size)
    rows = [
        replace(row, work=work, dtype=dtype, batch=batch)
        for batch in batches
        for work in GPU_WORK
        for dtype in ("float32", "bf16")
        if batch > 1 or work != "trust split"
    ]
    with ThreadPoolExecutor(max(2, (os.cpu_count() or 1) // 4)) as pool:
        return list(pool.map(lambda row: _time_first_batch(row, model, "", device, {}), rows))


def _time_first_batch(row: Timing, model: str, checkpoint: str, device: str, variables: Mapping[str, str]) -> Timing:
    """The row of the first batch of `row.work` ("model", a method, or a method and its mode) in a new process."""
    sizes = (str(row.batch), str(row.size), row.dtype)
    command = [sys.executable, "-c", FIRST_BATCH, model, checkpoint, row.work, device, *sizes]
    name = "first model(x)" if row.work == "model" else f"first {row.work} batch"
    return _time_process(replace(row, work=name), command, variables)


def _time_process(row: Timing, command: Sequence[str], variables: Mapping[str, str], *, whole: bool = False) -> Timing:
    """The row with the seconds of a process: those that it prints, or its `whole` run time."""
    begin = time.perf_counter()
    try:
        ended = subprocess.run(
            command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=TIMEOUT_SECONDS
        )
    except subprocess.TimeoutExpired:
        return replace(row, failed=f"not finished after {TIMEOUT_SECONDS} seconds")
    if ended.returncode:
        return replace(row, failed=one_line(ended.stderr.strip().splitlines()[-1], longest=200))
    ms = 1e3 * (time.perf_counter() - begin if whole else float(ended.stdout))
    return replace(row, median_ms=ms, p20_ms=ms, p80_ms=ms, repeats=1)
