"""`trust-tta bench --processes`: real workers on one store, killed, interrupted, and compared with a single process."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.bench.test_processes import cells_of, write_config
from tests.bench.tiny import content, numbers, run
from trust_tta.bench.parsing import read_parts
from trust_tta.cli.main import main
from trust_tta.results import ResultStore

PATIENCE = 60.0  # seconds within which processes must have ended
MANY = 30  # seeds, which no machine has run before it is told to stop

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds the workers under /proc")


def start(config: Path, store: Path, processes: int = 2) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "trust_tta", "bench", str(config), "--store", str(store)]
    return subprocess.Popen(
        [*command, "--processes", str(processes)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        start_new_session=True,
        # As in a terminal: who is started in the background ignores interrupts, and so would the command.
        preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )


def workers_of(process: subprocess.Popen[str]) -> list[int]:
    """The pids of the workers, once all are there."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text(encoding="ascii").split()
    return [int(pid) for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def wait_for_a_cell(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def have_ended(pids: list[int]) -> bool:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        if not any(Path(f"/proc/{pid}").exists() for pid in pids):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.slow
def test_parts_in_two_processes_give_the_numbers_of_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, store = write_config(tmp_path, stream={"seeds": [0, 1]}), tmp_path / "shared.sqlite"
    text = config.read_text(encoding="utf-8")
    config.write_text(f'{text}\n[[parts]]\n[[parts]]\nstream = {{ setting = "standard" }}\n', encoding="utf-8")
    flags = ["--domains", "fog,snow", "--limit", "40", "--batch-size", "16"]
    assert main(["bench", str(config), *flags, "--store", str(store), "--processes", "2"]) == 0
    printed = capsys.readouterr().out
    assert main(["bench", str(config), *flags, "--store", str(tmp_path / "alone.sqlite")]) == 0
    alone = capsys.readouterr().out
    shared = cells_of(store)
    assert len(shared) == 2 * 2 * 2 + 2 * 2
    assert numbers(shared) == numbers(cells_of(tmp_path / "alone.sqlite"))
    lines = [line for line in printed.splitlines() if line.startswith("sample ") and line.endswith(" s")]
    assert sorted({line.split()[1] for line in lines}) == ["online", "standard"]
    assert len(lines) == len(shared)
    tables = [line for line in alone.splitlines() if line.startswith("tent (lr=0.01)") and "*" in line]
    assert tables
    assert all(line in printed for line in tables)
    assert {cell.provenance.threads for cell in shared} == {
        max(1, cells_of(tmp_path / "alone.sqlite")[0].provenance.threads // 2)
    }

    assert main(["bench", str(config), *flags, "--store", str(store), "--processes", "2"]) == 0
    assert " seed " not in capsys.readouterr().out


def test_the_others_take_over_from_a_worker_that_was_killed(tmp_path: Path) -> None:
    config, store = write_config(tmp_path, stream={"seeds": [0]}), tmp_path / "killed.sqlite"
    process = start(config, store)
    wait_for_a_cell(process)
    victim = workers_of(process)[0]
    os.kill(victim, signal.SIGKILL)
    printed, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    assert f"worker {victim} died with code -9; the others take over its cells\n" in printed
    undisturbed, _ = run(read_parts(config)[0])
    assert numbers(cells_of(store)) == numbers(undisturbed)


@pytest.mark.slow
def test_cells_are_left_when_every_worker_is_killed(tmp_path: Path) -> None:
    config, store = write_config(tmp_path, stream={"seeds": [0, 1]}), tmp_path / "dead.sqlite"
    process = start(config, store)
    wait_for_a_cell(process)
    for pid in workers_of(process):
        os.kill(pid, signal.SIGKILL)
    printed, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert printed.count("died with code -9") == 2
    left = 24 - len(cells_of(store))
    assert errors.splitlines()[-1] == f"trust-tta: {left} cells of sample are missing; run the same command again"
    assert main(["bench", str(config), "--store", str(store)]) == 0
    assert len(cells_of(store)) == 24


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGINT, id="interrupted"),
        pytest.param(signal.SIGTERM, id="terminated", marks=pytest.mark.slow),
    ],
)
def test_no_worker_outlives_the_command(number: signal.Signals, tmp_path: Path) -> None:
    config, store = write_config(tmp_path, stream={"seeds": list(range(MANY))}), tmp_path / "ended.sqlite"
    process = start(config, store)
    wait_for_a_cell(process)
    workers = workers_of(process)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does
    else:
        process.send_signal(number)
        os.killpg(process.pid, number)  # `timeout` does both
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, errors
    assert errors.splitlines()[-1].startswith("trust-tta: interrupted; finished cells are kept")
    assert "Traceback" not in errors
    assert len(workers) == 2
    assert have_ended(workers)
    with ResultStore(store) as opened:
        assert opened.counts().running == 0
        assert opened.counts().failed == 0


@pytest.mark.slow
def test_workers_exit_when_the_command_is_killed(tmp_path: Path) -> None:
    config, store = write_config(tmp_path, stream={"seeds": list(range(MANY))}), tmp_path / "orphans.sqlite"
    process = start(config, store)
    wait_for_a_cell(process)
    workers = workers_of(process)
    process.kill()
    process.wait()
    assert len(workers) == 2
    assert have_ended(workers)
    process.communicate()
    with ResultStore(store) as opened:
        assert opened.counts().failed == 0
        assert opened.counts().pending > 0


def test_a_misfit_is_refused_once_and_fails_no_cell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tables = content(tmp_path)
    store, model = tmp_path / "refused.sqlite", tables["model"]
    flags = ["--checkpoint", model["checkpoint"], "--model", "vmamba_nano", "--dataset", "sample", "--domains", "fog"]
    code = main(["bench", *flags, "--methods", "source,bn", "--store", str(store), "--processes", "2"])
    out, err = capsys.readouterr()
    assert code == 2
    assert "does not fit the network" in err
    assert len(err.splitlines()) == 1
    assert out == ""
    with ResultStore(store) as opened:
        assert (opened.counts().failed, opened.counts().pending) == (0, 2)


@pytest.mark.parametrize("count", ["0", "-3"])
def test_there_is_at_least_one_process(count: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "configs/demo.toml", "--processes", count]) == 2
    assert capsys.readouterr().err == f"trust-tta: --processes {count}: give 1 or more\n"
