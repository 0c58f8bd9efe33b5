"""Times of imports, of the help, and of first batches with an empty and with a filled cache, in new processes.

    PYTHONPATH=src python -m benchmarks.startup [--device cuda] [--checkpoint FILE]

Prints one line for each.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace

from trust_tta.bench.startup import time_first_batch, time_process
from trust_tta.bench.timing import Timing

CACHE_VARIABLES = (
    "TRUST_TTA_CACHE", "NUMBA_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "XDG_CACHE_HOME",
)  # fmt: skip


def startup_timings(
    model: str, methods: Sequence[str], *, checkpoint: str = "", device: str, batch: int, size: int
) -> Iterator[Timing]:
    """One row for each process, the cache folder empty ("cold") or filled by the one before ("warm").

    `methods`: first batches to time, "model" for the network itself.
    """
    row = Timing(part="start", work="", backend="auto", dtype="float32", batch=batch, size=size)
    yield time_process(replace(row, work="import trust_tta"), [sys.executable, "-c", "import trust_tta"])
    yield time_process(replace(row, work="trust-tta --help"), [sys.executable, "-m", "trust_tta", "--help"])
    for method in methods:
        with tempfile.TemporaryDirectory(prefix="trust-tta-") as folder:
            caches = dict.fromkeys(CACHE_VARIABLES, folder)
            for state in ("cold cache", "warm cache"):
                timed = time_first_batch(
                    replace(row, work=method), model=model, checkpoint=checkpoint, device=device, variables=caches
                )
                yield replace(timed, work=f"{timed.work}, {state}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--checkpoint", default="")
    arguments = parser.parse_args()
    on_gpu = arguments.device != "cpu"
    # On a CPU, TRUST and Tent compile nothing of their own.
    methods = ("model", "tent", "trust", "tide") if on_gpu else ("model", "tide")
    model, batch, size = ("vmamba_tiny_s1l8_bn", 128, 224) if on_gpu else ("vmamba_nano", 64, 32)
    for row in startup_timings(
        "" if arguments.checkpoint else model,
        methods,
        checkpoint=arguments.checkpoint,
        device=arguments.device,
        batch=batch,
        size=size,
    ):
        print(f"{row.work:<40} {row.failed or f'{(row.median_ms or 0) / 1e3:.2f} s'}")


if __name__ == "__main__":
    main()
