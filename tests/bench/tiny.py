"""A network and experiments that run in moments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from trust_tta.bench.config import RunConfig
from trust_tta.bench.parsing import merge, parse_config
from trust_tta.bench.sweep import Observer, sweep
from trust_tta.models.factory import create_model
from trust_tta.results import Cell, CellKey, CellResult, ResultStore

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


class Recorder(Observer):
    """Remembers what a sweep says."""

    def __init__(self) -> None:
        self.done: list[CellKey] = []
        self.failures: dict[CellKey, str] = {}
        self.total = self.batches = 0

    def start(self, keys: tuple[CellKey, ...], batches: int) -> None:
        self.total = batches

    def advance(self, batches: int) -> None:
        self.batches += batches

    def finished(self, key: CellKey, result: CellResult) -> None:
        self.done.append(key)

    def failed(self, key: CellKey, message: str) -> None:
        self.failures[key] = message


def run(config: RunConfig) -> tuple[list[Cell], Recorder]:
    """Run an experiment to its end; its cells, and what was said on the way."""
    recorder = Recorder()
    with ResultStore(config.store) as store:
        sweep(config, store, observer=recorder)
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
            cell.result.course.accuracy,
            cell.result.course.entropy,
            cell.result.forwards,
            cell.result.updates,
        )
        for cell in cells
    ]
