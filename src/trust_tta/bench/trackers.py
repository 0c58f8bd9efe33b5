"""Finished cells as runs of MLflow, TensorBoard or Weights & Biases.

A run holds one method on one data set, in one setting, with one batch size and one seed; each of its domains adds its
measures, such as `accuracy/fog`. Logging the same cells again changes nothing.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias

from trust_tta.bench.config import RunConfig
from trust_tta.bench.sweep import finished_cells
from trust_tta.errors import TrustError, reason_of
from trust_tta.optional import require

MEASURES = ("accuracy", "accuracy_before", "clean_accuracy", "ece", "nll", "brier", "entropy", "seconds_median")

SETTINGS = ("dataset", "setting", "severity", "method", "options", "batch_size", "seed", "limit", "checkpoint")

Settings: TypeAlias = Mapping[str, str]
Log: TypeAlias = Callable[[Mapping[str, float]], None]


@contextmanager
def tensorboard(folder: Path, experiment: str, run: str, settings: Settings) -> Iterator[Log]:
    """An event file in FOLDER/experiment/run; those of an earlier process are replaced."""
    from torch.utils.tensorboard import SummaryWriter

    place = folder / _safe_name(experiment) / _safe_name(run)
    for earlier in place.glob("events.out.tfevents.*"):
        earlier.unlink()
    with SummaryWriter(str(place)) as writer:
        writer.add_text("settings", "\n".join(f"- {key}: {text}" for key, text in settings.items()))

        def log(values: Mapping[str, float]) -> None:
            for name, value in values.items():
                writer.add_scalar(name, value, 0)
            writer.flush()

        yield log


@contextmanager
def mlflow(_folder: Path, experiment: str, run: str, settings: Settings) -> Iterator[Log]:
    """A run on the server of MLFLOW_TRACKING_URI; a tag identifies it when it is continued."""
    library: Any = require("mlflow", extra="mlflow")
    client = library.MlflowClient()
    group, tag = library.set_experiment(experiment).experiment_id, hashlib.sha256(run.encode()).hexdigest()
    found = client.search_runs([group], f"tags.trust_tta = '{tag}'")
    opened = found[0] if found else client.create_run(group, run_name=run, tags={"trust_tta": tag})
    for key, text in {} if found else settings.items():
        client.log_param(opened.info.run_id, key, text)

    def log(values: Mapping[str, float]) -> None:
        for name in [name for name in values if _safe_name(name) not in opened.data.metrics]:
            client.log_metric(opened.info.run_id, _safe_name(name), values[name])

    yield log
    client.set_terminated(opened.info.run_id)


@contextmanager
def wandb(_folder: Path, experiment: str, run: str, settings: Settings) -> Iterator[Log]:
    """A run of a project named after the experiment; `WANDB_MODE=offline` keeps it on disk."""
    library: Any = require("wandb", extra="wandb")
    digest = hashlib.sha256(f"{experiment}/{run}".encode()).hexdigest()[:16]
    resume = None if library.setup().settings.mode == "offline" else "allow"
    opened = library.init(
        project=_safe_name(experiment), name=run, id=digest, config=dict(settings), reinit="create_new", resume=resume
    )
    yield lambda values: opened.summary.update(dict(values))
    opened.finish()


# Each opens a run (folder, experiment, name of the run, settings) and gives the function that logs values to it.
TRACKERS: dict[str, Callable[[Path, str, str, Settings], AbstractContextManager[Log]]] = {
    "mlflow": mlflow,
    "tensorboard": tensorboard,
    "wandb": wandb,
}


@contextmanager
def log_cells(name: str | None, parts: Sequence[RunConfig]) -> Iterator[Callable[[], None] | None]:
    """The function that logs newly finished cells of these experiments; None without a tracker.

    A tracker that is out of reach does not stop the benchmark: a failure is retried at the next call, and a failure at
    the end raises TrustError.
    """
    if name is None:
        yield None
        return
    require(name, extra=name)
    folder = Path(parts[0].store).parent / "tensorboard"
    logged: set[str] = set()  # digests of cells
    runs: dict[tuple[str, str], Log] = {}  # by experiment and name
    opened = ExitStack()

    def log_new() -> None:
        for cell in finished_cells(parts, without=logged):
            key = cell.key
            run = f"{cell.label} on {key.dataset}, {key.setting}, batch {key.batch_size}, seed {key.seed}"
            if (key.experiment, run) not in runs:
                settings = {name: str(getattr(key, name)) for name in SETTINGS} | {"device": cell.provenance.device}
                runs[key.experiment, run] = opened.enter_context(TRACKERS[name](folder, key.experiment, run, settings))
            values = {f"{name}/{key.domain}": getattr(cell.result, name) for name in MEASURES}
            runs[key.experiment, run]({name: x for name, x in values.items() if x is not None})
            logged.add(key.digest)

    def update() -> None:
        with suppress(Exception):
            log_new()

    try:
        yield update
    except BaseException:
        update()
        with suppress(Exception):
            opened.close()
        raise
    try:
        with opened:
            log_new()
    except Exception as error:
        raise TrustError(
            f"--log {name}: {type(error).__name__}: {reason_of(error)}; the results are in the store: run the "
            "same command again to log them"
        ) from error


def _safe_name(name: str) -> str:
    """A name that every tracker and file system accepts."""
    return re.sub(r"[^/\w. =()-]", "_", name)
