"""Finished cells in TensorBoard, MLflow and Weights & Biases, read back with the trackers' own readers."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest

from tests.bench.tiny import run, tiny_config
from trust_tta.bench.trackers import MEASURES, log_cells
from trust_tta.cli.main import main
from trust_tta.errors import TrustError
from trust_tta.results import Cell, ResultStore

RUN = "tent on sample, online, batch 16, seed 0"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the store of a tiny experiment."""
    path = tmp_path_factory.mktemp("tiny")
    run(tiny_config(path))
    return path


def cells_of_tent(folder: Path) -> list[Cell]:
    with ResultStore(folder / "results.sqlite", create=False) as store:
        return store.results(lambda key: key.method == "tent")


def expected(folder: Path) -> dict[str, float]:
    return {
        f"{name}/{cell.key.domain}": value
        for cell in cells_of_tent(folder)
        for name in MEASURES
        if (value := getattr(cell.result, name)) is not None
    }


def log(name: str, folder: Path) -> None:
    with log_cells(name, [tiny_config(folder)]) as update:
        assert update is not None
        update()


def test_tensorboard_has_each_measure_once(folder: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs the extra 'tensorboard'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for _ in range(2):  # the second replaces the first
        log("tensorboard", folder)
        found = EventAccumulator(str(folder / "tensorboard" / "tiny" / RUN.replace(",", "_"))).Reload()
        scalars = {name: [point.value for point in found.Scalars(name)] for name in found.Tags()["scalars"]}
        assert scalars == {name: [pytest.approx(value)] for name, value in expected(folder).items()}
    assert len(list((folder / "tensorboard" / "tiny").iterdir())) == 2  # source and tent


def test_bench_logs_while_it_runs_and_the_table_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each line of a finished cell has been logged when the next is printed."""
    pytest.importorskip("tensorboard", reason="needs the extra 'tensorboard'")
    from trust_tta.bench import trackers

    logged: list[str] = []

    def remember(folder: Path, experiment: str, run: str, settings: object) -> AbstractContextManager[trackers.Log]:
        return nullcontext(
            lambda values: logged.append(f"{run} after {capsys.readouterr().out.count(' seed 0 ')} lines")
        )

    monkeypatch.setitem(trackers.TRACKERS, "tensorboard", remember)
    config = tiny_config(tmp_path)
    flags = ["--model", "vmamba_nano", "--checkpoint", str(config.model.checkpoint), "--dataset", "sample"]
    flags += ["--domains", "fog", "--limit", "16", "--batch-size", "16", "--methods", "source,tent"]
    flags += [f"--override={name}={value}" for name, value in config.model.overrides.items()]
    assert main(["bench", *flags, "--store", str(tmp_path / "logged.sqlite"), "--log", "tensorboard"]) == 0
    assert logged == [f"{name} on sample, online, batch 16, seed 0 after 1 lines" for name in ("source", "tent")]


def test_mlflow_finds_its_runs_again(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="needs the extra 'mlflow'")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    for _ in range(2):
        log("mlflow", folder)
        client = mlflow.MlflowClient()
        runs = client.search_runs([client.get_experiment_by_name("tiny").experiment_id])
        (tent,) = [run for run in runs if run.info.run_name == RUN]
        assert len(runs) == 2
        assert tent.data.metrics == pytest.approx(expected(folder))
        assert (tent.data.params["method"], tent.info.status) == ("tent", "FINISHED")
    assert len(client.get_metric_history(tent.info.run_id, "accuracy/contrast")) == 1


def test_wandb_keeps_runs_offline(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="needs the extra 'wandb'")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    log("wandb", folder)
    assert len(list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))) == 2


def test_missing_package_names_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with (
        pytest.raises(TrustError, match=r"pip install 'trust-tta\[mlflow\]'"),
        log_cells("mlflow", [tiny_config(tmp_path)]),
    ):
        pass


def test_tracker_out_of_reach_fails_at_the_end_and_names_the_remedy(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trust_tta.bench import trackers

    def unreachable(folder: Path, experiment: str, run: str, settings: object) -> AbstractContextManager[trackers.Log]:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(trackers, "require", lambda name, extra: None)
    monkeypatch.setitem(trackers.TRACKERS, "mlflow", unreachable)
    with pytest.raises(TrustError, match="no route to host; the results are in the store: run the same command again"):
        log("mlflow", folder)
