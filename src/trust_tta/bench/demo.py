"""The embedded run: a shipped network, shipped images, and every choice made before anyone looked at a result.

Corruptions: the first of each of the benchmark's four families (noise, blur, weather, digital) in its own order, at
severity 5. Methods: with their default options, which are those of their papers' or of TRUST's protocol. Three seeds:
each draws its images, their order and the corruptions' random numbers. Images and batch size: as many as two
processor cores manage in the time that a demo may take.
"""

from __future__ import annotations

from pathlib import Path

from trust_tta.bench.config import SAMPLE, DataConfig, MethodConfig, ModelConfig, RunConfig, StreamPlan

NETWORK = "vmamba_nano"
CHECKPOINT = "vmamba_nano_cifar10"
CORRUPTIONS = ("gaussian_noise", "defocus_blur", "snow", "contrast")
METHODS = ("source", "bn", "tent", "sar", "trust_naive", "trust")
SEEDS = 3
IMAGES = 224
BATCH_SIZE = 32
KEPT = 8  # images of each corruption whose predictions the report shows
STORE = "results.sqlite"


def demo_config(out: Path, *, seeds: int = SEEDS, images: int = IMAGES) -> RunConfig:
    """The experiment, with its results in the folder `out`."""
    return RunConfig(
        experiment="demo",
        model=ModelConfig(checkpoint=CHECKPOINT, name=NETWORK, num_classes=10),
        data=DataConfig(dataset=SAMPLE, domains=CORRUPTIONS, limit=images),
        stream=StreamPlan(batch_sizes=(BATCH_SIZE,), seeds=tuple(range(seeds))),
        methods=tuple(MethodConfig(name=name) for name in METHODS),
        store=str(out / STORE),
        keep_samples=KEPT,
    )
