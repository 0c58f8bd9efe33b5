"""First batches in new processes, which compile the kernels that later processes find in the cache."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from trust_tta.bench.timing import Timing
from trust_tta.errors import one_line

TIMEOUT_SECONDS = 600

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


def fill_gpu_caches(
    model: str = "vmamba_tiny_s1l8_bn", *, device: str = "cuda", batches: Sequence[int] = (16, 1, 128), size: int = 224
) -> list[Timing]:
    """Compile the Triton kernels of a network and of the methods into the user's cache, in processes side by side.

    One row for each batch size, piece of work and dtype: kernels depend on the batch size through their tiles, and on
    TRUST's mode.
    """
    place = Timing(part="start", work="", backend="triton", dtype="", batch=0, size=size)
    rows = [
        replace(place, work=work, dtype=dtype, batch=batch)
        for batch in batches
        for work in ("model", "tent", "trust", "trust split", "tide")
        for dtype in ("float32", "bf16")
        if batch > 1 or work != "trust split"
    ]
    # A process waits for its imports, and for kernels outside of passes one after another: several share the cores.
    with ThreadPoolExecutor(max(2, (os.cpu_count() or 1) // 4)) as pool:
        return list(pool.map(lambda row: time_first_batch(row, model=model, device=device), rows))


def time_first_batch(
    row: Timing, *, model: str, checkpoint: str = "", device: str, variables: Mapping[str, str] | None = None
) -> Timing:
    """The row with the time of the first batch of its work, "model" or a method and its mode, in a new process."""
    sizes = [str(row.batch), str(row.size), row.dtype]
    command = [sys.executable, "-c", FIRST_BATCH, model, checkpoint, row.work, device, *sizes]
    row = replace(row, work="first model(x)" if row.work == "model" else f"first {row.work} batch")
    return time_process(row, command, variables=variables, printed=True)


def time_process(
    row: Timing, command: Sequence[str], *, variables: Mapping[str, str] | None = None, printed: bool = False
) -> Timing:
    """The row with the run time of a process, or with the seconds that it `printed`."""
    begin = time.perf_counter()
    try:
        ended = subprocess.run(
            command, env={**os.environ, **(variables or {})}, capture_output=True, text=True, timeout=TIMEOUT_SECONDS
        )
    except subprocess.TimeoutExpired:
        return replace(row, failed=f"not finished after {TIMEOUT_SECONDS} seconds")
    if ended.returncode:
        return replace(row, failed=one_line(ended.stderr.strip().splitlines()[-1], longest=200))
    seconds = float(ended.stdout) if printed else time.perf_counter() - begin
    return replace(row, median_ms=1e3 * seconds, p20_ms=1e3 * seconds, p80_ms=1e3 * seconds, repeats=1)
