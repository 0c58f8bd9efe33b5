"""Experiments shown in the terminal: a line per finished cell, tables at the end, in one process or in several."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from trust_tta.bench.config import RunConfig
from trust_tta.bench.plan import Chain, make_plan
from trust_tta.bench.processes import Job, share
from trust_tta.bench.sources import DataSource
from trust_tta.bench.sweep import Observer, Outcome, retry_failed, standing, sweep, unsettled
from trust_tta.cli.output import say
from trust_tta.cli.progress import Drawer
from trust_tta.errors import CheckpointError, ConfigError, DataError
from trust_tta.report.model import BASELINES
from trust_tta.report.terminal import results_text
from trust_tta.results import (
    Cell,
    CellKey,
    CellResult,
    ResultStore,
    format_gain,
    format_percent,
    write_csv,
    write_parquet,
)


class Lines(Observer):
    """Prints cells as they finish: `prefix`, method, domain, seed, accuracy, gain over the baseline, seconds."""

    def __init__(self, config: RunConfig, known: Iterable[Cell], drawer: Drawer, *, prefix: str = "") -> None:
        self.prefix, self.drawer = prefix, drawer
        present = {method.name for method in config.methods}
        self.baseline = next((name for name in BASELINES if name in present), None)
        self.several = len(config.stream.batch_size) > 1
        self.width = max(len(method.name) for method in config.methods)
        self.accuracies: dict[tuple[object, ...], float] = {}
        for cell in known:
            self._remember(cell.key, cell.result)
        self._waits = False

    def start(self, keys: tuple[CellKey, ...], batches: int) -> None:
        if keys:
            self.drawer.start(batches, "batches")

    def advance(self, batches: int) -> None:
        self.drawer.advance(batches)

    def finished(self, key: CellKey, result: CellResult) -> None:
        self._remember(key, result)
        base = self.accuracies.get(_conditions(key)) if self.baseline else None
        gain = "" if base is None or key.method == self.baseline else format_gain(result.accuracy - base)
        numbers = f"{format_percent(result.accuracy):>5} %  {gain:>6}  {result.seconds_total:7.1f} s"
        self.drawer.note(f"{self._name(key)}  {numbers}")

    def failed(self, key: CellKey, message: str) -> None:
        self.drawer.note(f"{self._name(key)}  failed")

    def waiting(self, cells: int) -> None:
        if not self._waits:
            self.drawer.note(f"waiting for cells that another process runs: {cells}")
        self._waits = True

    def _name(self, key: CellKey) -> str:
        batch = f"  batch {key.batch_size}" if self.several else ""
        return f"{self.prefix}{key.method:<{self.width}}  {key.domain:<18}{batch}  seed {key.seed}"

    def _remember(self, key: CellKey, result: CellResult) -> None:
        if key.method == self.baseline:
            self.accuracies[_conditions(key)] = result.accuracy


def run_parts(parts: Sequence[RunConfig], *, retry: bool = False, processes: int = 1) -> tuple[list[Cell], list[str]]:
    """Run experiments with their tables; all finished cells, and a line for each problem.

    Of several, one that cannot be run (its data or network is missing) does not keep the others from running.
    """
    if processes > 1:
        return _run_at_once(parts, retry=retry, processes=processes)
    cells: list[Cell] = []
    problems: list[str] = []
    for number, config in enumerate(parts, start=1):
        if len(parts) > 1:
            say(f"part {number} of {len(parts)}: {config.data.dataset}, {config.stream.setting}")
        try:
            with ResultStore(config.store) as store, Drawer() as drawer:
                lines = Lines(config, store.results(course=False), drawer)
                outcome = sweep(config, store, observer=lines, retry=retry)
        except (CheckpointError, ConfigError, DataError) as error:
            if len(parts) == 1:
                raise
            problems.append(f"{config.data.dataset} was not run: {error}")
            continue
        cells += _show_results(config, outcome)
        problems += _failures(outcome)
    return cells, problems


def export(cells: Sequence[Cell], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    (write_csv if path.suffix == ".csv" else write_parquet)(cells, path)
    say(f"{len(cells)} cells are in {path}")


def list_cells(config: RunConfig) -> None:
    """One line for each cell of the plan, with its state in the store."""
    keys = make_plan(config, DataSource(config.data)).keys
    states: dict[str, str] = {}
    if Path(config.store).exists():
        with ResultStore(config.store, create=False) as store:
            states = {key.digest: state for state in ("done", "running", "failed") for key in store.keys(state)}
    for key in keys:
        conditions = f"{key.dataset}  {key.domain:<18} batch {key.batch_size}  seed {key.seed}"
        say(f"{states.get(key.digest, 'to do'):<8} {key.method:<13} {conditions}  {key.digest[:12]}")
    done = sum(states.get(key.digest) == "done" for key in keys)
    say(f"{len(keys)} cells, {done} done, in {config.store}")


def _run_at_once(parts: Sequence[RunConfig], *, retry: bool, processes: int) -> tuple[list[Cell], list[str]]:
    """The same in worker processes, shown as one run; no part waits for the one before."""
    jobs, problems = _plan(parts)
    refusals = {}
    with _terminated_like_interrupted(), Drawer() as drawer:
        lines = [_open_lines(job, drawer, retry=retry, several=len(parts) > 1) for job in jobs]
        if left := [chain for job in jobs for chain in _left(job)]:
            lines[0].start(tuple(key for chain in left for key in chain.keys), sum(sum(c.batches) for c in left))
            refusals = share(jobs, lines, processes=min(processes, len(left)), died=_say_who_died)
    cells: list[Cell] = []
    for number, job in enumerate(jobs):
        if number in refusals and len(parts) == 1:
            raise refusals[number]
        if number in refusals:
            problems.append(f"{job.config.data.dataset} was not run: {refusals[number]}")
            continue
        with ResultStore(job.config.store) as store:
            outcome = standing(job.plan, store)
        cells += _show_results(job.config, outcome)
        problems += _failures(outcome)
        if unfinished := len(outcome.keys) - outcome.done - outcome.failed:
            problems.append(f"{unfinished} cells of {job.config.data.dataset} are left; run the same command again")
    return cells, problems


def _plan(parts: Sequence[RunConfig]) -> tuple[list[Job], list[str]]:
    jobs: list[Job] = []
    problems: list[str] = []
    sources = {config.data: DataSource(config.data) for config in parts}  # data of several parts are hashed once
    for config in parts:
        try:
            jobs.append(Job(config, make_plan(config, sources[config.data])))
        except (CheckpointError, ConfigError, DataError) as error:
            if len(parts) == 1:
                raise
            problems.append(f"{config.data.dataset} was not run: {error}")
    return jobs, problems


def _open_lines(job: Job, drawer: Drawer, *, retry: bool, several: bool) -> Lines:
    """Note the job's cells in its store; the lines know the baselines that are there."""
    prefix = f"{job.config.data.dataset} {job.config.stream.setting:<8}  " if several else ""
    with ResultStore(job.config.store) as store:
        if retry:
            retry_failed(job.plan, store)
        store.plan(job.plan.keys, labels=job.plan.labels)
        return Lines(job.config, store.results(course=False), drawer, prefix=prefix)


def _left(job: Job) -> list[Chain]:
    with ResultStore(job.config.store) as store:
        return unsettled(job.plan.chains, store)


def _say_who_died(pid: int, code: int) -> None:
    say(f"worker {pid} died with code {code}; the others take over its cells")


def _show_results(config: RunConfig, outcome: Outcome) -> list[Cell]:
    """Print the failures and the tables of an experiment; its finished cells."""
    digests = {key.digest for key in outcome.keys}
    with ResultStore(config.store, create=False) as store:
        for failure in store.failures(lambda key: key.digest in digests):
            key = failure.key
            say(f"failed: {failure.label} on {key.domain}, seed {key.seed}, batch {key.batch_size}: {failure.message}")
        cells = store.results(lambda key: key.digest in digests, course=False)
    for block in results_text(cells):
        say(f"\n{block}".removesuffix("\n"))
    say(f"\nresults are in {config.store}")
    return cells


def _failures(outcome: Outcome) -> list[str]:
    if not outcome.failed:
        return []
    return [f"{outcome.failed} cells failed, for the reasons above; fix them and run with --retry-failed"]


def _conditions(key: CellKey) -> tuple[object, ...]:
    """All that a cell has in common with its baseline."""
    return (
        key.experiment,
        key.dataset,
        key.domain,
        key.setting,
        key.batch_size,
        key.seed,
        key.checkpoint,
        key.fingerprint,
    )


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """SIGTERM ends the command as Ctrl-C does, so that its workers end with it."""

    def interrupt(number: int, _frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)  # a second one must not keep the workers from being ended
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
