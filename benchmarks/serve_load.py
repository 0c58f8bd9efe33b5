"""Stress tests of the service: load, kill -9, a full disk, many requests, many streams, malformed requests.

    python -m benchmarks.serve_load OUT.json --load 300 --kills 100 --full-disk-kills 100
        --requests 100000 --streams 1000 --malformed 5000
    python -m benchmarks.serve_load OUT.json --page docs/guides/production.md  the table of a record, between its marks

Parts that are not named are not run, and stay in OUT.json as they were. `--load` serves the network that ships with the
package, its throughput beside that of the bare network; the others a tiny one, since the network is not what they try.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
import sqlite3
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx
import torch
from benchmarks import pages
from benchmarks.pages import fill, write_record

from tests.live.toys import states_equal
from tests.serve.services import CLASSES, PRIVATE, Process, picture, pixels, process
from tests.serve.test_limits import malformed
from trust_tta.live.snapshots import Folder, Snapshot
from trust_tta.serve.network import open_network

EMBEDDED = "vmamba_nano_cifar10"
BATCH = 32
KILL_CLIENTS = 8
BEGIN, END = "<!-- load -->", "<!-- /load -->"


@dataclass
class Tally:
    """Numbers of answers by status, and the seconds of those with status 200."""

    statuses: Counter[int] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        cuts = statistics.quantiles(self.seconds, n=100, method="inclusive")
        times = {"p50_ms": round(1000 * cuts[49], 1), "p99_ms": round(1000 * cuts[98], 1)}
        return {"statuses": {str(k): v for k, v in sorted(self.statuses.items())}, **times}


# Many clients in one thread, with little work for each: they share the machine with the service.


async def call(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> tuple[int, float]:
    """The status of one request on an open connection, and after how many seconds to try again."""
    writer.write(request)
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    lines = dict(line.split(b": ", 1) for line in head.split(b"\r\n")[1:] if b": " in line)
    await reader.readexactly(int(lines[b"content-length"]))
    return int(head.split(b" ", 2)[1]), float(lines.get(b"retry-after", b"0"))


async def send_requests(address: str, request: bytes, tally: Tally, more: Callable[[], bool]) -> None:
    """Repeat a request while `more()` is true, with the pauses that the service asks for."""
    where = urlsplit(address)
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    with closing(writer):
        while more():
            start = time.perf_counter()
            status, wait = await call(reader, writer, request)
            tally.statuses[status] += 1
            if status == 200:
                tally.seconds.append(time.perf_counter() - start)
            elif wait:
                await asyncio.sleep(min(wait, 1.0))


async def run_clients(address: str, requests: list[bytes], more: Callable[[], bool]) -> Tally:
    """One client for each request, at the same time."""
    tally = Tally()
    await asyncio.gather(*(send_requests(address, request, tally, more) for request in requests))
    return tally


def until(end: float) -> Callable[[], bool]:
    return lambda: time.monotonic() < end


def as_request(path: str, body: bytes) -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


# The parts


def measure_load(seconds: float, clients: int) -> dict[str, Any]:
    """Clients that send one picture at a time to the source network, to tide, and to tide that only predicts."""
    found: dict[str, Any] = {"clients": clients, "seconds": seconds, "threads": torch.get_num_threads()}
    for row, method, adapt in (("source", "source", True), ("tide", "tide", True), ("tide_predicting", "tide", False)):
        path = "/predict" if adapt else "/predict?adapt=false"
        requests = [as_request(path, picture("JPEG", size=32, seed=i)) for i in range(clients)]
        bare = Bare(method, adapt=adapt)
        with (
            tempfile.TemporaryDirectory() as folder,
            process(Path(folder), "--method", method, checkpoint=EMBEDDED) as running,
        ):
            before = bare.measure()
            start, spent = time.monotonic(), processor_seconds(running)
            tally = asyncio.run(run_clients(running.address, requests, until(start + seconds)))
            passed, spent = time.monotonic() - start, processor_seconds(running) - spent
            served = Speed(tally.statuses[200] / passed, 1000 * spent / tally.statuses[200])
            alone = Speed(*(statistics.mean(pair) for pair in zip(before, bare.measure(), strict=True)))
            found[row] = tally.summary() | compare(served, alone) | {"resident_mib": round(resident(running), 1)}
    return found


def compare(served: Speed, alone: Speed) -> dict[str, float]:
    return {
        "images_per_second": round(served.images_per_second, 1),
        "bare_images_per_second": round(alone.images_per_second, 1),
        "share_of_bare": round(served.images_per_second / alone.images_per_second, 3),
        "processor_ms_per_image": round(served.processor_ms, 2),
        "bare_processor_ms_per_image": round(alone.processor_ms, 2),
        "share_of_bare_by_processor_time": round(alone.processor_ms / served.processor_ms, 3),
    }


class Speed(NamedTuple):
    """`processor_ms`: of all cores, per image; it does not depend on what else the machine does."""

    images_per_second: float
    processor_ms: float


class Bare:
    """A method that adapts or only predicts, in a loop on full batches; of `source` this is the bare network."""

    def __init__(self, method: str, *, adapt: bool) -> None:
        network = open_network(EMBEDDED, method)
        self.call = network.method if adapt else network.method.evaluate
        self.images = network.preprocessing(pixels(BATCH, size=32))

    def measure(self, seconds: float = 5.0) -> Speed:
        count, start, spent = 0, time.perf_counter(), time.process_time()
        while time.perf_counter() - start < seconds:
            self.call(self.images)
            count += BATCH
        passed, spent = time.perf_counter() - start, time.process_time() - spent
        return Speed(count / passed, 1000 * spent / count)


def measure_kills(count: int, *, full_disk: bool = False) -> dict[str, Any]:
    """Kill the service repeatedly under eight clients; what it acknowledged must be on disk.

    `full_disk`: for a part of each round, no file can be written.
    """
    rng, acks, restarts = random.Random(0), Acknowledged(), list[float]()
    with tempfile.TemporaryDirectory() as name:
        folder, left = Path(name), None
        for number in range(count):
            begin = time.monotonic()
            with process(folder) as running:
                restarts.append(time.monotonic() - begin)
                if left is not None:
                    check_restart(running, left)
                clients = [
                    threading.Thread(target=use_service, args=(running.address, acks, i)) for i in range(KILL_CLIENTS)
                ]
                for client in clients:
                    client.start()
                wait_for_answers(acks, rng.randint(1, 12))
                if full_disk:
                    fill_disk(running, full=True)
                    time.sleep(0.5 * rng.random())
                    if rng.random() < 0.5:  # else it is killed while the disk is full
                        fill_disk(running, full=False)
                        wait_for_answers(acks, rng.randint(1, 12))
                time.sleep(0.1 * rng.random())
                running.kill()
                for client in clients:
                    client.join(60)
            left = check_kept(folder, acks)
            say(f"kill {number + 1}: {len(acks.labels)} labels, {acks.events} events, snapshot {left.number}")
        return {
            "kills": count,
            "acknowledged_labels": len(acks.labels),
            "acknowledged_events": acks.events,
            "acknowledged_snapshots": acks.snapshots,
            "refused": acks.refused,
            "full_disk": full_disk,
            "lost": 0,  # each of them would have ended this
            "restart_seconds_median": round(statistics.median(restarts), 2),
        }


def wait_for_answers(acks: Acknowledged, more: int) -> None:
    goal, deadline = acks.answers + more, time.monotonic() + 120
    while acks.answers < goal and time.monotonic() < deadline:
        time.sleep(0.005)


def fill_disk(running: Process, *, full: bool) -> None:
    """Let every write of the process to a file fail, or none."""
    limit = 0 if full else resource.RLIM_INFINITY
    resource.prlimit(running.child.pid or 0, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))


@dataclass
class Acknowledged:
    """Labels, events and snapshots that were acknowledged to clients."""

    labels: dict[str, int] = field(default_factory=dict)
    events: int = 0
    snapshots: int = 0
    newest: int = 0  # number of the last snapshot that a client was given
    refused: int = 0  # with 503
    paused: dict[str, bool] = field(default_factory=dict)  # by stream, where the last request was acknowledged
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def answers(self) -> int:
        return len(self.labels) + self.events + self.snapshots


def use_service(address: str, acks: Acknowledged, number: int) -> None:
    """Predict, label, roll back, pause and fetch states until the service is killed; it pauses its own stream."""
    rng, own = random.Random(threading.get_ident()), f"client-{number}"
    try:
        with httpx.Client(base_url=address, timeout=60) as client:
            while True:
                answer = client.post("/predict", content=picture(seed=rng.randrange(1000)))
                if answer.status_code == 200:
                    name, label = answer.json()["id"], rng.randrange(len(CLASSES))
                    if client.post("/feedback", json={"id": name, "label": label}).status_code == 200:
                        acks.labels[name] = label
                if rng.random() < 0.3:
                    done = client.post("/streams/default/rollback", headers=PRIVATE).status_code == 200
                    with acks.lock:
                        acks.events += done
                if rng.random() < 0.3 and client.post(f"/predict?stream={own}", content=picture()).status_code == 200:
                    action = rng.choice(["pause", "resume"])
                    acks.paused.pop(own, None)  # unknown while the request is on its way
                    status = client.post(f"/streams/{own}/{action}", headers=PRIVATE).status_code
                    with acks.lock:
                        acks.refused += status == 503
                        acks.events += status == 200
                    if status == 200:
                        acks.paused[own] = action == "pause"
                if rng.random() < 0.2:
                    state = client.get("/streams/default/state", headers=PRIVATE)
                    if state.status_code == 200:
                        with acks.lock:
                            acks.newest = max(acks.newest, number_of(state.content))
                            acks.snapshots += 1
    except httpx.HTTPError:
        return


def number_of(snapshot: bytes) -> int:
    """Number of the snapshot, from the header of its safetensors file."""
    length = int.from_bytes(snapshot[:8], "little")
    about = json.loads(json.loads(snapshot[8 : 8 + length])["__metadata__"]["trust_tta"])["about"]
    return int(about["number"])


def check_kept(folder: Path, acks: Acknowledged) -> Snapshot:
    """Check that what was acknowledged is on the disk; returns the snapshot from which the next process continues."""
    with closing(sqlite3.connect(folder / "state" / "journal.sqlite")) as event_log:
        labels = dict(event_log.execute("SELECT prediction, label FROM feedback").fetchall())
        (events,) = event_log.execute("SELECT count(*) FROM events WHERE kind = 'request'").fetchone()
    require(acks.labels.items() <= labels.items(), "feedback was lost")
    require(events >= acks.events, f"of {acks.events} events {events} are there")
    snapshots = Folder(folder / "state" / "streams" / "default")
    newest, problems = snapshots.newest()
    snapshots.close()
    require(newest is not None and not problems, f"a snapshot is damaged: {problems}")
    assert newest is not None
    require(newest.number >= acks.newest, f"snapshot {acks.newest} was lost; the newest is {newest.number}")
    for stream, paused in acks.paused.items():
        with closing(Folder(folder / "state" / "streams" / stream)) as own:
            last, _ = own.newest()
        require(last is not None and last.state["books"]["paused"] == paused, f"a pause of '{stream}' was lost")
    return newest


def check_restart(running: Process, left: Snapshot) -> None:
    state = httpx.get(f"{running.address}/streams/default/state", headers=PRIVATE, timeout=60)
    with tempfile.TemporaryDirectory() as name:
        snapshots, number = Folder(name), number_of(state.content)
        snapshots.file(number).write_bytes(state.content)
        now = snapshots.read(number)
        snapshots.close()
    require(states_equal(now.state["method"], left.state["method"]), "it did not go on from the snapshot")
    require(now.state["books"]["batches"] == left.state["books"]["batches"], "it counts otherwise than the snapshot")


def measure_requests(count: int, clients: int) -> dict[str, Any]:
    """The answers to many requests, and the memory of the process meanwhile."""
    left, sizes = iter(range(count)), list[float]()
    with tempfile.TemporaryDirectory() as folder, process(Path(folder)) as running:

        def more() -> bool:
            number = next(left, None)
            if number is not None and number % max(1, count // 100) == 0:
                sizes.append(resident(running))
            return number is not None

        requests = [as_request(f"/predict?stream=s{i % 4}", picture(seed=i)) for i in range(clients)]
        start = time.monotonic()
        tally = asyncio.run(run_clients(running.address, requests, more))
        seconds = time.monotonic() - start
    fifth = max(1, len(sizes) // 5)
    early, late = statistics.mean(sizes[fifth : 2 * fifth]), statistics.mean(sizes[-fifth:])
    return tally.summary() | {
        "requests": count,
        "seconds": round(seconds, 1),
        "resident_mib": [round(size, 1) for size in sizes[:: max(1, len(sizes) // 20)]],
        "second_fifth_mib": round(early, 1),
        "last_fifth_mib": round(late, 1),
        "growth_mib": round(late - early, 1),
    }


def measure_streams(count: int) -> dict[str, Any]:
    """Two requests to each of many streams, most of which are on disk at the second."""
    rounds = list[dict[str, Any]]()
    with (
        tempfile.TemporaryDirectory() as folder,
        process(Path(folder)) as running,
        httpx.Client(base_url=running.address, timeout=60) as client,
    ):
        for _ in range(2):
            tally, sizes = Tally(), list[float]()
            for i in range(count):
                start = time.perf_counter()
                status = client.post(f"/predict?stream=stream-{i}", content=picture(seed=i)).status_code
                tally.statuses[status] += 1
                tally.seconds.append(time.perf_counter() - start)
                sizes.append(resident(running))
            rounds.append(tally.summary() | {"largest_mib": round(max(sizes), 1), "last_mib": round(sizes[-1], 1)})
        listed = client.get("/streams").json()["streams"]
        require(len(listed) == count, f"{len(listed)} streams are listed")
        disk = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
    loaded = sum(stream["loaded"] for stream in listed)
    return {"streams": count, "loaded": loaded, "disk_mib": round(disk / 2**20, 1), "rounds": rounds}


def measure_malformed(count: int) -> dict[str, Any]:
    """Malformed requests: each gets a 4xx and one line, without a traceback."""
    rng, statuses = random.Random(1), Counter[int]()
    with tempfile.TemporaryDirectory() as folder, process(Path(folder)) as running:
        with httpx.Client(base_url=running.address, timeout=60) as client:
            client.post("/predict", content=picture())
            for _ in range(count):
                method, path, body, headers = malformed(rng)
                response = client.request(method, path, content=body, headers=headers)
                error = response.json()["error"]
                require(400 <= response.status_code < 500, f"{method} {path}: {response.status_code}")
                require(bool(error) and "\n" not in error, f"{method} {path}: {error!r}")
                statuses[response.status_code] += 1
            alive = client.post("/predict", content=picture()).status_code == 200 and running.child.is_alive()
        require(running.stop() == 0, "it did not end well")
        tracebacks = sum("Traceback" in line for line in running.log)
        errors = sum(json.loads(line)["level"] == "error" for line in running.log)
    require(alive and not tracebacks and not errors, f"alive: {alive}; {tracebacks} tracebacks, {errors} errors")
    shown = {str(k): v for k, v in sorted(statuses.items())}
    return {"requests": count, "statuses": shown, "tracebacks": tracebacks, "alive": alive}


def processor_seconds(running: Process) -> float:
    """Of the process, in all its threads."""
    fields = Path(f"/proc/{running.child.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident(running: Process) -> float:
    """MiB of memory that the process holds."""
    pages = int(Path(f"/proc/{running.child.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise SystemExit(otherwise)


def say(line: str) -> None:
    print(line, flush=True)


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--load", type=float, default=0, metavar="SECONDS")
    parser.add_argument("--clients", type=int, default=200)
    for part in ("kills", "full_disk_kills", "requests", "streams", "malformed"):
        parser.add_argument(f"--{part.replace('_', '-')}", type=int, default=0, metavar="N")
    parser.add_argument("--page", type=Path)
    arguments = parser.parse_args(given)
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "load": lambda: measure_load(arguments.load, arguments.clients),
        "kills": lambda: measure_kills(arguments.kills),
        "full_disk_kills": lambda: measure_kills(arguments.full_disk_kills, full_disk=True),
        "requests": lambda: measure_requests(arguments.requests, min(arguments.clients, 64)),
        "streams": lambda: measure_streams(arguments.streams),
        "malformed": lambda: measure_malformed(arguments.malformed),
    }
    record = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    for part, run in parts.items():
        if getattr(arguments, part):
            busy = os.getloadavg()[0]
            record[part] = run() | {"load_average_before": round(busy, 2), "cores": os.cpu_count()}
            say(f"{part}: {json.dumps(record[part])}")
            write_record(arguments.out, record)
    if arguments.page:
        fill(arguments.page, BEGIN, END, f"\n{table(record)}\n")


def table(record: dict[str, Any]) -> str:
    """The record in sentences."""
    load, kills, full = (record[part] for part in ("load", "kills", "full_disk_kills"))
    many, streams, bad = (record[part] for part in ("requests", "streams", "malformed"))
    served = {"`source`": load["source"], "`tide`": load["tide"], "`tide` that only predicts": load["tide_predicting"]}
    over = load["source"]["processor_ms_per_image"] - load["source"]["bare_processor_ms_per_image"]
    rows = {
        f"{load['clients']} clients, one picture at a time, for {load['seconds']:.0f} s": [
            answers(served.values()),
            *(f"{name}: {throughput(part)}" for name, part in served.items()),
            f"{over:.1f} ms of processor time per image over the bare network",
        ],
        f"{kills['kills']} times `kill -9` under {KILL_CLIENTS} clients, and a restart": kept(kills),
        f"{full['kills']} times the same, with a disk that is full for a part of each round": kept(full),
        f"{many['requests']:,} requests to 4 streams": [
            f"{answers([many])}, {many['requests'] / many['seconds']:.0f} per second",
            f"memory {many['second_fifth_mib']} MiB in the second fifth, {many['last_fifth_mib']} MiB in the last",
        ],
        f"{streams['streams']:,} streams, each asked twice, {streams['loaded']} in memory": [
            answers(streams["rounds"]),
            f"{streams['rounds'][-1]['last_mib']:.0f} MiB at the end, {streams['disk_mib']:.0f} MiB on disk",
        ],
        f"{bad['requests']:,} malformed requests": [
            f"{answers([bad])}, with one line each",
            f"{bad['tracebacks']} tracebacks, the process {'alive' if bad['alive'] else 'dead'}",
        ],
    }
    return pages.table(["part", "found"], [(part, "; ".join(found)) for part, found in rows.items()])


def kept(kills: dict[str, Any]) -> list[str]:
    return [
        f"{kills['lost']} lost of {kills['acknowledged_labels']} labels, {kills['acknowledged_events']} events and "
        f"{kills['acknowledged_snapshots']} snapshots that were acknowledged",
        f"{kills['refused']} changes refused with 503",
        f"a restart takes {kills['restart_seconds_median']:.1f} s",
    ]


def answers(parts: Iterable[dict[str, Any]]) -> str:
    return f"status {', '.join(sorted({status for part in parts for status in part['statuses']}))} only"


def throughput(part: dict[str, Any]) -> str:
    times = f"p50 {part['p50_ms'] / 1000:.2f} s, p99 {part['p99_ms'] / 1000:.2f} s"
    return f"{part['images_per_second']:.0f} images per second, {part['share_of_bare']:.0%} of bare calls ({times})"


if __name__ == "__main__":
    main()
