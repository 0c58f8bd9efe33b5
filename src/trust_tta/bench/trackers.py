"""Finished cells as runs of MLflow, TensorBoard or Weights & Biases.

A run holds one method on one data set, in one setting, with one batch size and one seed; each of its domains adds its
measures, such as `accuracy/fog`. Logging the same cells again changes nothing.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from trust_tta.bench.config import RunConfig
from trust_tta.errors import DependencyError, TrustError, reason_of
from trust_tta.optional import require
from trust_tta.results import Cell, ResultStore

MEASURES = ("accuracy", "accuracy_before", "clean_accuracy", "ece", "nll", "brier", "entropy", "seconds_median")


class Tracker(Protocol):
    """A destination of results; `experiment` groups runs, `settings` describe one."""

    def log(self, experiment: str, run: str, settings: Mapping[str, str], values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files in FOLDER/experiment/run; those of an earlier process are replaced."""

    def __init__(self, folder: Path) -> None:
        require("tensorboard", extra="tensorboard")
        self.folder, self.writers = folder, dict[Path, Any]()

    def log(self, experiment: str, run: str, settings: Mapping[str, str], values: Mapping[str, float]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = self.folder / _plain(experiment) / _plain(run)
        if folder not in self.writers:
            for earlier in folder.glob("events.out.tfevents.*"):
                earlier.unlink()
            self.writers[folder] = SummaryWriter(str(folder))
            self.writers[folder].add_text("settings", "\n".join(f"- {key}: {text}" for key, text in settings.items()))
        for name, value in values.items():
            self.writers[folder].add_scalar(name, value, 0)
        self.writers[folder].flush()

    def close(self) -> None:
        for writer in self.writers.values():
            writer.close()


class MLflow:
    """Runs on the server of MLFLOW_TRACKING_URI, found again by a tag."""

    def __init__(self) -> None:
        mlflow = require("mlflow", extra="mlflow")
        self.client, self.set_experiment = mlflow.MlflowClient(), mlflow.set_experiment
        self.runs: dict[tuple[str, str], Any] = {}

    def log(self, experiment: str, run: str, settings: Mapping[str, str], values: Mapping[str, float]) -> None:
        if (experiment, run) not in self.runs:
            self.runs[experiment, run] = self._open(experiment, run, settings)
        opened = self.runs[experiment, run]
        for name, value in values.items():
            if _plain(name) not in opened.data.metrics:
                self.client.log_metric(opened.info.run_id, _plain(name), value)

    def _open(self, experiment: str, run: str, settings: Mapping[str, str]) -> Any:
        group, tag = self.set_experiment(experiment).experiment_id, hashlib.sha256(run.encode()).hexdigest()
        if found := self.client.search_runs([group], f"tags.trust_tta = '{tag}'"):
            return found[0]
        opened = self.client.create_run(group, run_name=run, tags={"trust_tta": tag})
        for key, text in settings.items():
            self.client.log_param(opened.info.run_id, key, text)
        return opened

    def close(self) -> None:
        for opened in self.runs.values():
            self.client.set_terminated(opened.info.run_id)


class WeightsAndBiases:
    """Runs of a project named after the experiment; `WANDB_MODE=offline` keeps them on disk."""

    def __init__(self) -> None:
        self.wandb = require("wandb", extra="wandb")
        self.runs: dict[tuple[str, str], Any] = {}

    def log(self, experiment: str, run: str, settings: Mapping[str, str], values: Mapping[str, float]) -> None:
        if (experiment, run) not in self.runs:
            digest = hashlib.sha256(f"{experiment}/{run}".encode()).hexdigest()[:16]
            self.runs[experiment, run] = self.wandb.init(
                project=_plain(experiment), name=run, id=digest, config=dict(settings), reinit="create_new",
                resume=None if self.wandb.setup().settings.mode == "offline" else "allow",
            )  # fmt: skip
        self.runs[experiment, run].summary.update(dict(values))

    def close(self) -> None:
        for run in self.runs.values():
            run.finish()


TRACKERS: dict[str, Callable[[Path], Tracker]] = {
    "mlflow": lambda folder: MLflow(),
    "tensorboard": TensorBoard,
    "wandb": lambda folder: WeightsAndBiases(),
}


class CellLogger:
    """Sends finished cells of experiments to a tracker; one that is out of reach does not stop the benchmark."""

    def __init__(self, name: str, parts: Sequence[RunConfig]) -> None:
        self.name, self.logged = name, set[str]()
        self.wanted = {(part.experiment, part.data.dataset) for part in parts}
        self.stores = list(dict.fromkeys(part.store for part in parts))
        try:
            self.tracker = TRACKERS[name](Path(parts[0].store).parent / "tensorboard")
        except DependencyError:
            raise
        except Exception as error:
            raise TrustError(f"--log {name}: {type(error).__name__}: {reason_of(error)}") from error

    def update(self) -> None:
        """Log what has finished since the last call; a failure is tried again at the next."""
        with suppress(Exception):
            self._log_new()

    def close(self) -> None:
        """Log the rest; raises TrustError if something could not be logged."""
        try:
            self._log_new()
            self.tracker.close()
        except Exception as error:
            raise TrustError(
                f"--log {self.name}: {type(error).__name__}: {reason_of(error)}; the results are in the store: run the "
                "same command again to log them"
            ) from error

    def _log_new(self) -> None:
        for path in filter(lambda path: Path(path).exists(), self.stores):
            with ResultStore(path, create=False) as store:
                cells = store.results(
                    lambda key: (key.experiment, key.dataset) in self.wanted and key.digest not in self.logged,
                    history=False,
                )
            for cell in cells:
                self.tracker.log(cell.key.experiment, run_name(cell), settings_of(cell), values_of(cell))
                self.logged.add(cell.key.digest)


@contextmanager
def log_cells(name: str | None, parts: Sequence[RunConfig]) -> Iterator[Callable[[], None] | None]:
    """The function that logs newly finished cells of these experiments; None without a tracker."""
    if name is None:
        yield None
        return
    logger = CellLogger(name, parts)
    try:
        yield logger.update
    except BaseException:
        with suppress(TrustError):
            logger.close()
        raise
    logger.close()


def run_name(cell: Cell) -> str:
    key = cell.key
    return f"{cell.label} on {key.dataset}, {key.setting}, batch {key.batch_size}, seed {key.seed}"


def settings_of(cell: Cell) -> dict[str, str]:
    """The settings shared by the cells of a run."""
    names = ("dataset", "setting", "severity", "method", "options", "batch_size", "seed", "limit", "checkpoint")
    return {name: str(getattr(cell.key, name)) for name in names} | {"device": cell.provenance.device}


def values_of(cell: Cell) -> dict[str, float]:
    """The measures that a cell has, named after its domain."""
    values = {name: getattr(cell.result, name) for name in MEASURES}
    return {f"{name}/{cell.key.domain}": float(value) for name, value in values.items() if value is not None}


def _plain(name: str) -> str:
    """A name that each tracker and file system takes."""
    return re.sub(r"[^/\w. =()-]", "_", name)
