"""Eight replicas that each see an eighth of a stream, with and without averaging, against one that sees everything.

    PYTHONPATH=src python -m benchmarks.replicas --data data/CIFAR-10-C --device cuda --processes 6 --out FILE
    PYTHONPATH=src python -m benchmarks.replicas --render --out docs/results/replicas.json  # guides/distributed.md

The replicas are those of `averaged_replica.py`, in lockstep in one process: no cluster is needed. Without --data, the
shipped images are corrupted. Runs that FILE holds are not repeated; none is begun after --seconds.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean as mean
from typing import Any, NamedTuple

import numpy as np
import torch
from benchmarks.averaged_replica import Replica, source_of
from benchmarks.averaging import AveragingConfig, Merger, ReplicaUpdate
from numpy.typing import NDArray
from torch import Tensor

import trust_tta as tt
from trust_tta.atomic import replacing
from trust_tta.bench.environment import collect_provenance
from trust_tta.data.sample import load_sample
from trust_tta.methods.base import Method
from trust_tta.models.checkpoint import Checkpoint
from trust_tta.report.figures import STYLE
from trust_tta.report.theme import STYLES

REPLICAS = 8
BATCH = 8
POINTS = 16  # of a curve
CHECKPOINT = "vmamba_nano_cifar10"
DOCS = Path(__file__).parents[1] / "docs"
COLORS = [STYLES[name].light for name in ("bn", "source", "tide", "trust", "tent", "sar", "shot", "lame")]
MARKERS = "osD^vP*X"
TRUSTING = {"domain": 1e9, "outlier": 1e9, "trim": 0.0}  # merges whatever comes


@dataclass(frozen=True)
class Condition:
    """How the replicas run. `changes`: of the policy; `poison`: what the last replica does; `guarded`: the others."""

    name: str
    replicas: int = REPLICAS
    every: int | None = None
    changes: dict[str, float] = field(default_factory=dict)
    poison: str | None = None
    guarded: bool = True


CONDITIONS = (
    Condition("one sees all", replicas=1),
    Condition("no averaging"),
    Condition("every 64", every=64),
    Condition("every 256", every=256),
    Condition("every 1024", every=1024),
    Condition("poisoned; mean", every=256, changes=TRUSTING, poison="noise", guarded=False),
    Condition("poisoned; as shipped", every=256, poison="noise"),
    Condition("poisoned; trimmed", every=256, changes=TRUSTING | {"trim": 0.125}, poison="noise", guarded=False),
    Condition("poisoned; median", every=256, changes=TRUSTING | {"trim": 0.5}, poison="noise", guarded=False),
    Condition("poisoned; guard", every=256, changes=TRUSTING, poison="noise"),
    Condition("forged; as shipped", every=256, poison="forged"),
)


class ExperimentPayload(NamedTuple):
    """One run of one condition."""

    condition: Condition
    method: str
    corruption: str
    seed: int

    @property
    def key(self) -> tuple[str, str, str, int]:
        return self.condition.name, self.method, self.corruption, self.seed


@dataclass
class Counts:
    """Of merges, over a run."""

    rounds: int = 0
    taken: int = 0
    returned: int = 0
    left_out: int = 0
    bytes: int = 0
    seconds: float = 0.0


def run(job: ExperimentPayload, arguments: argparse.Namespace) -> dict[str, Any]:
    """One condition: accuracies over all images so far, and over those of the replicas that are not poisoned."""
    torch.set_num_threads(1)
    condition = job.condition
    inputs, labels = read_stream(arguments, job.corruption, job.seed)
    replicas = make_replicas(condition, job.method, arguments.device)
    merger = Merger(source_of(replicas[0].stream.method), policy_of(condition, arguments))
    generator = torch.Generator().manual_seed(job.seed)
    counts, right, since = Counts(), [], 0
    began = time.perf_counter()
    for batches, truths in zip(inputs, labels, strict=True):
        for r, (batch, truth) in enumerate(zip(batches, truths, strict=True)):
            poisoned = condition.poison is not None and r == REPLICAS - 1
            given = 3 * torch.randn(batch.shape, generator=generator).to(batch) if poisoned else batch
            logits = replicas[r % len(replicas)](given).logits
            right.append((logits.argmax(1) == truth).sum())
        since += REPLICAS * BATCH
        if condition.every and since >= merger.policy.interval(counts.rounds):
            since, counts.rounds = 0, counts.rounds + 1
            meet(replicas, merger, condition, counts)
    seconds = time.perf_counter() - began
    for replica in replicas:
        replica.stream.close()
    hits = torch.stack(right).cpu().double().view(-1, REPLICAS)
    return summary(job, hits) | {"merges": vars(counts), "seconds": seconds, "update_bytes": merger.bases[0].bytes}


def meet(replicas: Sequence[Replica], merger: Merger, condition: Condition, counts: Counts) -> None:
    """One round: everyone updates, what is merged is taken or returned."""
    began = time.perf_counter()
    updates = {replica.name: replica.make_update() for replica in replicas}
    if condition.poison == "forged":
        updates[replicas[-1].name] = forge(updates[replicas[-1].name], updates[replicas[0].name])
    counts.bytes += sum(update.bytes for update in updates.values())
    for merge in merger.merge(list(updates.values())):
        counts.left_out += len(merge.left_out)
        counts.bytes += merge.state.bytes * len(merge.members)
        for replica in replicas:
            if replica.name in merge.members:
                taken = replica.adopt(merge, updates[replica.name]).action == "take"
                counts.taken, counts.returned = counts.taken + taken, counts.returned + (not taken)
    counts.seconds += time.perf_counter() - began


def forge(own: ReplicaUpdate, other: ReplicaUpdate) -> ReplicaUpdate:
    """The update of a replica that lies: garbage with the signature of another, and more evidence than anyone's."""
    return replace(own, images=1000 * max(1, own.images), signature=other.signature)


def policy_of(condition: Condition, arguments: argparse.Namespace) -> AveragingConfig:
    policy = AveragingConfig(every=condition.every or 1)
    power = {} if arguments.power is None else {"power": arguments.power}
    return policy.changed(**(condition.changes | power))


def make_replicas(condition: Condition, method: str, device: str) -> list[Replica]:
    """Over methods that are used again, so that their passes are recorded once."""
    replicas = []
    for i, each in enumerate(make_methods(method, device)[: condition.replicas]):
        each.reset()
        honest = condition.poison is None or i < REPLICAS - 1
        stream = tt.Stream(each, guard=tt.Guard() if condition.guarded and honest else None)
        replicas.append(Replica(stream, f"replica {i}", replicas=condition.replicas if condition.every else 1))
    return replicas


@functools.cache
def make_methods(method: str, device: str) -> list[Method]:
    first = tt.create_method(method, Checkpoint.open(CHECKPOINT).load().to(device))
    return [first, *(first.fork() for _ in range(REPLICAS - 1))]


def read_stream(arguments: argparse.Namespace, corruption: str, seed: int) -> tuple[Tensor, Tensor]:
    """Images (steps, replicas, batch, c, h, w) as the network wants them, and labels, in an order of the seed's."""
    images, labels = _read(arguments.data, corruption)
    count = min(arguments.count, len(images)) // (REPLICAS * BATCH) * (REPLICAS * BATCH)
    order = np.random.default_rng(seed).permutation(len(images))[:count]
    chosen = np.ascontiguousarray(images[order])
    if arguments.data is None:
        chosen = tt.corrupt(chosen, corruption, severity=5, seed=seed)
    preprocessing: Any = Checkpoint.open(CHECKPOINT).load().preprocessing
    inputs = preprocessing(chosen).to(arguments.device)
    truth = torch.as_tensor(labels[order]).to(arguments.device)
    return inputs.view(-1, REPLICAS, BATCH, *inputs.shape[1:]), truth.view(-1, REPLICAS, BATCH)


def _read(data: str | None, corruption: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    if data is None:
        images, labels = load_sample()
        return images, np.asarray(labels)
    images, labels = np.load(Path(data) / f"{corruption}.npy", mmap_mode="r"), np.load(Path(data) / "labels.npy")
    last = min(10_000, len(images))  # of five severities, the last
    return images[-last:], labels[-last:]


def summary(job: ExperimentPayload, hits: Tensor) -> dict[str, Any]:
    """From the right predictions (steps, replicas) of every batch."""
    steps = len(hits)
    ends = [(i + 1) * steps // POINTS for i in range(POINTS)]
    starts = [0, *ends[:-1]]
    so_far = [float(hits[:end].mean()) / BATCH for end in ends]
    of_seven = hits[:, : REPLICAS - 1]
    return {
        "condition": job.condition.name,
        "method": job.method,
        "corruption": job.corruption,
        "seed": job.seed,
        "images": steps * REPLICAS * BATCH,
        "accuracy": so_far[-1],
        "accuracy_of_seven": float(of_seven.mean()) / BATCH,
        "curve": so_far,
        "curve_of_seven": [float(of_seven[:end].mean()) / BATCH for end in ends],
        "pieces": [float(hits[a:b].mean()) / BATCH for a, b in zip(starts, ends, strict=True)],
    }


# All runs


def measure(arguments: argparse.Namespace) -> None:
    """Every run that the record does not hold, the most telling ones first; the record is written after each."""
    path = Path(arguments.out)
    rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["runs"] if path.exists() else []
    known = {(row["condition"], row["method"], row["corruption"], row["seed"]) for row in rows}
    jobs = [job for job in all_jobs(arguments) if job.key not in known]
    deadline = time.monotonic() + arguments.seconds
    context = multiprocessing.get_context("spawn")
    about = facts_of(arguments)
    with context.Pool(arguments.processes) as pool:
        work = functools.partial(run_in_time, arguments=arguments, deadline=deadline)
        for row in pool.imap_unordered(work, jobs, chunksize=1):
            if row is None:
                continue
            rows.append(row)
            shown = {
                k: row[k]
                for k in ("condition", "method", "corruption", "seed", "accuracy", "accuracy_of_seven", "seconds")
            }
            print(json.dumps(shown | {"merges": row["merges"]}), flush=True)
            with replacing(path) as temporary:
                temporary.write_text(json.dumps({"about": about, "runs": rows}) + "\n", encoding="utf-8")


def run_in_time(job: ExperimentPayload, *, arguments: argparse.Namespace, deadline: float) -> dict[str, Any] | None:
    """None where it is too late; monotonic clocks of one machine agree."""
    return run(job, arguments) if time.monotonic() < deadline else None


def all_jobs(arguments: argparse.Namespace) -> Iterator[ExperimentPayload]:
    chosen = [c for c in CONDITIONS if arguments.conditions is None or c.name in arguments.conditions.split(",")]
    for method in arguments.methods.split(","):
        for seed in range(arguments.seeds):
            for condition in chosen:
                for corruption in arguments.corruptions.split(","):
                    yield ExperimentPayload(condition, method, corruption, seed)


def facts_of(arguments: argparse.Namespace) -> dict[str, Any]:
    provenance = collect_provenance(device=torch.device(arguments.device), dtype="float32", config="{}")
    about = {name: getattr(provenance, name) for name in ("trust_tta", "torch", "python", "platform", "commit")}
    gpu = torch.cuda.get_device_name() if arguments.device.startswith("cuda") else None
    policy = policy_of(Condition(""), arguments).model_dump()
    return about | {"device": gpu or "cpu", "replicas": REPLICAS, "batch": BATCH, "policy": policy}


# The page


def join(files: Sequence[str], out: Path) -> None:
    records = [json.loads(Path(name).read_text(encoding="utf-8")) for name in files]
    runs = [run for record in records for run in record["runs"]]
    with replacing(out) as temporary:
        temporary.write_text(json.dumps({"about": records[0]["about"], "runs": runs}) + "\n", encoding="utf-8")


def render(arguments: argparse.Namespace) -> None:
    """Fill the tables of docs/guides/distributed.md and draw docs/assets/replicas.svg."""
    record = json.loads(Path(arguments.out).read_text(encoding="utf-8"))
    page, kills = DOCS / "guides" / "distributed.md", DOCS / "results" / "cluster_kills.json"
    tables = {"averaging": averaging_table(record["runs"]), "poisoned": poisoned_table(record["runs"])}
    tables["chart"] = "![Accuracy against images seen, by how often the replicas average](../assets/replicas.svg)"
    workers = DOCS / "results" / "cluster_speed.json"
    tables["workers"] = workers_table(json.loads(workers.read_text(encoding="utf-8"))) if workers.exists() else ""
    tables["kills"] = kills_table(json.loads(kills.read_text(encoding="utf-8"))) if kills.exists() else ""
    pattern = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
    text = pattern.sub(lambda m: f"{m[1]}\n{tables[m[2]]}\n\n{m[3]}", page.read_text(encoding="utf-8"))
    with replacing(page) as temporary:
        temporary.write_text(text, encoding="utf-8")
    draw(record["runs"], DOCS / "assets" / "replicas.svg")


def workers_table(record: dict[str, Any]) -> str:
    """Of what `benchmarks.cluster_speed` found."""
    found = record["found"]
    first = found[0]
    rows = [
        [str(each["workers"])]
        + [text for way in ("ray", "processes") for text in (f"{each[way]:.0f}", f"{first[way] / each[way]:.2f}")]
        for each in found
    ]
    return as_table(["workers", "seconds on Ray", "speed-up", "seconds with processes", "speed-up"], rows)


def kills_table(record: dict[str, Any]) -> str:
    """Of what `benchmarks.cluster_kills` found."""
    words = {"cells": "cells", "done": "done at the end", "failed": "failed", "left": "left"}
    rows = [[f"kills of a {kind}", str(count)] for kind, count in record["killed"].items()]
    rows += [[text, str(record[name])] for name, text in words.items()]
    rows.append(["the same as undisturbed", "yes" if record["same_as_undisturbed"] else "NO"])
    return as_table(["", ""], [*rows, ["seconds", f"{record['seconds']:.0f}"]])


def paired(runs: Sequence[dict[str, Any]], method: str, conditions: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """The runs of each condition over those corruptions and seeds that every one of them has."""
    own = {c: [r for r in runs if (r["method"], r["condition"]) == (method, c)] for c in conditions}
    found = {c: {(r["corruption"], r["seed"]): r for r in rows} for c, rows in own.items() if rows}
    shared = sorted(set.intersection(*(set(rows) for rows in found.values()))) if found else []
    return {c: [rows[key] for key in shared] for c, rows in found.items()}


def averaging_table(runs: Sequence[dict[str, Any]]) -> str:
    names = [c.name for c in CONDITIONS if c.poison is None]
    head = [
        "method",
        "replicas",
        "accuracy in %",
        "against one that sees all",
        "time spent on merging",
        "MB per replica",
    ]
    rows = []
    for method in dict.fromkeys(run["method"] for run in runs):
        chosen = paired(runs, method, names)
        one = chosen.get("one sees all", [])
        for name, own in chosen.items() if one else ():
            moved = mean(r["merges"]["bytes"] for r in own) / REPLICAS / 1e6
            gap = gap_of(own, one, "accuracy") if name != "one sees all" else "–"
            merging = sum(r["merges"]["seconds"] for r in own) / sum(r["seconds"] for r in own)
            row = [f"`{method}`", name, f"{100 * mean(r['accuracy'] for r in own):.2f}", gap]
            rows.append([*row, f"{merging:.0%}" if moved else "–", f"{moved:.0f}" if moved else "–"])
    return as_table(head, rows)


def poisoned_table(runs: Sequence[dict[str, Any]]) -> str:
    names = ["every 256", *(c.name for c in CONDITIONS if c.poison is not None)]
    head = ["method", "replicas", "accuracy of the seven in %", "against nobody poisoned"]
    head += ["merges taken", "returned", "updates left out"]
    rows = []
    for method in dict.fromkeys(run["method"] for run in runs):
        chosen = paired(runs, method, names)
        for name, own in chosen.items() if len(chosen) > 1 and chosen.get("every 256") else ():
            gap = gap_of(own, chosen["every 256"], "accuracy_of_seven") if name != "every 256" else "–"
            row = [f"`{method}`", name, f"{100 * mean(r['accuracy_of_seven'] for r in own):.2f}", gap]
            rows.append(row + [f"{mean(r['merges'][k] for r in own):.0f}" for k in ("taken", "returned", "left_out")])
    return as_table(head, rows)


def gap_of(own: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]], what: str) -> str:
    """The mean difference in points over pairs, with the standard error of that mean."""
    gaps = [100 * (a[what] - b[what]) for a, b in zip(own, other, strict=True)]
    error = f" ± {np.std(gaps, ddof=1) / len(gaps) ** 0.5:.2f}" if len(gaps) > 1 else ""
    return f"{mean(gaps):+.2f}{error}"


def as_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def draw(runs: Sequence[dict[str, Any]], path: Path) -> None:
    """Accuracy over all images so far, by how often the replicas average, and with one poisoned replica."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    clean = [c.name for c in CONDITIONS if c.poison is None]
    poisoned = ["every 256", *(c.name for c in CONDITIONS if c.poison is not None)]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8.4, 3.2), layout="constrained")
        left, right = figure.subplots(1, 2)
        for axes, names, what in ((left, clean, "curve"), (right, poisoned, "curve_of_seven")):
            for i, (name, own) in enumerate(paired(runs, "tide", names).items()):
                if not all(what in r for r in own):
                    continue
                curve = 100 * np.mean([r[what] for r in own], axis=0)
                images = np.linspace(0, own[0]["images"], POINTS + 1)[1:]
                style = {
                    "color": COLORS[i],
                    "linestyle": "--" if i == 0 else "-",
                    "marker": MARKERS[i],
                    "markersize": 4,
                }
                axes.plot(images[1:], curve[1:], label=name, **style)
            axes.set_xlabel("images seen by all replicas")
            axes.legend()
        left.set_ylabel("accuracy so far in %")
        right.set_title("one of eight is fed noise: the other seven", fontsize=9)
        left.set_title("eight replicas, an eighth each", fontsize=9)
        with replacing(path) as temporary:
            figure.savefig(temporary, format="svg", metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="folder of CORRUPTION.npy (n, h, w, 3) and labels.npy; default: shipped images")
    parser.add_argument("--count", type=int, default=4096, help="images of a stream")
    parser.add_argument("--corruptions", default="gaussian_noise,glass_blur,jpeg_compression")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--methods", default="tide,tent")
    parser.add_argument("--conditions", help=f"some of: {', '.join(c.name for c in CONDITIONS)}")
    parser.add_argument("--power", type=float)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1e9, help="after which no run is begun")
    parser.add_argument("--out", required=True, metavar="FILE")
    parser.add_argument("--join", metavar="FILES", help="make FILE of the runs of these, with --render")
    parser.add_argument("--render", action="store_true", help="write the tables and charts of the guide from FILE")
    arguments = parser.parse_args()
    if arguments.join:
        join(arguments.join.split(","), Path(arguments.out))
    render(arguments) if arguments.render else measure(arguments)


if __name__ == "__main__":
    main()
