"""Several processes on one store, and processes that are killed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.results.samples import PROVENANCE
from tests.results.worker import compute, keys
from trust_tta.results import Cell, Counts, ResultStore, write_csv
from trust_tta.results.store import Claimant

ROOT = Path(__file__).parents[2]
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells whether a claimant is dead")


def start(path: Path, n: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.results.worker", str(path), str(n)]
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def let_go(worker: subprocess.Popen[str]) -> None:
    assert worker.stdin is not None
    worker.stdin.write("\n")
    worker.stdin.flush()


def kill_after(worker: subprocess.Popen[str], cells: int, delay: float) -> list[int]:
    """SIGKILL the worker some time after its n-th cell; return the cells it had announced."""
    let_go(worker)
    assert worker.stdout is not None
    announced = [int(worker.stdout.readline()) for _ in range(cells)]
    time.sleep(delay)
    worker.send_signal(signal.SIGKILL)
    announced += [int(line) for line in worker.communicate()[0].splitlines()]
    assert worker.returncode == -signal.SIGKILL
    return announced


@linux_only
def test_killed_writers_lose_no_finished_cell(tmp_path: Path) -> None:
    n, draw = 120, random.Random(0)
    path = tmp_path / "killed.db"
    done: set[int] = set()
    for round_number in range(4):
        announced = kill_after(start(path, n), cells=12 + round_number, delay=draw.random() * 0.02)
        assert done.isdisjoint(announced)
        with ResultStore(path) as store:
            cells = store.results()
            counts = store.counts()
        seeds = {cell.key.seed for cell in cells}
        # A cell may be on disk before its announcement is, never the other way round.
        assert done | set(announced) <= seeds
        assert all(cell.result == compute(cell.key) for cell in cells)
        assert counts.done + counts.running + counts.pending <= n
        done = seeds
    assert 0 < len(done) < n
    rest = [int(line) for line in start(path, n).communicate("\n")[0].splitlines()]
    assert set(rest) == set(range(n)) - done
    with ResultStore(path) as store:
        assert store.counts() == Counts(done=n)
        write_csv(store.results(), tmp_path / "killed.csv")
    write_csv((Cell(key, compute(key), PROVENANCE) for key in keys(n)), tmp_path / "calm.csv")
    assert (tmp_path / "killed.csv").read_bytes() == (tmp_path / "calm.csv").read_bytes()


def test_processes_that_share_a_store_do_each_cell_once(tmp_path: Path) -> None:
    path, n = tmp_path / "shared.db", 200  # enough that one cannot be through before another has started
    workers = [start(path, n) for _ in range(3)]
    for worker in workers:
        let_go(worker)
    done = [[int(line) for line in worker.communicate()[0].splitlines()] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0, 0]
    assert sorted(seed for seeds in done for seed in seeds) == list(range(n))
    assert sum(bool(seeds) for seeds in done) > 1
    with ResultStore(path) as store:
        assert store.results() == [Cell(key, compute(key), PROVENANCE) for key in keys(n)]


@linux_only
def test_the_cell_of_a_killed_claimant_is_free_at_once(tmp_path: Path) -> None:
    path = tmp_path / "held.db"
    code = (
        "import sys, time\n"
        "from tests.results.samples import KEY\n"
        "from trust_tta.results import ResultStore\n"
        "store = ResultStore(sys.argv[1], lease=1e6)\n"
        "print(bool(store.claim([KEY])), flush=True)\n"
        "time.sleep(600)\n"
    )
    (key,) = keys(1)
    holder = subprocess.Popen([sys.executable, "-c", code, str(path)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "True\n"
    with ResultStore(path) as store:
        assert not store.claim([key])
        holder.kill()
        os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)  # dead, but still listed as a zombie
        assert store.claim([key])
    holder.communicate()


@linux_only
def test_claimants_of_other_machines_are_neither_alive_nor_dead() -> None:
    me = Claimant.current()
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    assert me.is_alive() is True
    assert replace(me, pid=ended.pid).is_alive() is False
    assert replace(me, born="1").is_alive() is False
    assert replace(me, born=None).is_alive() is None
    assert replace(me, pid=ended.pid, place="another boot").is_alive() is None
    assert replace(me, pid=ended.pid, place=None).is_alive() is None
