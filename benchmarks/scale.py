"""Number of GPUs for a given request rate, from measured costs: fills the tables of docs/develop/scale.md.

    PYTHONPATH=src python -m benchmarks.scale

Times are those of docs/results/speed_h200.json and, for TIDE at batch 128, profile_h200.json (VMamba-T at 224 pixels,
bf16, one H200). TIDE at batch 1 was not measured: a pass and its gradient are what a step of TRUST naive takes beyond
the pass that predicts, and TIDE makes one of twice as many images. The rest follows from sizes of tensors and files.
"""

from __future__ import annotations

import heapq
import json
import math
import random
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "develop" / "scale.md"
RECORD = ROOT / "docs" / "results" / "speed_h200.json"
PROFILE = RECORD.with_name("profile_h200.json")
_TABLE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

DAY = 86_400
GPU_BYTES = 141e9
ACTIVATIONS = 12e9  # of a batch of 256 views
NETWORK_BYTES = 30_249_064 * 4
ADAPTED = 6_304_224  # weights
STATISTICS = 2 * 15_000  # values of the norms, at most
RESERVOIR = 32 * 3 * 224 * 224 * 2  # images of a canary, in half precision
SNAPSHOT_EVERY, KEPT = 1024, 5
EVENT_BYTES, PREDICTION_BYTES = 700, 160
LATENCY = 1.0  # seconds that an image may wait


@dataclass(frozen=True)
class Costs:
    """Seconds of an adapting step over a batch of n images: `fixed` + n `each`."""

    fixed: float
    each: float

    def step(self, images: int) -> float:
        return self.fixed + images * self.each

    @property
    def most(self) -> float:
        """Images per second of one GPU, at best."""
        return 128 / self.step(128)


def read_costs(record: Path = RECORD) -> tuple[Costs, Costs]:
    """Of prediction alone, and of TIDE, from the measured steps at batch 1 and 128."""
    rows = json.loads(record.read_text(encoding="utf-8"))["rows"]

    def seconds(work: str, batch: int) -> float:
        return next(
            float(row["median_ms"]) / 1000
            for row in rows
            if row["part"] == "network" and row["work"] == work and row["batch"] == batch and row["dtype"] == "bf16"
        )

    passes = {n: seconds(SOURCE, n) for n in (1, 128)}
    gradient = _through({n: seconds(NAIVE, n) - passes[n] for n in (1, 128)})
    profiled = json.loads(PROFILE.read_text(encoding="utf-8"))["rows"]
    tide = next(row["median_ms"] / 1000 for row in profiled if (row["work"], row["dtype"]) == ("tide", "bf16"))
    return _through(passes), _through({1: gradient.fixed + 2 * gradient.each, 128: tide})


SOURCE, NAIVE = "forward by the method 'source'", "TRUST naive"


def _through(seconds: dict[int, float]) -> Costs:
    each = (seconds[128] - seconds[1]) / 127
    return Costs(seconds[1] - each, each)


def simulate(costs: Costs, *, streams: int, rate: float, seconds: float = 20.0, seed: int = 0) -> tuple[float, float]:
    """One GPU that serves streams in turn, each with weights of its own, so that only a stream's images share a batch.

    Gives images per batch and the 99th percentile of what an image waits, in seconds; `rate`: images per second in all.
    """
    draw = random.Random(seed)
    waiting: list[list[float]] = [[] for _ in range(streams)]
    arrivals: list[float] = []
    time = 0.0
    while time < seconds:
        time += draw.expovariate(rate)
        arrivals.append(time)
    ready: list[tuple[float, int]] = []  # streams by their oldest image
    clock, place, batches, latencies = 0.0, 0, 0, list[float]()
    while place < len(arrivals) or ready:
        if not ready:
            clock = max(clock, arrivals[place])
        while place < len(arrivals) and arrivals[place] <= clock:
            stream = draw.randrange(streams)
            if not waiting[stream]:
                heapq.heappush(ready, (arrivals[place], stream))
            waiting[stream].append(arrivals[place])
            place += 1
        _, stream = heapq.heappop(ready)
        batch, waiting[stream] = waiting[stream][:128], waiting[stream][128:]
        if waiting[stream]:
            heapq.heappush(ready, (waiting[stream][0], stream))
        clock += costs.step(len(batch))
        batches += 1
        latencies += [clock - arrived for arrived in batch]
        if clock > 3 * seconds:  # it never catches up
            return len(latencies) / batches, math.inf
    latencies.sort()
    return len(latencies) / batches, latencies[int(0.99 * (len(latencies) - 1))]


def sustained(costs: Costs, streams: int) -> tuple[float, float, float]:
    """The highest rate of one GPU at which 99 % of the images wait less than LATENCY; with images per batch."""
    best = (0.0, 0.0, math.inf)
    for share in (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95):
        rate = share * costs.most
        batch, wait = simulate(costs, streams=streams, rate=rate)
        if wait > LATENCY:
            break
        best = (rate, batch, wait)
    return best


def tables() -> dict[str, str]:
    predict, tide = read_costs()
    return {
        "gpu": _gpu_table(predict, tide),
        "streams": _streams_table(tide),
        "service": _service_table(tide),
        "limits": _limits_table(tide),
    }


def stream_bytes() -> dict[str, float]:
    """Of one stream, beyond the network that all share: weights, their vector and gradient, two moments, the judge."""
    weights = 4.0 * ADAPTED
    return {
        "in memory": 6 * weights + 8 * STATISTICS + RESERVOIR,
        "snapshot": 3 * weights + 4 * STATISTICS + RESERVOIR,
    }


def _gpu_table(predict: Costs, tide: Costs) -> str:
    rows = [("predict alone", predict), ("adapt with `tide`", tide)]
    titles = (
        "one H200",
        "ms at batch 1",
        "ms at batch 128",
        "images per second at best",
        "GPUs for 10^9 a day, at best",
    )
    lines = [f"| {' | '.join(titles)} |", "| --- | --- | --- | --- | --- |"]
    for name, costs in rows:
        gpus = 1e9 / DAY / costs.most
        times = f"{1000 * costs.step(1):.1f} | {1000 * costs.step(128):.1f}"
        lines.append(f"| {name} | {times} | {costs.most:,.0f} | {gpus:.1f} |")
    return "\n".join(lines)


def _streams_table(tide: Costs) -> str:
    lines = [
        "| streams on one GPU | images per second | images per batch | 99 % wait less than |",
        "| --- | --- | --- | --- |",
    ]
    for streams in (1, 4, 16, 64, 128, 256):
        rate, batch, wait = sustained(tide, streams)
        found = f"{rate:,.0f} | {batch:.1f} | {wait:.2f} s" if rate else "fewer than 5 % of the best | – | –"
        lines.append(f"| {streams} | {found} |")
    return "\n".join(lines)


def _service_table(tide: Costs) -> str:
    sizes, per_gpu = stream_bytes(), sustained(tide, 16)[0]
    names = ["images per day, 16 streams per GPU", "streams", "memory of streams per GPU", "snapshots kept"]
    names += ["snapshots written per second, every 1,024 images", "the same, once in 10 minutes per stream"]
    names += ["predictions and events per day"]
    columns = []
    for gpus in (1, 100, 10_000):
        rate, streams = gpus * per_gpu, 16 * gpus
        columns.append(
            [
                f"{rate * DAY:.1e}",
                f"{streams:,}",
                _bytes(16 * sizes["in memory"]),
                _bytes(KEPT * streams * sizes["snapshot"]),
                _bytes(rate / SNAPSHOT_EVERY * sizes["snapshot"]),
                _bytes(streams * sizes["snapshot"] / 600),
                _bytes(rate * DAY * PREDICTION_BYTES + streams * 100 * EVENT_BYTES),
            ]
        )
    lines = ["| | 1 GPU | 100 GPUs | 10,000 GPUs |", "| --- | --- | --- | --- |"]
    lines += [f"| {name} | {' | '.join(column[i] for column in columns)} |" for i, name in enumerate(names)]
    return "\n".join(lines)


def _limits_table(tide: Costs) -> str:
    sizes, per_gpu = stream_bytes(), sustained(tide, 16)[0]
    room = int((GPU_BYTES - NETWORK_BYTES - ACTIVATIONS) / sizes["in memory"])
    stored = int(2e9 / (per_gpu / SNAPSHOT_EVERY * sizes["snapshot"]))
    rows = [
        (
            "streams in the memory of a GPU",
            f"{room:,}",
            f"{_bytes(sizes['in memory'])} each",
            "idle ones go to disk, as now",
        ),
        (
            "streams that are served by a GPU",
            f"{int(LATENCY / tide.fixed):,}",
            f"each batch costs {1000 * tide.fixed:.1f} ms whatever its size",
            "streams of one domain share a state",
        ),
        (
            "snapshots every 1,024 images",
            f"{stored} GPUs per 2 GB/s of storage",
            "they grow with traffic, not with what was learned",
            "by time; without moments, in half precision",
        ),
        ("one writer of results", "one machine's SQLite", "a transaction per cell", "a server behind the same claims"),
        (
            "one event log per replica",
            "one machine's SQLite",
            "a transaction per batch",
            "a log, partitioned by stream",
        ),
        (
            "10^9 images a day",
            f"{math.ceil(1e9 / DAY / per_gpu)} GPUs",
            f"{per_gpu:,.0f} images per second each, at 16 streams",
            "–",
        ),
    ]
    lines = ["| part | holds to about | because | then |", "| --- | --- | --- | --- |"]
    return "\n".join(lines + [f"| {' | '.join(row)} |" for row in rows])


def _bytes(number: float) -> str:
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} PB"


def fill(page: str) -> str:
    found = tables()
    return _TABLE.sub(lambda match: f"{match[1]}\n{found[match[2]]}\n\n{match[3]}", page)


if __name__ == "__main__":
    PAGE.write_text(fill(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
