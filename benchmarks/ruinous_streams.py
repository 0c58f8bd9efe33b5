"""Streams that ruin methods, then clean images: with and without the guard, on the network and images that ship.

    python benchmarks/ruinous_streams.py OUT [--methods tent,shot] [--streams noise,mixed] [--processes 12] ...
    python benchmarks/ruinous_streams.py OUT --plan FILE [--seconds 300] ...
    python benchmarks/ruinous_streams.py OUT --merge A.json B.json [--page PAGE --times T.json]

A plan has lines "methods; streams; guards; batches", which are run in this order. Writes OUT.json and OUT.md, anew
after each stream; one that is cut says how many batches it had. "after": accuracy of what is served for clean images
once the stream is over; "source": of the network that did not adapt, with the method's statistics; "fresh": of the
method that saw no stream before; "stream": accuracy on the stream itself, for those that have labels. All guards of a
task take turns batch by batch, so that what else the machine does falls on each of them; "seconds" compares them on
benign streams, "late_seconds" without the first 64 batches, in which passes are recorded and tried more often, and
"blocks" has these in parts of 64. The guard "bare" is the method without a stream. The tables of the page come from the
merged runs, and from those of T.json, which were alone on their machine.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import trust_tta as tt
from trust_tta.atomic import replacing
from trust_tta.data.sample import load_sample
from trust_tta.live.calibration import Reference, calibrate
from trust_tta.live.session import Result
from trust_tta.live.snapshots import read_state, write_state
from trust_tta.methods.base import Method
from trust_tta.methods.registry import method_options
from trust_tta.methods.source_data import gather_from_clean

Images = NDArray[np.uint8]
Task = tuple[str, str, tuple[str, ...], int]  # method, stream, guards, batches

RUINOUS = ("noise", "constant", "one class", "flips", "nan", "mixed")
BENIGN = ("clean", "gaussian_noise", "fog")
REFERENCE_IMAGES, CLEAN_IMAGES = 512, 512
NETWORK = {"name": "vmamba_nano", "checkpoint": "vmamba_nano_cifar10"}
# Rough time of a step, in that of the fastest methods: the longest streams begin first.
PASSES = {"cotta": 12, "foa": 10, "trust": 5, "ensemble": 5, "repetition": 5, "augmentation": 5, "dpcore": 3, "tide": 2}
LATE = 64  # batches after which a stream has settled
FEWEST = 10  # batches of a benign stream; one that was cut before says nothing
GUARDED = "calibrated"  # the guard that the tables compare with none


@dataclass
class Run:
    """One method on one stream, with one guard."""

    method: str
    stream: str
    guard: str
    batches: int
    source: float
    fresh: float
    after: float
    stream_accuracy: float | None
    seconds: float
    late_seconds: float = 0.0
    blocks: list[float] = field(default_factory=list)
    lr: float | None = None
    events: dict[str, int] = field(default_factory=dict)
    events_after: dict[str, int] = field(default_factory=dict)

    def add(self, seconds: float) -> None:
        """Count a batch that took so long."""
        self.seconds += seconds
        if self.batches >= LATE:
            self.late_seconds += seconds
            if self.batches % LATE == 0:
                self.blocks.append(0.0)
            self.blocks[-1] += seconds
        self.batches += 1


@dataclass(frozen=True)
class Setting:
    """How every stream of a record is run."""

    batch_size: int
    lr: float | None
    device: str
    starts: Path | None = None  # a folder in which processes share what is known of a method


@dataclass(frozen=True)
class Material:
    """Images for the stream and for afterwards, with labels; corrupted versions are made when they are first needed."""

    images: Images
    labels: NDArray[np.int64]
    clean: Images
    clean_labels: NDArray[np.int64]
    reference: Images
    corrupted: dict[str, Images] = field(default_factory=dict)

    def corrupt(self, name: str) -> Images:
        """By a corruption at severity 5, or at that of "fog 3"."""
        if name not in self.corrupted:
            kind, _, severity = name.partition(" ")
            self.corrupted[name] = tt.corrupt(self.images, kind, severity=int(severity or 5), seed=0)
        return self.corrupted[name]

    def batch(self, stream: str, i: int, size: int) -> tuple[Images, NDArray[np.int64] | None]:
        """The i-th batch of a stream; labels where its images have them."""
        chance = np.random.default_rng([i, 17])
        if stream == "noise":
            return chance.integers(0, 256, (size, 32, 32, 3), dtype=np.uint8), None
        if stream == "constant":
            colors = chance.integers(0, 256, (size, 1, 1, 3), dtype=np.uint8)
            return np.broadcast_to(colors, (size, 32, 32, 3)).copy(), None
        if stream == "one class":
            chosen = chance.choice(np.flatnonzero(self.labels == 3), size)
            return self.images[chosen], self.labels[chosen]
        chosen = chance.integers(0, len(self.images), size)
        if stream == "mixed":
            parts = [self.batch(s, i, size)[0] for s in ("noise", "one class")]
            parts += [255 - self.images[chosen], self.corrupt("contrast")[chosen]]
            return np.stack([parts[k][j] for j, k in enumerate(chance.integers(0, len(parts), size))]), None
        if stream == "flips":
            return self.corrupt(("gaussian_noise", "fog")[i // 10 % 2])[chosen], self.labels[chosen]
        source = self.images if stream in ("clean", "nan") else self.corrupt(stream)
        return source[chosen], self.labels[chosen]


@dataclass(frozen=True)
class Start:
    """What is known of a method before any stream."""

    reference: Reference
    source: float
    fresh: float


def main() -> None:
    arguments = parse()
    started = time.monotonic()
    book = Book(arguments.out, {k: str(v) for k, v in vars(arguments).items() if k not in ("out", "merge")})
    if arguments.merge:
        for file in arguments.merge:
            book.add(read_runs(file))
        if arguments.page:
            write_page(arguments.page, list(book.runs.values()), read_runs(arguments.times))
        return
    starts = arguments.out.with_suffix(".starts")
    setting = Setting(arguments.batch_size, arguments.lr, arguments.device, starts)
    if arguments.plan:
        book.arguments["plan"] = arguments.plan.read_text()
        tasks = read_plan(book.arguments["plan"])
    else:
        guards, methods, streams = (
            tuple(given.split(",")) for given in (arguments.guards, arguments.methods, arguments.streams)
        )
        tasks = [(m, s, guards, count_batches(arguments, m, s)) for m, s in product(methods, streams)]
        tasks.sort(key=lambda task: -task[3] * PASSES.get(task[0], 1))  # the longest first: none is left at the end
    known = {(r.method, r.stream, r.guard): r.batches for file in arguments.known for r in read_runs(file)}
    tasks = [t for t in tasks if any(known.get((t[0], t[1], guard), 0) < t[3] for guard in t[2])]
    for task, result in perform(tasks, setting, processes=arguments.processes, until=started + arguments.seconds):
        if isinstance(result, str):
            book.fail(task, result)
        else:
            book.add(result)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--methods", default=",".join(tt.list_methods()))
    parser.add_argument("--streams", default=",".join((*RUINOUS, *BENIGN)))
    parser.add_argument("--guards", default=f"none,{GUARDED}", help="of bare, none, uncalibrated, calibrated")
    parser.add_argument("--batches", default="2000", help="of all methods, and of some: 2000,trust=500,cotta=200")
    parser.add_argument("--benign-batches", type=int, help="at most so many of a benign stream")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, help="of methods that have one; their own by default")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="cut streams after so many")
    parser.add_argument("--plan", type=Path, help="what to run, in place of methods, streams, guards and batches")
    parser.add_argument("--known", type=Path, nargs="*", default=(), help="records whose streams need not run again")
    parser.add_argument("--merge", type=Path, nargs="+", help="records to put together; nothing is run")
    parser.add_argument("--page", type=Path, help="where to put the tables of the merged runs")
    parser.add_argument("--times", type=Path, help="a record of runs that were alone on their machine, for the page")
    return parser.parse_args()


def read_runs(file: Path) -> list[Run]:
    return [Run(**run) for run in json.loads(file.read_text())["runs"]]


def read_plan(text: str) -> list[Task]:
    """The tasks of a plan in its order; methods change fastest, so that no two processes begin with the same."""
    tasks: list[Task] = []
    for entry in text.splitlines():
        if entry.strip() and not entry.startswith("#"):
            methods, streams, guards, batches = (part.strip().split(",") for part in entry.split(";"))
            tasks += [(m, s, tuple(guards), int(batches[0])) for s, m in product(streams, methods)]
    return tasks


def count_batches(arguments: argparse.Namespace, method: str, stream: str) -> int:
    common, *own = arguments.batches.split(",")
    count = int(dict(part.split("=") for part in own).get(method, common))
    return min(count, arguments.benign_batches or count) if stream in BENIGN else count


def perform(
    tasks: list[Task], setting: Setting, *, processes: int, until: float
) -> Iterator[tuple[Task, list[Run] | str]]:
    """The runs of each task as it ends, or what went wrong; after `until`, none is begun and those that run are cut."""
    if processes == 1:
        yield from ((task, attempt(task, setting, until)) for task in tasks)
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=spawn, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        futures: dict[Future[list[Run] | str], Task] = {pool.submit(attempt, t, setting, until): t for t in tasks}
        for future in as_completed(futures):
            error = future.exception()
            yield futures[future], future.result() if error is None else repr(error)


def attempt(task: Task, setting: Setting, until: float) -> list[Run] | str:
    if time.monotonic() > until:  # the clock of the machine, the same in every process
        return "not begun"
    try:
        return run(task, setting, until=until)
    except Exception as error:  # one method's failure is a line of the record, not its end
        return f"{type(error).__name__}: {error}"


def run(task: Task, setting: Setting, *, until: float = float("inf")) -> list[Run]:
    """A stream with each guard in turn, batch by batch, and clean images afterwards."""
    name, stream, guards, batches = task
    material, start = gather_material(), begin(name, setting)
    runs = {g: Run(name, stream, g, 0, start.source, start.fresh, 0.0, None, 0.0) for g in guards}
    lives = {guard: make_stream(name, guard, start.reference, setting) for guard in guards}
    events, later = ({guard: Counter[str]() for guard in lives} for _ in range(2))
    right, seen = dict.fromkeys(lives, 0), 0
    for i in range(batches):
        if i and time.monotonic() > until:
            break
        images, labels = material.batch(stream, i, setting.batch_size)
        inputs = as_input(images, setting)
        if stream == "nan":
            inputs[i % 2 :: 2] = float("nan")
        seen += len(images) * (labels is not None and stream != "nan")
        for guard, live in list(lives.items())[:: 1 - 2 * (i % 2)]:
            before = now(setting)
            logits = predict_live(live, events[guard], inputs)
            runs[guard].add(now(setting) - before)
            right[guard] += count_right(logits, labels) if labels is not None and stream != "nan" else 0
    for guard, live in lives.items():
        runs[guard].after = serve(partial(predict_live, live, later[guard]), setting)
        live.close()
        runs[guard].stream_accuracy = 100 * right[guard] / seen if seen else None
        runs[guard].lr = getattr(live.method.options, "lr", None)
        runs[guard].events, runs[guard].events_after = dict(events[guard]), dict(later[guard])
    return list(runs.values())


def predict_live(live: tt.Stream | Bare, events: Counter[str], inputs: Tensor) -> Tensor:
    """What is served, while `events` are counted."""
    result = live(inputs)
    events.update(f"{e.kind}: {e.action}" for e in result.events)
    return result.logits


@cache
def gather_material() -> Material:
    images, labels = load_sample()
    order = np.random.default_rng(0).permutation(len(images))
    images, labels = images[order], labels[order]
    a, b = REFERENCE_IMAGES, REFERENCE_IMAGES + CLEAN_IMAGES
    return Material(images[b:], labels[b:], images[a:b], labels[a:b], images[:a])


@cache
def begin(name: str, setting: Setting) -> Start:
    """Computed by the first process that needs it."""
    file = setting.starts / f"{name}.safetensors" if setting.starts else None
    if file is not None and file.exists():
        state, about = read_state(file)
        known = Reference.from_state(state)
        if known is not None:
            return Start(known, about["source"], about["fresh"])
    reference = calibrate(make(name, setting), clean_batches(setting))
    start = Start(reference, serve(make(name, setting).evaluate, setting), serve(make(name, setting), setting))
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_state(file, reference.state(), about={"source": start.source, "fresh": start.fresh})
    return start


def clean_batches(setting: Setting) -> list[Tensor]:
    return [as_input(b, setting) for b in split(gather_material().reference, setting.batch_size)]


def make(name: str, setting: Setting) -> Method:
    model = tt.create_model(NETWORK["name"], checkpoint=NETWORK["checkpoint"]).to(setting.device)
    defaults = method_options(name)
    options: dict[str, Any] = {}
    if setting.lr is not None and "lr" in defaults:
        options["lr"] = setting.lr
    return tt.create_method(name, model, **options, **from_clean(name, setting))


@cache
def from_clean(name: str, setting: Setting) -> dict[str, Any]:
    """The options that a method takes from clean images."""
    model = tt.create_model(NETWORK["name"], checkpoint=NETWORK["checkpoint"]).to(setting.device)
    options = method_options(name)
    if setting.lr is not None and "lr" in options:
        options["lr"] = setting.lr
    wanted = {"source_statistics", "fisher"} & options.keys()
    return {option: gather_from_clean(option, model, clean_batches(setting), options) for option in wanted}


class Bare:
    """A method in the place of a stream."""

    def __init__(self, method: Method) -> None:
        self.method = method

    def __call__(self, images: Tensor) -> Result:
        return Result(self.method(images), True, ())

    def close(self) -> None:
        """There is nothing to close."""


def make_stream(name: str, guard: str, reference: Reference, setting: Setting) -> tt.Stream | Bare:
    if guard == "bare":
        return Bare(make(name, setting))
    return tt.Stream(
        make(name, setting),
        guard=None if guard == "none" else tt.Guard(),
        reference=reference if guard == GUARDED else None,
    )


def serve(predict: Callable[[Tensor], Tensor], setting: Setting) -> float:
    """Accuracy on the clean images, in per cent."""
    material, size = gather_material(), setting.batch_size
    pairs = zip(split(material.clean, size), split(material.clean_labels, size), strict=True)
    return 100 * sum(count_right(predict(as_input(i, setting)), labels) for i, labels in pairs) / len(material.clean)


def count_right(logits: Tensor, labels: NDArray[np.int64]) -> int:
    return int((logits.argmax(1).cpu().numpy() == labels).sum())


def split(values: NDArray[Any], size: int) -> list[NDArray[Any]]:
    return [values[i : i + size] for i in range(0, len(values), size)]


def as_input(images: Images, setting: Setting) -> Tensor:
    mean, std = torch.tensor((0.4914, 0.4822, 0.4465)), torch.tensor((0.2470, 0.2435, 0.2616))
    floats = (torch.from_numpy(images).float() / 255 - mean) / std
    return floats.permute(0, 3, 1, 2).contiguous().to(setting.device)


def now(setting: Setting) -> float:
    """Seconds that this thread worked, so that other programs do not count; on a GPU, seconds."""
    if setting.device == "cpu":
        return time.thread_time()
    torch.cuda.synchronize()
    return time.perf_counter()


class Book:
    """The record: runs in the order of methods and streams, written anew after each addition."""

    def __init__(self, out: Path, arguments: dict[str, str]) -> None:
        self.out, self.arguments = out, arguments
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
        self.machine = {"gpu": gpu, "python": platform.python_version(), "torch": torch.__version__}
        self.runs: dict[tuple[str, str, str], Run] = {}
        self.failures: dict[str, str] = {}

    def add(self, runs: Iterable[Run]) -> None:
        for run in runs:
            known = self.runs.get((run.method, run.stream, run.guard))
            if known is None or run.batches >= known.batches:
                self.runs[run.method, run.stream, run.guard] = run
            print(line(run), flush=True)
        self.write()

    def fail(self, task: Task, problem: str) -> None:
        self.failures[f"{task[0]} on {task[1]}"] = problem
        print(f"{task[0]} on {task[1]}: {problem}", flush=True)
        self.write()

    def write(self) -> None:
        runs = in_order(self.runs.values())
        content = {"arguments": self.arguments, "machine": self.machine, "failures": self.failures}
        with replacing(self.out.with_suffix(".json")) as file:
            file.write_text(json.dumps({**content, "runs": [asdict(r) for r in runs]}, indent=1) + "\n")
        with replacing(self.out.with_suffix(".md")) as file:
            file.write_text("\n\n".join([ruinous_table(runs), lasting_table(runs), benign_table(runs)]) + "\n")


def in_order(runs: Iterable[Run]) -> list[Run]:
    order = {name: i for i, name in enumerate((*tt.list_methods(), *RUINOUS, *BENIGN))}
    return sorted(runs, key=lambda r: (order.get(r.method, -1), order.get(r.stream, 99), r.stream, r.guard))


def line(r: Run) -> str:
    events = ", ".join(f"{kind} x{count}" for kind, count in r.events.items())
    later = ", ".join(f"{kind} x{count}" for kind, count in r.events_after.items())
    share = "" if r.stream_accuracy is None else f" stream {r.stream_accuracy:.1f}"
    scores = f"source {r.source:.1f} fresh {r.fresh:.1f} after {r.after:.1f}{share}"
    return f"{r.method} {r.stream} {r.guard} x{r.batches}: {scores}; {r.seconds:.1f} s; {events}; then {later}"


def ruinous_table(runs: list[Run]) -> str:
    """Accuracy afterwards without and with the guard; bold where it is more than half a point below the source."""
    streams = [s for s in RUINOUS if any(r.stream == s for r in runs)]
    rows = [["method", "batches", "source", "fresh", *streams]]
    for name in dict.fromkeys(r.method for r in runs if r.stream in RUINOUS):
        own = {(r.stream, r.guard): r for r in runs if r.method == name and r.stream in RUINOUS}
        any_run = next(iter(own.values()))
        head = [name, count_range(own), f"{any_run.source:.1f}", f"{any_run.fresh:.1f}"]
        rows.append([*head, *(pair(own, s, score_after) for s in streams)])
    return table(rows)


def lasting_table(runs: list[Run]) -> str:
    """Accuracy on the ruinous streams that have labels, without and with the guard."""
    streams = [s for s in RUINOUS if any(r.stream == s and r.stream_accuracy is not None for r in runs)]
    rows = [["method", *streams]]
    for name in dict.fromkeys(r.method for r in runs if r.stream in streams):
        own = {(r.stream, r.guard): r for r in runs if r.method == name}
        rows.append([name, *(pair(own, s, lambda r: f"{r.stream_accuracy:.1f}") for s in streams)])
    return table(rows)


def pair(own: dict[tuple[str, str], Run], stream: str, show: Callable[[Run], str]) -> str:
    """A cell: without the guard and with it; a dash for what was not run."""
    return " / ".join(show(own[stream, g]) if (stream, g) in own else "-" for g in ("none", GUARDED))


def count_range(own: dict[tuple[str, str], Run]) -> str:
    """Batches per stream, without the guard and with it; from the fewest to the most."""
    cells = []
    for guard in ("none", GUARDED):
        counts = sorted({r.batches for (_, g), r in own.items() if g == guard})
        cells.append("-".join(map(str, dict.fromkeys((counts[0], counts[-1])))) if counts else "-")
    return " / ".join(dict.fromkeys(cells))


def score_after(r: Run) -> str:
    bad = r.guard != "none" and r.after < r.source - 0.5
    return f"**{r.after:.1f}**" if bad else f"{r.after:.1f}"


def benign_table(runs: list[Run]) -> str:
    """What the guard costs: points on the stream, and time; that of the first batches apart."""
    rows = [
        ["method", "stream", "batches", "alone", "guarded", "points", "time", "after 64 batches", "what the guard did"]
    ]
    alone = {(r.method, r.stream): r for r in runs if r.guard == "none"}
    for r in runs:
        bare = alone.get((r.method, r.stream))
        if r.stream not in RUINOUS and r.guard == GUARDED and bare and r.stream_accuracy and bare.stream_accuracy:
            gain, cost = r.stream_accuracy - bare.stream_accuracy, 100 * (r.seconds / bare.seconds - 1)
            late = f"{100 * (r.late_seconds / bare.late_seconds - 1):+.1f} %" if bare.late_seconds else ""
            events = ", ".join(f"{kind} x{count}" for kind, count in r.events.items())
            shares = [f"{bare.stream_accuracy:.1f}", f"{r.stream_accuracy:.1f}", f"{gain:+.2f}", f"{cost:+.1f} %", late]
            rows.append([r.method, r.stream, str(r.batches), *shares, events])
    return table(rows)


def write_page(page: Path, runs: list[Run], times: list[Run]) -> None:
    """Put the tables between the marks of a page."""
    text, runs = page.read_text(), in_order(runs)
    after = f"{ruinous_table(runs)}\n\n{sum_up(runs)}"
    tables = {"after": after, "lasting": lasting_table(runs), "benign": points_table(runs), "time": time_table(times)}
    for name, content in tables.items():
        before, rest = text.split(f"<!-- {name} -->\n")
        text = f"{before}<!-- {name} -->\n{content}\n<!-- /{name} -->{rest.split(f'<!-- /{name} -->')[1]}"
    with replacing(page) as file:
        file.write_text(text)


def sum_up(runs: list[Run]) -> str:
    """How many of the guarded streams end within half a point of the source, and of the others."""
    counts = []
    for guard in (GUARDED, "none"):
        losses = [r.source - r.after for r in runs if r.stream in RUINOUS and r.guard == guard]
        near = sum(loss <= 0.5 for loss in losses)
        counts.append(f"{near} of {len(losses)} end within 0.5 points of the source, the worst {max(losses):.1f} below")
    return f"With the guard {counts[0]}; without it {counts[1]}."


def points_table(runs: list[Run]) -> str:
    """What the guard costs in accuracy on benign streams: a row for each method."""
    rows = [["method", "streams", "batches each", "alone", "guarded", "mean change", "worst change"]]
    long = [r for r in runs if r.stream not in RUINOUS and r.batches >= FEWEST]
    found = {(r.method, r.stream, r.guard): r for r in long if r.stream_accuracy is not None}
    pairs = [(found[m, s, "none"], r) for (m, s, g), r in found.items() if g == GUARDED and (m, s, "none") in found]
    for name in dict.fromkeys(r.method for _, r in pairs):
        own = [(bare.stream_accuracy or 0, r.stream_accuracy or 0, r) for bare, r in pairs if r.method == name]
        worst = min(own, key=lambda entry: entry[1] - entry[0])
        alone, guarded = (float(np.mean([entry[i] for entry in own])) for i in range(2))
        counts = sorted({r.batches for _, _, r in own})
        batches = "-".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
        shares = [
            f"{alone:.1f}",
            f"{guarded:.1f}",
            f"{round(guarded - alone, 2) + 0.0:+.2f}",
            f"{worst[1] - worst[0]:+.2f}",
        ]
        shares[-1] += f" ({worst[2].stream})" if worst[1] < worst[0] else ""
        rows.append([name, str(len(own)), batches, *shares])
    return table(rows)


def time_table(runs: list[Run]) -> str:
    """What the guard costs in time: of a batch once the stream has settled, and of the first 64 together.

    The change is the median over parts of 64 batches, in which both took turns; where there are none, that of the mean.
    """
    head = ["ms per batch: method", "stream", "guarded stream", "change by the guard", "first 64 batches", "all"]
    rows = [["method", "images", "batches", *head]]
    found, more = {(r.method, r.stream, r.guard): r for r in in_order(runs)}, list[float]()
    for (method, stream, guard), r in found.items():
        bare, without = found.get((method, stream, "none")), found.get((method, stream, "bare"))
        if guard == GUARDED and bare is not None and bare.late_seconds and r.batches >= 2 * LATE:
            alone, guarded = (1000 * one.late_seconds / (one.batches - LATE) for one in (bare, r))
            own = f"{1000 * without.late_seconds / (without.batches - LATE):.2f}" if without else "-"
            start = (r.seconds - r.late_seconds) - (bare.seconds - bare.late_seconds)
            ratios = [b / a for a, b in zip(bare.blocks, r.blocks, strict=True)][: (r.batches - LATE) // LATE]
            change = 100 * (float(np.median(ratios)) if ratios else guarded / alone) - 100
            whole = 100 * (r.seconds / bare.seconds - 1)
            times = [f"{alone:.2f}", f"{guarded:.2f}", f"{change:+.1f} %", f"{start:+.2f} s", f"{whole:+.1f} %"]
            rows.append([method, stream, str(r.batches), own, *times])
            more.append(guarded - alone)
    if not more:
        return table(rows)
    return f"{table(rows)}\n\nA settled batch takes {min(more):.2f} to {max(more):.2f} ms more."


def table(rows: list[list[str]]) -> str:
    head, *rest = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([head, "|" + "---|" * len(rows[0]), *rest])


if __name__ == "__main__":
    main()
