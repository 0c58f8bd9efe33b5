"""`trust-tta bench --processes N`: all parts at once in worker processes, shown as one run."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType

from trust_tta.bench.config import RunConfig
from trust_tta.bench.plan import Chain, make_plan
from trust_tta.bench.processes import Job, share
from trust_tta.bench.sources import DataSource
from trust_tta.bench.sweep import Outcome, retry_failed, standing, unsettled
from trust_tta.cli.lines import Lines
from trust_tta.errors import CheckpointError, ConfigError, DataError
from trust_tta.results import ResultStore


def run_shared(
    parts: Sequence[RunConfig], *, processes: int, retry: bool = False
) -> tuple[list[tuple[RunConfig, Outcome]], list[str]]:
    """Run experiments in so many processes, with a line for each finished cell.

    Gives how each that could be run ended, and a line for each problem. A single one that cannot be run is an error.
    """
    jobs, problems = _plan(parts)
    with ExitStack() as stack:
        stack.enter_context(_terminated_like_interrupted())
        lines = [stack.enter_context(_open_lines(job, retry=retry, several=len(parts) > 1)) for job in jobs]
        refusals = {}
        if left := [chain for job in jobs for chain in _left(job)]:
            lines[0].start(tuple(key for chain in left for key in chain.keys), sum(sum(c.batches) for c in left))
            refusals = share(jobs, lines, processes=min(processes, len(left)), died=_say_who_died)
    outcomes = []
    for number, job in enumerate(jobs):
        if number in refusals and len(parts) == 1:
            raise refusals[number]
        if number in refusals:
            problems.append(f"{job.config.data.dataset} was not run: {refusals[number]}")
            continue
        with ResultStore(job.config.store) as store:
            outcome = standing(job.plan, store)
        outcomes.append((job.config, outcome))
        cells = len(outcome.keys) - outcome.done - outcome.failed
        if cells:
            problems.append(f"{cells} cells of {job.config.data.dataset} are left; run the same command again")
    return outcomes, problems


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


def _open_lines(job: Job, *, retry: bool, several: bool) -> Lines:
    """Note the job's cells in its store; the lines know the baselines that are there."""
    place = f"{job.config.data.dataset} {job.config.stream.setting:<8}  " if several else ""
    with ResultStore(job.config.store) as store:
        if retry:
            retry_failed(job.plan, store)
        store.plan(job.plan.keys, labels=job.plan.labels)
        return Lines(job.config, store.results(course=False), place=place)


def _left(job: Job) -> list[Chain]:
    with ResultStore(job.config.store) as store:
        return unsettled(job.plan.chains, store)


def _say_who_died(pid: int, code: int) -> None:
    print(f"worker {pid} died with code {code}; the others take over its cells", flush=True)


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
