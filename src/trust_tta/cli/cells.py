"""Running experiments from the command line: a line for each finished cell, and tables at the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from trust_tta.bench.config import RunConfig
from trust_tta.bench.experiment import make_plan
from trust_tta.bench.processes import EXPERIMENT_ERRORS, SweepEngine, sweep_parallel
from trust_tta.bench.sweep import sweep
from trust_tta.cli.output import ProgressDisplay, say
from trust_tta.errors import TrustError
from trust_tta.report.formats import tables_text
from trust_tta.report.model import make_groups
from trust_tta.results import Cell, CellKey, ResultStore, write_csv, write_parquet


def run_parts(
    parts: Sequence[RunConfig],
    *,
    retry: bool = False,
    engine: SweepEngine | None = None,
    on_note: Callable[[], None] | None = None,
) -> tuple[list[Cell], list[str]]:
    """Run experiments and print their tables; returns all finished cells, and a line for each problem.

    Without an `engine` they run in this process. An experiment that lacks its data or network does not stop the
    others. `on_note` is called after each line of progress.
    """
    cells: list[Cell] = []
    refusals: Counter[str] = Counter()
    problems: list[str] = []
    for config, keys in _run(parts, retry, engine, on_note):
        if isinstance(keys, TrustError):
            if len(parts) == 1:
                raise keys
            refusals[f"{config.data.dataset} was not run: {keys}"] += 1
            continue
        is_ours = set(keys).__contains__
        with ResultStore(config.store, create=False) as store:
            failures = store.failures(is_ours)
            for failure in failures:
                key, label = failure.key, failure.label
                say(f"failed: {label} on {key.domain}, seed {key.seed}, batch {key.batch_size}: {failure.message}")
            finished = store.results(is_ours, history=False)
        for group in make_groups(finished):
            say(f"\n{tables_text(group)}".removesuffix("\n"))
        say(f"\nresults are in {config.store}")
        cells += finished
        if failures:
            problems.append(f"failed cells: {len(failures)}; remove the causes above and run again with --retry-failed")
        if missing := len(keys) - len(finished) - len(failures):
            problems.append(f"{missing} cells of {config.data.dataset} are missing; run the same command again")
    return cells, [f"{text} ({n} parts)" if n > 1 else text for text, n in refusals.items()] + problems


def _run(
    parts: Sequence[RunConfig], retry: bool, engine: SweepEngine | None, on_note: Callable[[], None] | None
) -> Iterator[tuple[RunConfig, tuple[CellKey, ...] | TrustError]]:
    """Run experiments side by side with an engine, or one after the other; the keys or the error of each."""
    if engine is not None:
        with ProgressDisplay(on_note=on_note) as progress:
            ended = sweep_parallel(parts, engine, retry=retry, progress=progress)
        yield from zip(parts, ended, strict=True)
        return
    for number, config in enumerate(parts, start=1):
        if len(parts) > 1:
            network = config.model.name or config.model.checkpoint
            say(f"part {number} of {len(parts)}: {network} on {config.data.dataset}, {config.stream.setting}")
        try:
            with ResultStore(config.store) as store, ProgressDisplay(on_note=on_note) as progress:
                keys: tuple[CellKey, ...] | TrustError = sweep(config, store, progress=progress, retry=retry)
        except EXPERIMENT_ERRORS as error:
            keys = error
        yield config, keys


def export(cells: Sequence[Cell], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    (write_csv if path.suffix == ".csv" else write_parquet)(cells, path)
    say(f"{len(cells)} cells are in {path}")


def list_cells(config: RunConfig) -> None:
    """Print each cell of the plan with its state: to do, running, died (its process has ended), done or failed."""
    plan = make_plan(config)
    keys, labels = plan.keys, plan.labels
    states: dict[str, str] = {}
    if Path(config.store).exists():
        with ResultStore(config.store, create=False) as store:
            states = store.states()
    for key in keys:
        state = states.get(key.digest, "pending")
        conditions = f"{key.dataset}  {key.domain:<18} batch {key.batch_size}  seed {key.seed}"
        say(f"{'to do' if state == 'pending' else state:<8} {labels[key]:<13} {conditions}  {key.digest[:12]}")
    done = sum(states.get(key.digest) == "done" for key in keys)
    say(f"{len(keys)} cells, {done} done, in {config.store}")
