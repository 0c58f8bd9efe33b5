"""Real processes on one store: killed at any moment, and working side by side."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.bench.tiny import Recorder, content, numbers, read_config, run
from trust_tta.bench.experiment import make_plan
from trust_tta.bench.processes import _PipeProgress
from trust_tta.bench.sweep import sweep
from trust_tta.report.formats import to_text
from trust_tta.report.model import make_groups
from trust_tta.report.tables import accuracy_table
from trust_tta.results import Cell, ResultStore

DOMAINS = ["gaussian_noise", "defocus_blur", "snow", "contrast", "fog", "pixelate"]
METHODS = ["bn", {"name": "tent", "lr": 0.01}]


def write_config(folder: Path, **changes: Any) -> Path:
    """A configuration file; JSON values are TOML values as well, but for tables."""
    tables = content(folder, data={"domains": DOMAINS, "limit": 200}, methods=METHODS, **changes)
    lines: list[str] = []
    methods = tables.pop("methods")
    for name in ("model", "data", "stream"):
        lines += [f"{name}.{key} = {_toml(value)}" for key, value in tables.pop(name).items()]
    lines = [*(f"{name} = {_toml(value)}" for name, value in tables.items()), *lines, f"methods = {_toml(methods)}"]
    path = folder / f"{tables['experiment']}.toml"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{name} = {_toml(inner)}" for name, inner in value.items()) + " }"
    return f"[{', '.join(map(_toml, value))}]" if isinstance(value, list) else json.dumps(value)


def start(config: Path, store: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "trust_tta", "bench", str(config), "--store", str(store)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment)


def cells_of(store: Path) -> list[Cell]:
    with ResultStore(store, create=False) as opened:
        return opened.results()


def table_of(cells: list[Cell]) -> str:
    """The table of accuracies as the command prints it."""
    return to_text(accuracy_table(make_groups(cells)[0]))


def test_kill_and_resume_in_a_continual_stream(tmp_path: Path) -> None:
    config, store = write_config(tmp_path, stream={"setting": "continual"}), tmp_path / "killed.sqlite"
    process = start(config, store)
    assert process.stdout is not None
    for _ in range(8):  # into the second method's sequence
        process.stdout.readline()
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    kept = {cell.key: cell for cell in cells_of(store)}
    assert 8 <= len(kept) < 12

    process = start(config, store)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    finished = cells_of(store)
    assert len(finished) == 12
    assert all(cell == kept[cell.key] for cell in finished if cell.key in kept)

    undisturbed, _ = run(read_config(config))
    assert numbers(finished) == numbers(undisturbed)
    assert table_of(undisturbed) in printed


class Companion(Recorder):
    """Starts a second process after the first cell, and goes on when that has finished one too."""

    def __init__(self, config: Path, store: Path) -> None:
        super().__init__()
        self.config, self.store = config, store
        self.process: subprocess.Popen[str] | None = None
        self.first = ""

    def note(self, text: str) -> None:
        super().note(text)
        if self.process is None:
            self.process = start(self.config, self.store)
            assert self.process.stdout is not None
            self.first = self.process.stdout.readline()


def test_two_processes_share_the_work(tmp_path: Path) -> None:
    config, store = write_config(tmp_path, stream={"seeds": [0, 1]}), tmp_path / "shared.sqlite"
    companion = Companion(config, store)
    with ResultStore(store) as opened:
        keys = sweep(read_config(config), opened, progress=companion)
    assert companion.process is not None
    printed = companion.first + companion.process.communicate(timeout=60)[0]
    assert companion.process.returncode == 0
    others = sum(line.endswith(" s") for line in printed.splitlines())
    assert others > 0
    assert len(companion.done) + others == len(keys) == 24
    undisturbed, _ = run(read_config(config))
    assert numbers(cells_of(store)) == numbers(undisturbed)
    assert table_of(undisturbed) in printed


def test_a_process_waits_for_cells_that_another_holds(tmp_path: Path) -> None:
    config, store = write_config(tmp_path), tmp_path / "held.sqlite"
    experiment = read_config(config)
    last = make_plan(experiment).keys[-1]
    with ResultStore(store) as holder:
        assert holder.claim([last])
        process = start(config, store)
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(12)]
        assert lines[-1] == "waiting for cells that another process runs: 1\n"
        assert holder.counts().done == 11
    rest, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert rest.startswith(f"tent (lr=0.01)  {last.domain}")
    assert len(cells_of(store)) == 12


def test_a_worker_exits_at_its_next_message_if_its_first_exit_was_lost() -> None:
    here, there = multiprocessing.Pipe()
    progress, before = _PipeProgress(there), signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit, match="143"):
            progress.exit_on_signal(signal.SIGTERM, None)
        with pytest.raises(SystemExit, match="143"):
            progress.advance()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not here.poll()
