"""Trainings on a real cluster: the same weights as here, also when a worker dies on the way."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import ModuleType

import pytest
import torch
from benchmarks.cluster_kills import is_below
from safetensors.torch import load_file
from torch import Tensor

from tests.data.trees import class_tree
from trust_tta.data.class_names import PACS_CLASSES
from trust_tta.distributed.sweeps import TaskResources
from trust_tta.distributed.trainings import train_on_cluster
from trust_tta.errors import TrustError
from trust_tta.progress import Progress
from trust_tta.training.recipe import TrainRecipe
from trust_tta.training.runs import TrainedFiles, TrainingJob, train_in_parallel

DOMAINS = ("art_painting", "cartoon", "photo", "sketch")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("data")
    for domain in DOMAINS:
        class_tree(made / "pacs" / domain, PACS_CLASSES, per_class=3)
    return made


def training(root: Path, out: Path, target: str) -> TrainingJob:
    return TrainingJob(
        data="pacs",
        root=str(root),
        target=target,
        out=str(out / target),
        recipe=TrainRecipe(epochs=2, batch_size=16),
        model="vmamba_nano",
        overrides={"depths": [1, 1], "dims": [8, 16]},
        size=16,
        share=0.1,
        device="cpu",
    )


def weights(end: TrainedFiles | TrustError) -> dict[str, Tensor]:
    assert isinstance(end, TrainedFiles), end
    return load_file(end.weights)


class Killer(Progress):
    """Kills the worker of the first training when that has told of its first epoch."""

    def __init__(self, ray: ModuleType) -> None:
        self.ray, self.killed, self.lines = ray, False, list[str]()

    def note(self, text: str) -> None:
        self.lines.append(text)
        if "epoch 1" in text and not self.killed:
            self.killed = True
            for pid in _workers():
                os.kill(pid, signal.SIGKILL)


def _workers() -> list[int]:
    """Processes that run a training now, of this cluster."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if words.startswith(b"ray::run_training") and is_below(int(folder.name)):
            found.append(int(folder.name))
    return found


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="workers are found by /proc")
def test_cluster_trains_the_same_networks_when_workers_die(ray: ModuleType, root: Path, tmp_path: Path) -> None:
    here = train_in_parallel([training(root, tmp_path / "here", t) for t in ("photo", "sketch")], processes=1)
    killer = Killer(ray)
    trainings = [training(root, tmp_path / "there", t) for t in ("photo", "sketch")]
    there = train_on_cluster(trainings, ray=ray, resources=TaskResources(cpus=1), progress=killer)
    assert killer.killed
    for mine, theirs in zip(map(weights, here), map(weights, there), strict=True):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_failed_training_leaves_the_others(ray: ModuleType, root: Path, tmp_path: Path) -> None:
    trainings = [training(root, tmp_path, t) for t in ("photos", "photo")]
    refused, done = train_on_cluster(trainings, ray=ray, resources=TaskResources(cpus=1))
    assert isinstance(refused, TrustError)
    assert "photos" in str(refused)
    assert isinstance(done, TrainedFiles)
