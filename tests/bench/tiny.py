"""A network and experiments that run in moments."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from trust_tta.bench.config import RunConfig
from trust_tta.bench.parsing import merge, parse_config, read_parts
from trust_tta.bench.sweep import sweep
from trust_tta.models.typed import create_model
from trust_tta.progress import Progress
from trust_tta.results import Cell, ResultStore

OVERRIDES: dict[str, Any] = {"depths": [1, 1], "dims": [8, 16], "patch_size": 4}
SEED = 3


def write_checkpoint(folder: Path, *, classes: int = 10) -> Path:
    """The weights of a tiny, untrained network with distinct running statistics."""
    path = folder / f"tiny{classes}.pth"
    torch.manual_seed(SEED)
    model = create_model("vmamba_nano", num_classes=classes, **OVERRIDES)
    for name, buffer in model.named_buffers():
        if name.endswith("running_mean"):
            buffer.normal_()
    torch.save({"model": model.state_dict()}, path)
    return path


def content(folder: Path, **changes: Any) -> dict[str, Any]:
    """The tables of a tiny experiment, with inner tables changed field by field."""
    base = {
        "experiment": "tiny",
        "model": {"name": "vmamba_nano", "checkpoint": str(write_checkpoint(folder)), "overrides": OVERRIDES},
        "data": {"dataset": "sample", "domains": ["gaussian_noise", "contrast"], "limit": 50},
        "stream": {"batch_size": 16},
        "methods": ["source", "tent"],
        "device": "cpu",
        "store": str(folder / "results.sqlite"),
    }
    return merge(base, changes)


def tiny_config(folder: Path, **changes: Any) -> RunConfig:
    return parse_config(content(folder, **changes), name="tiny", origin="the test")


class Recorder(Progress):
    """Remembers what a sweep says: lines of finished and of failed cells, and passes of the network."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.failures: list[str] = []
        self.warnings: list[str] = []
        self.total = self.passes = 0

    def start(self, total: int | None, what: str) -> None:
        self.total = total or 0

    def advance(self, n: int = 1) -> None:
        self.passes += n

    def note(self, text: str) -> None:
        if text.endswith(" s"):
            self.done.append(text)
        elif text.endswith("  failed"):
            self.failures.append(text)
        elif text.startswith("warning: "):
            self.warnings.append(text)


def run(config: RunConfig) -> tuple[list[Cell], Recorder]:
    """Run an experiment to its end; its cells, and what was said on the way."""
    recorder = Recorder()
    with ResultStore(config.store) as store:
        sweep(config, store, progress=recorder)
        return store.results(), recorder


def numbers(cells: list[Cell]) -> list[tuple[object, ...]]:
    """All that a rerun must give again: everything but the times."""
    return [
        (
            cell.key,
            cell.result.accuracy,
            cell.result.accuracy_before,
            cell.result.entropy,
            cell.result.nll,
            cell.result.reliability,
            cell.result.history.accuracy,
            cell.result.history.entropy,
            cell.result.forwards,
            cell.result.updates,
        )
        for cell in cells
    ]


def read_config(path: Path | None, changes: Mapping[str, Any] | None = None, *, small: bool = False) -> RunConfig:
    """The only experiment of a configuration."""
    (config,) = read_parts(path, changes, small=small)
    return config
