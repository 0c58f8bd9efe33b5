"""A sweep on a cluster of this machine whose workers, nodes and driver are killed, again and again.

    PYTHONPATH=src python -m benchmarks.cluster_kills --out docs/results/cluster_kills.json
    PYTHONPATH=src python -m benchmarks.cluster_kills --page --out docs/results/cluster_kills.json    the guide's table

The head and two nodes are processes of this machine. At the end the store must hold what an undisturbed sweep without a
cluster gives: the same cells, each once, with the same numbers.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.pages import GUIDES, fill, read_record, table, write_record

from trust_tta.bench.config import RunConfig
from trust_tta.bench.parsing import parse_config
from trust_tta.bench.sweep import sweep
from trust_tta.distributed.cluster import LOOPBACK
from trust_tta.results import Cell, ResultStore

DOMAINS = ("gaussian_noise", "defocus_blur", "snow", "contrast", "fog", "pixelate")
KINDS = ("worker", "node", "driver")
PATIENCE = 300  # seconds for a cell to be done between two kills


def make_config(folder: Path, *, seeds: int, images: int = 32) -> RunConfig:
    tables = {
        "model": {"name": "vmamba_nano", "checkpoint": "vmamba_nano_cifar10"},
        "data": {"dataset": "sample", "domains": list(DOMAINS), "limit": images},
        "stream": {"batch_size": 16, "seeds": list(range(seeds))},
        "methods": ["source", "tent"],
        "device": "cpu",
        "store": str(folder / "disturbed.sqlite"),
    }
    return parse_config(tables, name="kills", origin="the benchmark")


def cluster_environment() -> dict[str, str]:
    """A cluster of this machine alone, with a token; each worker has one thread."""
    closed = {LOOPBACK: "0", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    return {**closed, "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0", "OMP_NUM_THREADS": "1"}


def numbers(cells: list[Cell]) -> list[tuple[object, ...]]:
    """Everything but the times."""
    return [
        (c.key, c.label, c.result.accuracy, c.result.entropy, c.result.history.accuracy, c.result.history.entropy)
        for c in cells
    ]


class Killer:
    """A cluster, a driver on it, and what is killed of them."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        from ray.cluster_utils import Cluster

        self.config, self.folder = config, folder
        self.file = folder / "kills.toml"
        self.file.write_text(to_toml(config), encoding="utf-8")
        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        self.nodes = [self.cluster.add_node(num_cpus=1) for _ in range(2)]
        self.driver = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-m", "trust_tta", "bench", str(self.file), "--engine", "ray"]
        words += ["--address", self.cluster.address, "--store", self.config.store]
        with open(self.folder / "driver.log", "ab") as log:
            return subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT)

    def done(self) -> int:
        if not Path(self.config.store).exists():
            return 0
        with ResultStore(self.config.store, create=False) as store:
            return store.counts().done

    def wait(self, more_than: int) -> bool:
        """Until more cells are done; False when the sweep is over."""
        until = time.monotonic() + PATIENCE
        while self.done() <= more_than and time.monotonic() < until:
            if self.driver.poll() is not None:
                return False
            time.sleep(0.5)
        return self.driver.poll() is None

    def kill(self, kind: str) -> bool:
        if kind == "driver":
            self.driver.kill()
            self.driver.wait()
            self.driver = self.start()
            return True
        if kind == "node":
            node = self.nodes.pop(0)
            for process in node.all_processes["raylet"]:
                os.kill(process.process.pid, signal.SIGKILL)
            self.cluster.remove_node(node, allow_graceful=False)
            self.nodes.append(self.cluster.add_node(num_cpus=1))
            return True
        until = time.monotonic() + 60
        while time.monotonic() < until:
            for pid in running_tasks():
                os.kill(pid, signal.SIGKILL)
                return True
            time.sleep(0.05)
        return False


def running_tasks() -> list[int]:
    """The processes below this one that run a task."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            title = (entry / "cmdline").read_bytes() if entry.name.isdigit() else b""
        except OSError:
            continue
        if title.startswith(b"ray::run_task") and is_below(int(entry.name)):
            found.append(int(entry.name))
    return found


def is_below(pid: int) -> bool:
    """Whether this process started that one, or one that did."""
    while pid > 1:
        if pid == os.getpid():
            return True
        try:
            pid = int((Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            return False
    return False


def to_toml(config: RunConfig) -> str:
    data, stream = config.data, config.stream
    return "\n".join(
        [
            f"experiment = {json.dumps(config.experiment)}",
            f"methods = {json.dumps([method.name for method in config.methods])}",
            'device = "cpu"',
            f"[model]\nname = {json.dumps(config.model.name)}\ncheckpoint = {json.dumps(config.model.checkpoint)}",
            f"[data]\ndataset = {json.dumps(data.dataset)}\ndomains = {json.dumps(data.domains)}\nlimit = {data.limit}",
            f"[stream]\nbatch_size = {json.dumps(stream.batch_size)}\nseeds = {json.dumps(stream.seeds)}",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--page", action="store_true", help="write the table of docs/guides/distributed.md")
    arguments = parser.parse_args()
    if arguments.page:
        fill_guide("kills", ["", ""], kills_table(read_record(arguments.out.resolve())))
        return
    os.environ.update(cluster_environment())
    with tempfile.TemporaryDirectory() as name:
        record = disturb(make_config(Path(name), seeds=arguments.seeds), Path(name), kills=arguments.kills)
    write_record(arguments.out, record)
    print(json.dumps({key: value for key, value in record.items() if key != "kills"}))


def kills_table(record: dict[str, Any]) -> list[list[str]]:
    words = {"cells": "cells", "done": "done at the end", "failed": "failed", "left": "left"}
    rows = [[f"kills of a {kind}", str(count)] for kind, count in record["killed"].items()]
    rows += [[text, str(record[name])] for name, text in words.items()]
    rows.append(["the same as undisturbed", "yes" if record["same_as_undisturbed"] else "NO"])
    return [*rows, ["seconds", f"{record['seconds']:.0f}"]]


def fill_guide(name: str, head: list[str], rows: list[list[str]]) -> None:
    """Write a table of docs/guides/distributed.md, between its marks."""
    fill(GUIDES / "distributed.md", f"<!-- table: {name} -->", "<!-- end -->", f"\n\n{table(head, rows)}\n\n")


def disturb(config: RunConfig, folder: Path, *, kills: int) -> dict[str, Any]:
    began, made = time.monotonic(), []
    killer = Killer(config, folder)
    for kind in itertools.islice(itertools.cycle(KINDS), kills):
        before = killer.done()
        if not killer.wait(more_than=before):
            break
        if killer.kill(kind):
            made.append({"killed": kind, "cells_done": killer.done(), "seconds": round(time.monotonic() - began, 1)})
            print(json.dumps(made[-1]), flush=True)
    code = killer.driver.wait()
    seconds = time.monotonic() - began
    killer.cluster.shutdown()
    alone = config.changed(store=str(folder / "alone.sqlite"))
    with ResultStore(alone.store) as store:
        sweep(alone, store)
        wanted = store.results()
    with ResultStore(config.store, create=False) as store:
        found, counts = store.results(), store.counts()
    return {
        "kills": made,
        "killed": {kind: sum(each["killed"] == kind for each in made) for kind in KINDS},
        "cells": len(wanted),
        "done": counts.done,
        "failed": counts.failed,
        "left": counts.pending + counts.running,
        "same_as_undisturbed": numbers(found) == numbers(wanted),
        "driver_ended_with": code,
        "seconds": round(seconds, 1),
    }


if __name__ == "__main__":
    main()
