"""Experiments in the terminal: a line per finished cell and tables at the end, with one process or several."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from trust_tta.bench.config import RunConfig
from trust_tta.bench.plan import make_plan
from trust_tta.bench.processes import REFUSALS, SweepEngine, sweep_parallel
from trust_tta.bench.sweep import Outcome, sweep
from trust_tta.cli.output import ProgressDisplay, say
from trust_tta.errors import TrustError
from trust_tta.report.formats import results_text
from trust_tta.results import Cell, ResultStore, write_csv, write_parquet


def run_parts(
    parts: Sequence[RunConfig], *, retry: bool = False, engine: SweepEngine | None = None
) -> tuple[list[Cell], list[str]]:
    """Run experiments and print their tables; returns all finished cells, and a line for each problem.

    `engine`: what runs them; None is this process. An experiment that cannot be run, because its data or network is
    missing, does not keep the others from running.
    """
    cells: list[Cell] = []
    problems: list[str] = []
    for config, ended in _run_at_once(parts, retry, engine) if engine else _run_in_turn(parts, retry):
        if isinstance(ended, TrustError):
            if len(parts) == 1:
                raise ended
            problems.append(f"{config.data.dataset} was not run: {ended}")
            continue
        cells += _show_results(config, ended)
        problems += _failures(ended)
        if unfinished := len(ended.keys) - ended.done - ended.failed:
            problems.append(f"{unfinished} cells of {config.data.dataset} are left; run the same command again")
    return cells, problems


def _run_in_turn(parts: Sequence[RunConfig], retry: bool) -> Iterator[tuple[RunConfig, Outcome | TrustError]]:
    for number, config in enumerate(parts, start=1):
        if len(parts) > 1:
            network = config.model.name or config.model.checkpoint
            say(f"part {number} of {len(parts)}: {network} on {config.data.dataset}, {config.stream.setting}")
        ended: Outcome | TrustError
        try:
            with ResultStore(config.store) as store, ProgressDisplay() as progress:
                ended = sweep(config, store, progress=progress, retry=retry)
        except REFUSALS as error:
            ended = error
        yield config, ended


def _run_at_once(
    parts: Sequence[RunConfig], retry: bool, engine: SweepEngine
) -> Iterator[tuple[RunConfig, Outcome | TrustError]]:
    """The same with several workers, shown as one run; no part waits for the one before."""
    with terminated_like_interrupted(), ProgressDisplay() as progress:
        ended = sweep_parallel(parts, engine, retry=retry, progress=progress)
    yield from zip(parts, ended, strict=True)


def export(cells: Sequence[Cell], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    (write_csv if path.suffix == ".csv" else write_parquet)(cells, path)
    say(f"{len(cells)} cells are in {path}")


def list_cells(config: RunConfig) -> None:
    """One line for each cell of the plan, with its state in the store."""
    plan = make_plan(config)
    keys, labels = plan.keys, plan.labels
    states: dict[str, str] = {}
    if Path(config.store).exists():
        with ResultStore(config.store, create=False) as store:
            states = {key.digest: state for state in ("done", "running", "failed") for key in store.keys(state)}
    for key in keys:
        conditions = f"{key.dataset}  {key.domain:<18} batch {key.batch_size}  seed {key.seed}"
        say(f"{states.get(key.digest, 'to do'):<8} {labels[key]:<13} {conditions}  {key.digest[:12]}")
    done = sum(states.get(key.digest) == "done" for key in keys)
    say(f"{len(keys)} cells, {done} done, in {config.store}")


def _show_results(config: RunConfig, outcome: Outcome) -> list[Cell]:
    """Print the failures and tables of an experiment; returns its finished cells."""
    digests = {key.digest for key in outcome.keys}
    with ResultStore(config.store, create=False) as store:
        for failure in store.failures(lambda key: key.digest in digests):
            key = failure.key
            say(f"failed: {failure.label} on {key.domain}, seed {key.seed}, batch {key.batch_size}: {failure.message}")
        cells = store.results(lambda key: key.digest in digests, history=False)
    for block in results_text(cells):
        say(f"\n{block}".removesuffix("\n"))
    say(f"\nresults are in {config.store}")
    return cells


def _failures(outcome: Outcome) -> list[str]:
    if not outcome.failed:
        return []
    return [f"{outcome.failed} cells failed, for the reasons above; fix them and run with --retry-failed"]


@contextmanager
def terminated_like_interrupted() -> Iterator[None]:
    """Let SIGTERM end the command as Ctrl-C does, so that its workers end with it."""

    def interrupt(number: int, _frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)  # a second one must not keep the workers from being ended
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
