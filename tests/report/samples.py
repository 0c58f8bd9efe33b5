"""Stores with made-up but plausible numbers, for the tests of the report."""

from __future__ import annotations

import json
import math
import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from tests.results.samples import PROVENANCE
from trust_tta.report import model
from trust_tta.report.model import ResultGroup
from trust_tta.results import (
    Cell,
    CellKey,
    CellResult,
    Failure,
    History,
    PlannedCell,
    Provenance,
    Reliability,
    ResultStore,
    SamplePrediction,
)
from trust_tta.results.display import CORRUPTIONS, make_label

# Mean accuracy after and before the update, updates and passes per batch, milliseconds per image.
PLAUSIBLE = {
    "source": (0.595, None, 0, 1, 1.1),
    "bn": (0.764, None, 0, 1, 1.1),
    "tent": (0.766, 0.764, 1, 3, 3.4),
    "eta": (0.767, 0.764, 1, 3, 3.5),
    "sar": (0.768, 0.765, 1, 5, 6.3),
    "shot": (0.769, 0.765, 1, 3, 3.6),
    "lame": (0.752, None, 0, 1, 1.3),
    "foa": (0.712, None, 0, 28, 31.0),
    "trust_naive": (0.775, 0.764, 1, 3, 4.6),
    "trust": (0.789, 0.766, 6, 13, 25.2),
    "ensemble": (0.771, 0.765, 6, 18, 27.0),
    "repetition": (0.781, 0.766, 6, 13, 25.1),
    "augmentation": (0.768, 0.763, 6, 13, 29.4),
}
DIFFICULTY = (-5.3, -4.6, -13.4, 5.6, -8.1, 4.0, 6.5, 0.0, 0.8, -1.1, 10.7, -2.8, 2.8, 3.4, 1.7)


def make_cell(
    method: str,
    domain: str,
    *,
    seed: int = 0,
    accuracy: float = 0.75,
    before: float | None = None,
    batches: int = 20,
    batch_size: int = 100,
    work: tuple[int, int, float] = (1, 3, 4.0),
    options: str = "{}",
    clean: float | None = None,
    predictions: tuple[SamplePrediction, ...] = (),
    provenance: Provenance = PROVENANCE,
    experiment: str = "main",
    dataset: str = "cifar10-c",
    setting: str = "online",
    severity: int | None = 5,
    checkpoint: str = "9f2c" * 16,
    fingerprint: str = "c01d" * 16,
    label: str = "",
) -> Cell:
    """A whole cell with a course and reliability bins that agree with its accuracy."""
    generator = random.Random(f"{method}{domain}{seed}{options}")
    updates, passes, milliseconds = work
    course = _course(generator, accuracy, before, batches, batch_size, milliseconds)
    reliability = _reliability(generator, accuracy, batches * batch_size)
    result = CellResult(
        samples=batches * batch_size,
        accuracy=accuracy,
        accuracy_before=before,
        entropy=0.4,
        nll=1.1 - accuracy / 2,
        ece=reliability.ece,
        brier=0.9 - 0.8 * accuracy,
        forwards=(passes - updates) * batches,
        backwards=updates * batches,
        updates=updates * batches,
        skipped_updates=0,
        seconds_median=milliseconds * batch_size / 1000,
        seconds_mean=milliseconds * batch_size / 1000,
        seconds_total=milliseconds * batch_size * batches / 1000,
        clean_accuracy=clean,
        history=course,
        reliability=reliability,
        predictions=predictions,
    )
    made = CellKey(
        experiment=experiment,
        dataset=dataset,
        domain=domain,
        severity=severity,
        method=method,
        options=options,
        setting=setting,
        batch_size=batch_size,
        seed=seed,
        checkpoint=checkpoint,
        fingerprint=fingerprint,
    )
    return Cell(made, result, provenance, label)


def plausible_cells(
    *,
    methods: Iterable[str] = PLAUSIBLE,
    domains: Sequence[str] = CORRUPTIONS,
    seeds: int = 3,
    experiment: str = "main",
    dataset: str = "cifar10-c",
    setting: str = "online",
    batch_size: int = 100,
) -> list[Cell]:
    """Methods by domains by seeds, with numbers like those of a small network on CIFAR-10-C."""
    cells = []
    for method in methods:
        accuracy, before, updates, passes, milliseconds = PLAUSIBLE[method]
        for j, domain in enumerate(domains):
            for seed in range(seeds):
                noise = random.Random(f"{method} {domain} {seed}").gauss(0, 0.002)
                shift = DIFFICULTY[j % len(DIFFICULTY)] / 100 + noise
                cells.append(
                    make_cell(
                        method,
                        domain,
                        seed=seed,
                        accuracy=round(accuracy + shift, 4),
                        before=None if before is None else round(before + shift, 4),
                        work=(updates, passes, milliseconds),
                        options=json.dumps({"k": 6, "lr": 1e-4} if method == "trust" else {}),
                        provenance=replace(PROVENANCE, started=f"2026-01-02T03:{j:02d}:{seed:02d}+00:00"),
                        experiment=experiment,
                        dataset=dataset,
                        setting=setting,
                        batch_size=batch_size,
                    )
                )
    return cells


def make_groups(
    cells: Sequence[Cell], failures: Sequence[Failure] = (), absent: Sequence[CellKey] = ()
) -> list[ResultGroup]:
    """Groups of cells whose labels name the options that most variants of their method do not share."""
    variants: dict[str, set[str]] = defaultdict(set)
    for key in [*(cell.key for cell in cells), *(failure.key for failure in failures), *absent]:
        variants[key.method].add(key.options)

    def label(key: CellKey) -> str:
        every = [json.loads(text) for text in variants[key.method]]
        usual = {n for n, v in key.option_values.items() if 2 * sum(o.get(n, ...) == v for o in every) > len(every)}
        return make_label(key.method, {n: v for n, v in key.option_values.items() if n not in usual})

    named = [replace(cell, label=label(cell.key)) for cell in cells]
    failed = [replace(failure, label=label(failure.key)) for failure in failures]
    return model.make_groups([*named, *failed, *(PlannedCell(key, label(key)) for key in absent)])


def fill_store(path: Path, cells: Iterable[Cell]) -> Path:
    """A store with finished cells."""
    with ResultStore(path) as store:
        for cell in cells:
            store.finish(cell.key, cell.result, cell.provenance, label=cell.label)
    return path


def _course(
    generator: random.Random, accuracy: float, before: float | None, batches: int, size: int, milliseconds: float
) -> History:
    if not math.isfinite(accuracy):
        return History()
    rise = [accuracy - 0.03 * math.exp(-i / 5) + generator.gauss(0, 0.01) for i in range(batches)]
    clipped = tuple(min(max(a, 0.0), 1.0) for a in rise)
    return History(
        samples=(size,) * batches,
        accuracy=clipped,
        accuracy_before=None if before is None else tuple(max(a - 0.01, 0.0) for a in clipped),
        entropy=(0.4,) * batches,
        seconds=(milliseconds * size / 1000,) * batches,
    )


def _reliability(generator: random.Random, accuracy: float, samples: int) -> Reliability:
    if not math.isfinite(accuracy):
        return Reliability()
    shares = [0.002 * (i + 1) ** 2.2 for i in range(15)]
    counts = [round(samples * share / sum(shares)) for share in shares]
    middles = [(i + 0.5) / 15 for i in range(15)]
    right = [min(max(m - 0.12 + generator.gauss(0, 0.02), 0.0), 1.0) for m in middles]
    return Reliability(
        count=tuple(counts),
        confidence=tuple(n * m for n, m in zip(counts, middles, strict=True)),
        correct=tuple(round(n * r) for n, r in zip(counts, right, strict=True)),
    )
