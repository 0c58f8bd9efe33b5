"""One line for each finished cell, and progress in between."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from types import TracebackType

from trust_tta.bench.config import RunConfig
from trust_tta.bench.sweep import Observer
from trust_tta.cli.printing import find_baseline
from trust_tta.cli.progress import Advance, progress
from trust_tta.report.text import printable
from trust_tta.results import Cell, CellKey, CellResult, format_gain, format_percent


class Lines(Observer):
    """Prints cells as they finish: `place`, method, domain, seed, accuracy, gain over the baseline, seconds."""

    def __init__(self, config: RunConfig, known: Iterable[Cell], *, place: str = "") -> None:
        self.place = place
        self.baseline = find_baseline(method.name for method in config.methods)
        self.several = len(config.stream.batch_sizes) > 1
        self.width = max(len(method.name) for method in config.methods)
        self.accuracies: dict[tuple[object, ...], float] = {}
        for cell in known:
            self._note(cell.key, cell.result)
        self._stack = ExitStack()
        self._advance: Advance | None = None
        self._waits = False

    def __enter__(self) -> Lines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def start(self, keys: tuple[CellKey, ...], batches: int) -> None:
        if keys:
            self._advance = self._stack.enter_context(progress(batches, "batches"))

    def advance(self, batches: int) -> None:
        if self._advance is not None:
            self._advance(batches)

    def finished(self, key: CellKey, result: CellResult) -> None:
        self._note(key, result)
        base = self.accuracies.get(_place(key)) if self.baseline else None
        gain = "" if base is None or key.method == self.baseline else format_gain(result.accuracy - base)
        numbers = f"{format_percent(result.accuracy):>5} %  {gain:>6}  {result.seconds_total:7.1f} s"
        print(f"{self._name(key)}  {numbers}", flush=True)

    def failed(self, key: CellKey, message: str) -> None:
        print(f"{self._name(key)}  failed", flush=True)

    def waiting(self, cells: int) -> None:
        if not self._waits:
            print(f"waiting for cells that another process runs: {cells}", flush=True)
        self._waits = True

    def _name(self, key: CellKey) -> str:
        batch = f"  batch {key.batch_size}" if self.several else ""
        return printable(f"{self.place}{key.method:<{self.width}}  {key.domain:<18}{batch}  seed {key.seed}")

    def _note(self, key: CellKey, result: CellResult) -> None:
        if key.method == self.baseline:
            self.accuracies[_place(key)] = result.accuracy


def _place(key: CellKey) -> tuple[object, ...]:
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
