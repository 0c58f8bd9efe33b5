"""Methods on six corruptions at severity 5, first 4,096 test images of CIFAR-10, batches of 128, reset at each.

    python -m benchmarks.six_corruptions WEIGHTS IMAGES LABELS RECORD [RUN ...]
    python -m benchmarks.six_corruptions --kernels FOLDER RECORD DTYPE BACKEND RUN [RUN ...]

WEIGHTS: a vmamba_nano. IMAGES, LABELS: .npy as `trust-tta data get cifar10` writes them. RECORD: a JSON file to which
each finished run is added, so that several processes may share the work; without names all runs are made.

The second form takes the shipped network and a FOLDER of `trust-tta corrupt`, in float32 or bf16, by the BACKEND
"auto" or "reference": what the kernels do to the accuracy.
"""

from __future__ import annotations

import fcntl
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.pages import write_record
from torch import Tensor

import trust_tta as tt
from trust_tta.bench.environment import choose_device, find_commit

CORRUPTIONS = ("gaussian_noise", "impulse_noise", "glass_blur", "contrast", "snow", "jpeg_compression")
IMAGES, BATCH, SEED = 4096, 128, 42
DROP_PATH = 0.2  # of the authors' network, whose stochastic depth stays on while they adapt

RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "source": ("source", {}),
    "bn": ("bn", {}),
    "tent": ("tent", {}),
    "tent, lr 1e-3": ("tent", {"lr": 1e-3}),
    "naive": ("trust_naive", {}),
    "naive, lr 6e-4": ("trust_naive", {"lr": 6e-4}),
    "naive, 6 steps": ("trust_naive", {"steps": 6}),
    "trust": ("trust", {}),
    "trust, parallel replicate": ("trust", {"mode": "replicate"}),
    "trust, parallel split": ("trust", {"mode": "split"}),
    "repetition": ("repetition", {}),
    "naive, stochastic depth": ("trust_naive", {"stochastic_depth": True}),
    "naive, 6 steps, stochastic depth": ("trust_naive", {"steps": 6, "stochastic_depth": True}),
    "trust, stochastic depth": ("trust", {"stochastic_depth": True}),
    "repetition, stochastic depth": ("repetition", {"stochastic_depth": True}),
}


def main(weights: str, images: str, labels: str, record: str, *names: str) -> None:
    device = choose_device("auto")
    clean = np.load(images, mmap_mode="r")[:IMAGES]
    truth = torch.from_numpy(np.load(labels)[:IMAGES].astype(np.int64)).to(device)
    corrupted = {c: tt.corrupt(np.asarray(clean), c, severity=5, seed=0, workers=1) for c in CORRUPTIONS}
    for name in names or RUNS:
        result = run(name, weights, corrupted, truth, device)
        add(Path(record), name, result)
        print(name, f"{result['mean']:.2f} %, {result['ms']:.1f} ms per batch", flush=True)


def main_kernels(folder: str, record: str, dtype: str, backend: str, *names: str) -> None:
    device = choose_device("auto")
    corrupted = {c: np.load(Path(folder, f"{c}.npy"))[:IMAGES] for c in CORRUPTIONS}
    truth = torch.from_numpy(np.load(Path(folder, "labels.npy"))[:IMAGES].astype(np.int64)).to(device)
    for name in names:
        with torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bf16"):
            result = run(name, "vmamba_nano_cifar10", corrupted, truth, device, backend=backend)
        add(Path(record), f"{name}, {dtype}, {backend}", {**result, "commit": find_commit(Path(tt.__file__).parent)})
        print(f"{name}, {dtype}, {backend}: {result['mean']:.3f} %, {result['ms']:.1f} ms per batch", flush=True)


def run(
    name: str,
    weights: str,
    corrupted: dict[str, np.ndarray],
    truth: Tensor,
    device: torch.device,
    *,
    backend: str = "auto",
) -> dict[str, Any]:
    """The accuracy in percent on each corruption and on average, and the median time of a batch."""
    kind, options = RUNS[name]
    changes: dict[str, Any] = {"drop_path": DROP_PATH} if options.get("stochastic_depth") else {}
    model = tt.create_model("vmamba_nano", num_classes=10, checkpoint=weights, **changes).to(device).eval()
    model.set_scan_backend(backend)
    method = tt.create_method(kind, model, **options)
    preprocess = model.preprocessing
    accuracy, times = {}, []
    order = np.random.default_rng(SEED).permutation(len(truth))
    for corruption, pixels in corrupted.items():
        method.reset()
        right = 0
        for chosen in np.split(order, range(BATCH, len(order), BATCH)):
            batch = preprocess(pixels[chosen]).to(device)
            begun = time.perf_counter()
            predicted = method(batch).argmax(1)
            right += int((predicted == truth[chosen]).sum())
            times.append(time.perf_counter() - begun)
        accuracy[corruption] = 100 * right / len(order)
    mean = statistics.fmean(accuracy.values())
    return {"accuracy": accuracy, "mean": mean, "ms": 1e3 * statistics.median(times), "device": device.type}


def add(record: Path, name: str, result: dict[str, Any]) -> None:
    """Put one run into the record, whole or not at all, whoever else writes to it."""
    with open(record.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        known = json.loads(record.read_text(encoding="utf-8")) if record.exists() else {}
        known[name] = result
        write_record(record, known)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--kernels"]:
        main_kernels(*sys.argv[2:])
    else:
        main(*sys.argv[1:])
