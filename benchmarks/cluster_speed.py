"""How much faster a sweep is on more workers: a cluster of this machine with one CPU after the other, and processes.

    PYTHONPATH=src python -m benchmarks.cluster_speed --out docs/results/cluster_speed.json [--workers 1,2]
    PYTHONPATH=src python -m benchmarks.cluster_speed --page --out docs/results/cluster_speed.json    the guide's table

Each way runs the same cells into a store of its own, from the start of the command to its end, on a cluster that is up.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.cluster_kills import cluster_environment, fill_guide, make_config, to_toml
from benchmarks.pages import read_record, write_record

IMAGES, SEEDS = 512, 1


def seconds_of(words: list[str]) -> float:
    begun = time.perf_counter()
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begun


def measure(folder: Path, workers: int) -> dict[str, Any]:
    from ray.cluster_utils import Cluster

    file = folder / "speed.toml"
    file.write_text(to_toml(make_config(folder, seeds=SEEDS, images=IMAGES)), encoding="utf-8")
    words = [sys.executable, "-m", "trust_tta", "bench", str(file)]
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        for _ in range(workers):
            cluster.add_node(num_cpus=1)
        store = ["--store", str(folder / f"ray_{workers}.sqlite")]
        ray = seconds_of([*words, *store, "--engine", "ray", "--address", cluster.address])
    finally:
        cluster.shutdown()
    store = ["--store", str(folder / f"processes_{workers}.sqlite")]
    return {"workers": workers, "ray": ray, "processes": seconds_of([*words, *store, "--processes", str(workers)])}


def workers_table(record: dict[str, Any]) -> list[list[str]]:
    first = record["found"][0]
    return [
        [str(each["workers"])]
        + [text for way in ("ray", "processes") for text in (f"{each[way]:.0f}", f"{first[way] / each[way]:.2f}")]
        for each in record["found"]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--workers", default="1,2")
    parser.add_argument("--page", action="store_true", help="write the table of docs/guides/distributed.md")
    options = parser.parse_args()
    if options.page:
        head = ["workers", "seconds on Ray", "speed-up", "seconds with processes", "speed-up"]
        fill_guide("workers", head, workers_table(read_record(options.out.resolve())))
        return
    os.environ.update(cluster_environment())
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        found = [measure(Path(folder), int(workers)) for workers in options.workers.split(",")]
    record = {"cpus": os.cpu_count(), "load_before": load, "images_per_cell": IMAGES, "found": found}
    write_record(options.out, record)
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
