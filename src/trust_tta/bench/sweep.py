"""Run the cells of an experiment into a results store: resumable, shared by processes, robust to failing cells."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from trust_tta.bench.config import CLEAN_DATA_OPTIONS, RunConfig
from trust_tta.bench.environment import collect_provenance, now
from trust_tta.bench.experiment import CLEAN_IMAGES, CellSequence, Experiment, ExperimentPlan
from trust_tta.bench.runner import EvaluationOptions, kept_pictures, run_domain
from trust_tta.errors import LONGEST_MESSAGE, BackendError, ConfigError, TrustError, reason_of
from trust_tta.methods.registry import create_method, method_options
from trust_tta.methods.source_data import gather_from_clean
from trust_tta.progress import SILENT, Progress
from trust_tta.results.display import format_gain, format_percent, plain_text
from trust_tta.results.record import Cell, CellKey, CellResult, Provenance
from trust_tta.results.store import ResultStore

POLL_SECONDS = 1.0  # between checks of cells that another process holds
MEASURES = ("clean_after", "keep_samples", "confusion")  # optional, and not part of a cell's key


def sweep(
    config: RunConfig, store: ResultStore, *, progress: Progress = SILENT, retry: bool = False
) -> tuple[CellKey, ...]:
    """Run the unfinished cells and wait for those of other processes; returns the keys of all cells.

    `retry` tries failed cells again. Progress is counted in estimated cost; each finished cell is a note.
    """
    experiment = Experiment(config)
    plan = experiment.plan
    for text in plan.warnings:
        progress.note(f"warning: {text}")
    left = sequences_to_run(plan, store, retry=retry)
    if left:  # a checkpoint that does not fit or missing data is a user's mistake, not a failure of a cell
        check_sequence(experiment, left[0])
    store.plan(plan.keys, labels=plan.labels)
    if left:
        progress.start(sum(sequence.cost * sum(sequence.batches) for sequence in left), "")
    run_sequences(experiment, CellWriter(plan, store, progress), left)
    progress.finish()
    return plan.keys


def sequences_to_run(plan: ExperimentPlan, store: ResultStore, *, retry: bool) -> list[CellSequence]:
    """The sequences to run; `retry` makes failed cells claimable again.

    A finished cell that lacks a requested measure is an error, since it would not run again.
    """
    ours = set(plan.keys).__contains__
    if retry:
        store.retry_failed(ours)
    wanted = {name: int(amount) for name in MEASURES if (amount := getattr(plan.config, name))}
    lacking = []  # measures that each finished cell lacks
    for cell in store.results(ours, history=False) if wanted else ():
        had = json.loads(cell.provenance.config)
        lacking.append({name for name, amount in wanted.items() if amount > had.get(name, 0)})
    if any(lacking):
        raise ConfigError(
            f"cells in '{store.path}' that finished without this {' or '.join(sorted(set().union(*lacking)))}: "
            f"{sum(map(bool, lacking))}; finished cells are not run again: "
            "give another store, or omit it"
        )
    return unfinished(plan.sequences, store)


def unfinished(sequences: Sequence[CellSequence], store: ResultStore) -> list[CellSequence]:
    """The sequences that have neither finished nor failed."""
    done, failed = (set(store.keys(status)) for status in ("done", "failed"))
    return [s for s in sequences if not done.issuperset(s.keys) and failed.isdisjoint(s.keys)]


def finished_cells(configs: Sequence[RunConfig], *, without: Collection[str] = ()) -> list[Cell]:
    """All finished cells of these experiments and data sets, except those with a digest in `without`."""
    wanted = {(config.experiment, config.data.dataset) for config in configs}
    cells: list[Cell] = []
    for path in dict.fromkeys(config.store for config in configs):
        if Path(path).exists():
            with ResultStore(path, create=False) as store:
                cells += store.results(
                    lambda key: (key.experiment, key.dataset) in wanted and key.digest not in without, history=False
                )
    return cells


@dataclass(frozen=True)
class FinishedCell:
    """A finished cell with everything that the store keeps."""

    key: CellKey
    result: CellResult
    provenance: Provenance
    pictures: Mapping[int, bytes]
    class_names: tuple[str, ...]


def run_sequence(
    experiment: Experiment, sequence: CellSequence, provenance: Provenance, progress: Progress = SILENT
) -> Iterator[FinishedCell]:
    """Run a sequence and yield its cells; at the end the network is reset. A step of progress is a batch."""
    config = experiment.config
    domains = experiment.domains_of(sequence)
    model = experiment.network(domains[0])
    options = dict(sequence.method.options)
    defaults = method_options(sequence.method.name)
    for name in CLEAN_DATA_OPTIONS & defaults.keys():
        clean = experiment.clean(sequence, limit=CLEAN_IMAGES)
        batches = (batch.images.to(experiment.device) for batch in clean.batches)
        options[name] = gather_from_clean(name, model, batches, {**defaults, **options})
    method = create_method(sequence.method.name, model, **options)
    conditions = EvaluationOptions(
        device=experiment.device,
        dtype=config.dtype,
        class_mask=config.data.class_mask,
        clean=experiment.clean(sequence, limit=config.data.limit) if config.clean_after else None,
        keep_samples=config.keep_samples,
        confusion=config.confusion,
    )
    try:
        for key, domain in zip(sequence.keys, domains, strict=True):
            if domain.reset_before:
                method.reset()
            started = now()
            result = run_domain(method, domain, conditions, progress=progress)
            names = domain.dataset.class_names
            yield FinishedCell(
                key,
                result,
                replace(provenance, started=started, finished=now()),
                kept_pictures(domain.dataset, result),
                () if all(name.isdigit() for name in names) else names,
            )
    finally:
        method.reset()


def check_sequence(experiment: Experiment, sequence: CellSequence) -> None:
    """Open the data and the network, to raise their errors before the first cell."""
    config, first = experiment.config, experiment.domains_of(sequence)[0]
    gathers = any(CLEAN_DATA_OPTIONS & method_options(method.name).keys() for method in config.methods)
    if config.clean_after or gathers:
        experiment.data.clean(first.dataset.domain)
    experiment.network(first)


class CellWriter:
    """Store cells and print a line for each; with `several` experiments it also names data set and setting."""

    def __init__(
        self, plan: ExperimentPlan, store: ResultStore, progress: Progress = SILENT, *, several: bool = False
    ) -> None:
        self.plan, self.store, self.progress = plan, store, progress
        config = plan.config
        self.prefix = f"{config.data.dataset} {config.stream.setting:<8}  " if several else ""
        self.width = max(len(method.display_name) for method in config.methods)

    def finish(self, sequence: CellSequence, found: FinishedCell) -> None:
        """Store a cell; report its accuracy, its gain over the baseline if that is finished, and its seconds."""
        if found.pictures or found.result.pixels:
            self.store.keep_pictures(found.key, found.pictures, class_names=found.class_names)
        result = found.result
        self.store.finish(found.key, result, found.provenance, label=sequence.method.display_name)
        baseline = self.plan.baselines.get(found.key)
        base = self.store.find(baseline) if baseline else None
        gain = "" if base is None else format_gain(result.accuracy - base.accuracy)
        overall = result.accuracy_all_outputs
        note = "" if overall is None else f"  ({format_percent(overall)} % among all outputs)"
        numbers = f"{format_percent(result.accuracy):>5} %  {gain:>6}  {result.seconds_total:7.1f} s{note}"
        self.progress.note(f"{self._name(sequence, found.key)}  {numbers}")

    def fail(self, sequence: CellSequence, keys: Iterable[CellKey], message: str) -> None:
        for key in keys:
            self.store.fail(key, message)
            self.progress.note(f"{self._name(sequence, key)}  failed")

    def _name(self, sequence: CellSequence, key: CellKey) -> str:
        batch = f"  batch {key.batch_size}" if len(self.plan.config.stream.batch_size) > 1 else ""
        label = f"{self.prefix}{sequence.method.display_name:<{self.width}}"
        return plain_text(f"{label}  {key.domain:<18}{batch}  seed {key.seed}")


def run_sequences(
    experiment: Experiment,
    writer: CellWriter,
    sequences: Sequence[CellSequence],
    *,
    wait: bool = True,
    announce: bool = True,
) -> None:
    """Claim and run the unclaimed sequences; with `wait`, return only when other processes have finished the rest."""
    config, left, store, progress = experiment.config, list(sequences), writer.store, writer.progress
    provenance = collect_provenance(device=experiment.device, dtype=config.dtype, config=config.to_json())
    while left:
        held = []
        for sequence in left:
            if keys := list(store.claim(sequence.keys)):
                _run_claimed(experiment, writer, sequence, keys, provenance)
            else:
                held.append(sequence)
        if not wait:
            return
        left = unfinished(held, store)
        if left and len(left) == len(held):
            if announce:
                progress.note(f"waiting for cells that another process runs: {sum(len(c.keys) for c in left)}")
            announce = False
            progress.advance(0)
            store.heartbeat()
            time.sleep(POLL_SECONDS)


def _run_claimed(
    experiment: Experiment, writer: CellWriter, sequence: CellSequence, left: list[CellKey], provenance: Provenance
) -> None:
    """Run a sequence and write the cells in `left`; errors of cells are recorded, errors of the store are raised."""
    progress = _HeartbeatProgress(writer, sequence.cost)
    results = run_sequence(experiment, sequence, provenance, progress)
    while True:
        try:
            found = next(results, None)
        except Exception as error:
            if error is progress.error:
                raise
            writer.fail(sequence, left, failure_text(error))  # the other cells are still worth running
            if device_is_lost(error):
                raise BackendError(
                    f"this process has lost its GPU ({failure_text(error)[:80]}); run the command again for the cells "
                    "that are left"
                ) from error
            return
        if found is None:
            return
        if found.key in left:  # the others were finished before; they ran again for their effect on the weights
            writer.finish(sequence, found)
            left.remove(found.key)


class _HeartbeatProgress(Progress):
    """Renews the claims of a sequence and reports batches by cost; `error`: what the store or display raised."""

    def __init__(self, writer: CellWriter, cost: int) -> None:
        self.writer, self.cost = writer, cost
        self.error: Exception | None = None

    def advance(self, n: int = 1) -> None:
        try:
            self.writer.store.heartbeat()
            self.writer.progress.advance(n * self.cost)
        except Exception as error:
            self.error = error
            raise


def device_is_lost(error: Exception) -> bool:
    """Whether an error destroyed the CUDA context of this process."""
    if not isinstance(error, torch.AcceleratorError):
        return False
    try:
        torch.accelerator.synchronize()
    except RuntimeError:
        return True
    return False


def failure_text(error: Exception) -> str:
    """The message stored with a failed cell."""
    text = reason_of(error, longest=LONGEST_MESSAGE)
    return text if isinstance(error, TrustError) else f"{type(error).__name__}: {text}"
