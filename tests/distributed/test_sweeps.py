"""Sweeps on a real cluster of this machine: the results of local ones, through deaths and refusals."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.bench.tiny import Recorder, numbers, run, tiny_config
from trust_tta.bench.config import RunConfig
from trust_tta.bench.processes import sweep_parallel
from trust_tta.distributed.sweeps import TaskResources, choose_resources, run_on_cluster
from trust_tta.errors import ConfigError, TrustError
from trust_tta.results import Cell, Counts, ResultStore

METHODS: list[Any] = ["bn", {"name": "tent", "lr": 0.01}]


def run_on(ray: ModuleType, config: RunConfig, recorder: Recorder | None = None) -> None:
    engine = partial(run_on_cluster, ray=ray, resources_per_task=TaskResources())
    (ended,) = sweep_parallel([config], engine, progress=recorder or Recorder())
    assert not isinstance(ended, TrustError)


def counts_of(config: RunConfig) -> Counts:
    with ResultStore(config.store, create=False) as store:
        return store.counts()


def cells_of(config: RunConfig) -> list[Cell]:
    with ResultStore(config.store, create=False) as store:
        return store.results()


def test_cluster_gives_the_results_of_one_process(ray: ModuleType, tmp_path: Path) -> None:
    config = tiny_config(tmp_path, methods=METHODS, keep_samples=2, confusion=True, stream={"setting": "continual"})
    recorder = Recorder()
    run_on(ray, config.changed(store=str(tmp_path / "cluster.sqlite")), recorder)
    assert counts_of(config.changed(store=str(tmp_path / "cluster.sqlite"))) == Counts(done=4)
    alone, said = run(config)
    cluster = cells_of(config.changed(store=str(tmp_path / "cluster.sqlite")))
    assert numbers(cluster) == numbers(alone)
    assert [cell.label for cell in cluster] == [cell.label for cell in alone]
    assert len(recorder.done) == len(said.done) == 4
    assert recorder.passes == recorder.total == said.total
    with ResultStore(tmp_path / "cluster.sqlite") as first, ResultStore(config.store) as second:
        assert first.pictures() == second.pictures()


def test_failed_cell_is_recorded_and_others_run(ray: ModuleType, tmp_path: Path) -> None:
    config = tiny_config(tmp_path, methods=["bn", {"name": "lame", "k": 5000}])
    recorder = Recorder()
    run_on(ray, config, recorder)
    alone = config.changed(store=str(tmp_path / "alone.sqlite"))
    run(alone)
    with ResultStore(config.store) as cluster, ResultStore(alone.store) as local:
        assert [(f.key, f.message) for f in cluster.failures()] == [(f.key, f.message) for f in local.failures()]
        assert cluster.counts() == local.counts()
        assert len(recorder.failures) == cluster.counts().failed


def test_cells_of_a_killed_worker_run_again_and_are_recorded_once(ray: ModuleType, tmp_path: Path) -> None:
    config = tiny_config(tmp_path, methods=METHODS, data={"limit": 200}, stream={"seeds": [0, 1]})
    pids = set(ray.get([ray.remote(_pid).remote() for _ in range(4)]))

    class Killer(Recorder):
        def note(self, text: str) -> None:
            super().note(text)
            if len(self.done) == 2 and pids:
                while pids:
                    os.kill(pids.pop(), signal.SIGKILL)

    recorder = Killer()
    run_on(ray, config, recorder)
    assert counts_of(config) == Counts(done=8)
    assert not pids
    alone, _ = run(config.changed(store=str(tmp_path / "alone.sqlite")))
    assert numbers(cells_of(config)) == numbers(alone)
    assert len(recorder.done) == 8


def _pid() -> int:
    time.sleep(0.2)
    return os.getpid()


def test_interrupted_driver_leaves_a_resumable_store(ray: ModuleType, tmp_path: Path) -> None:
    config = tiny_config(tmp_path, methods=METHODS)

    class Interrupted(Recorder):
        def note(self, text: str) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_on(ray, config, Interrupted())
    with ResultStore(config.store) as store:
        assert (store.counts().running, store.counts().failed) == (0, 0)
    cells, _ = run(config)
    assert len(cells) == 4


def test_cells_claimed_elsewhere_are_waited_for(ray: ModuleType, tmp_path: Path) -> None:
    config = tiny_config(tmp_path, methods=["bn"])
    from trust_tta.bench.experiment import make_plan

    other = ResultStore(config.store)
    assert other.claim([make_plan(config).keys[0]])
    timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGUSR1))
    before = signal.signal(signal.SIGUSR1, lambda *_: other.close())
    timer.start()
    try:
        run_on(ray, config)
    finally:
        timer.cancel()
        signal.signal(signal.SIGUSR1, before)
    assert counts_of(config) == Counts(done=2)


def test_missing_data_is_reported_once_and_fails_no_cell(ray: ModuleType, tmp_path: Path) -> None:
    config = tiny_config(tmp_path, methods=METHODS)

    def hide_and_share(*given: Any, **options: Any) -> dict[int, TrustError]:
        shutil.move(str(config.model.checkpoint), tmp_path / "elsewhere.pth")
        return run_on_cluster(*given, ray=ray, resources_per_task=TaskResources(), **options)

    (ended,) = sweep_parallel([config], hide_and_share)
    assert isinstance(ended, TrustError)
    assert "tiny10.pth" in str(ended)
    assert "\n" not in str(ended)
    with ResultStore(config.store) as store:
        assert (store.counts().failed, store.counts().pending) == (0, 4)


@pytest.mark.parametrize(
    ("device", "resources", "gpus", "share"),
    [
        ("auto", {"CPU": 2}, None, TaskResources(1, 0)),
        ("auto", {"CPU": 2, "GPU": 1}, None, TaskResources(1, 1)),
        ("cuda", {"CPU": 2, "GPU": 1}, 0.25, TaskResources(1, 0.25)),
        ("cpu", {"CPU": 2, "GPU": 1}, None, TaskResources(1, 0)),
    ],
)
def test_resources_follow_the_device(
    device: str, resources: dict[str, float], gpus: float | None, share: TaskResources
) -> None:
    assert choose_resources(device, resources, gpus=gpus) == share


@pytest.mark.parametrize(
    ("device", "gpus", "words"),
    [("cuda:1", None, "the cluster chooses"), ("cuda", None, "ask for less"), ("cpu", 1.0, "omit it")],
)
def test_unavailable_resources_are_refused(device: str, gpus: float | None, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        choose_resources(device, {"CPU": 2}, gpus=gpus)


def test_slots_follow_the_scarcer_resource() -> None:
    assert TaskResources(2, 0.25).slots({"CPU": 16, "GPU": 1}) == 4
    assert TaskResources(2).slots({"CPU": 5}) == 2
