"""The guard in worlds x streams x methods: accuracy with and without it, alarms, delay, cost, evidence against truth.

    python -m benchmarks.guard run --networks FOLDER [--data FOLDER] [--images 512] [--worlds W] [--streams S]
        [--methods M]                        resumable; results in docs/results/guard.json
    python -m benchmarks.guard page          writes docs/results/guard.md and guard_evidence.svg from them

Images are the 2,000 of CIFAR-10's test set in the package, in batches of 64, corrupted with severity 5. Below the
folder of --networks: `vmamba_nano_ln_cifar10.safetensors` and `resnet56_cifar10.th`; below that of --data, for the
stream of other images, `cifar100/test_images.npy`. A stream whose images, or a world whose network is missing is left
out.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.pages import RESULTS, table
from benchmarks.world_networks import resnet56
from numpy.typing import NDArray
from torch import Tensor, nn

import trust_tta as tt
from trust_tta.atomic import write_whole
from trust_tta.data import load_sample
from trust_tta.live.comparison import (
    BLOCK,
    MAX_EQUAL,
    MIN_PAIRS,
    TEST_SCALE,
    TEST_TOLERANCE,
    equal_pairs,
    spread_difference,
)
from trust_tta.live.sequential_test import HarmTest

RECORD, PAGE, FIGURE = (RESULTS / name for name in ("guard.json", "guard.md", "guard_evidence.svg"))
BATCH = 64
WINDOW = 4  # batches over which evidence and true difference are compared
METHODS = ("tide", "trust", "trust_naive", "tent", "shot", "roid")
WORLDS = {
    "layernorm_nano": "VMamba nano, LayerNorm",
    "shipped_nano": "VMamba nano, BatchNorm (shipped)",
    "resnet56": "ResNet-56",
}
# Stretches of a stream: a corruption, and how its images come. The guard's constants were chosen on speckle_noise,
# gaussian_blur, spatter and saturate.
STREAMS = {
    "row": ("gaussian_noise", "fog", "contrast", "pixelate", "clean"),
    "runs of labels": ("fog:runs", "pixelate:runs", "clean"),
    "long runs": ("fog:all runs", "clean"),
    "noise images": (":noise", "clean"),
    "one class": ("clean:one class", "clean"),
    "blank images": (":blank", "clean"),
    "20 % black": ("clean:black", "clean"),
    "CIFAR-100 images": (":cifar100", "clean"),
    "confident images": ("clean:confident", "clean"),
}
EVIDENCE = (
    "equal pairs",
    "class entropy",
    "soft class entropy",
    "mutual information",
    "confidence",
    "entropy",
    "disagreement",
)


def make_network(world: str, networks: Path) -> nn.Module:
    if world == "resnet56":
        return resnet56(file=str(networks / "resnet56_cifar10.th"))
    if world == "layernorm_nano":
        checkpoint = str(networks / "vmamba_nano_ln_cifar10.safetensors")
        return tt.create_model("vmamba_nano", checkpoint=checkpoint, norm="layer")
    return tt.create_model("vmamba_nano", checkpoint="vmamba_nano_cifar10")


@cache
def corrupted(name: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    images, labels = load_sample()
    return (images if name in ("", "clean") else tt.corrupt(images, name, severity=5, seed=0)), labels


def stretch(spec: str, count: int, seed: int, network: nn.Module, data: Path) -> tuple[Tensor, NDArray[np.int64]]:
    """Network input (count, 3, 32, 32) and labels; -1 where there are none."""
    name, _, mode = spec.partition(":")
    rng = np.random.default_rng(seed)
    images, labels = corrupted(name)
    order = rng.permutation(len(images))
    if mode == "one class":
        order = np.resize(order[labels[order] == 3], count)
    if mode != "all runs":
        order = order[:count]
    if mode.endswith("runs"):
        order = order[np.argsort(rng.permutation(10)[labels[order]], kind="stable")]
    pixels, labels = images[order].copy(), labels[order].astype(np.int64)
    count = len(order)
    if mode == "noise":
        pixels = rng.integers(0, 256, pixels.shape).astype(np.uint8)
    elif mode == "blank":
        pixels[:] = rng.integers(0, 256, (count, 1, 1, 3))
    elif mode == "black":
        pixels[rng.random(count) < 0.2] = 0
    elif mode == "cifar100":
        pixels = np.load(data / "cifar100" / "test_images.npy", mmap_mode="r")[:count].copy()
    if mode in ("noise", "blank", "cifar100"):
        labels[:] = -1
    inputs: Tensor = network.preprocessing(pixels)  # type: ignore[operator]
    return (make_confident(network, inputs), labels) if mode == "confident" else (inputs, labels)


def make_confident(network: nn.Module, inputs: Tensor) -> Tensor:
    """Images changed by three signed gradient steps until the network is sure of a wrong class."""
    changed = []
    for batch in inputs.split(BATCH):
        wrong = (network(batch).argmax(1) + 1) % 10
        x = batch.clone()
        for _ in range(3):
            x.requires_grad_(True)
            (gradient,) = torch.autograd.grad(nn.functional.cross_entropy(network(x), wrong), x)
            x = (x - 0.03 * batch.std() * gradient.sign()).detach()
        changed.append(x)
    return torch.cat(changed)


def run_cell(world: str, stream: str, method: str, images: int, networks: Path, data: Path) -> dict[str, Any]:
    """One stream with and without the guard, beside the source; numbers of every batch."""
    network = make_network(world, networks)
    source = tt.create_method("source", network)
    alone, guarded = (
        tt.Stream(tt.create_method(method, make_network(world, networks)), guard=guard) for guard in (None, tt.Guard())
    )
    record: dict[str, Any] = {"world": world, "stream": stream, "method": method, "images": images, "batches": []}
    logits: list[tuple[NDArray[Any], NDArray[Any]]] = []
    seconds = np.zeros(2)
    for number, spec in enumerate(STREAMS[stream]):
        inputs, labels = stretch(spec, images, 100 + number, network, data)
        for batch, truth in zip(inputs.split(BATCH), np.split(labels, range(BATCH, len(labels), BATCH)), strict=True):
            known, times = source(batch), [time.process_time()]
            results = []
            for each in (alone, guarded):
                results.append(each(batch))
                times.append(time.process_time())
            seconds += np.diff(times)
            right = [int((out.argmax(1).numpy() == truth).sum()) for out in (known, *(r.logits for r in results))]
            reading = results[1].reading
            record["batches"].append(
                {
                    "stretch": number,
                    "size": len(truth),
                    "labeled": bool(truth[0] >= 0),
                    "right": right,
                    "weight": 1.0 if reading is None else reading.weight,
                    "e_value": 1.0 if reading is None else reading.e_value,
                    "events": [f"{e.kind}:{e.action}" for e in results[1].events],
                }
            )
            own = results[0].logits.log() if alone.method.probabilities else results[0].logits
            logits.append((own.numpy(), known.numpy()))
    record["evidence"] = evidence_windows(logits, record["batches"])
    record["classes"] = [[a.argmax(1).tolist(), s.argmax(1).tolist()] for a, s in logits]
    record["cost"] = guarded.reading.cost if guarded.reading else 0.0
    record["seconds"] = seconds.tolist()
    return record


def evidence_windows(logits: list[tuple[Any, Any]], batches: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Kinds of evidence for harm by the unguarded method, and the true difference in points, of each window."""
    found = []
    for i in range(len(logits) - WINDOW + 1):
        part = batches[i : i + WINDOW]
        if part[0]["stretch"] != part[-1]["stretch"] or not part[0]["labeled"]:
            continue
        a, s = (np.concatenate([pair[k] for pair in logits[i : i + WINDOW]]) for k in (0, 1))
        pa, ps = (np.exp(z - np.logaddexp.reduce(z, 1, keepdims=True)) for z in (a, s))
        size = sum(b["size"] for b in part)
        difference = 100 * (sum(b["right"][1] for b in part) - sum(b["right"][0] for b in part)) / size
        soft = _entropy(ps.mean(0)) - _entropy(pa.mean(0))
        uncertain = float(np.mean([_entropy(p) for p in pa]) - np.mean([_entropy(p) for p in ps]))
        hard = [_entropy(np.bincount(z.argmax(1), minlength=z.shape[1]) / size) for z in (a, s)]
        values = (
            pair_evidence(a.argmax(1), s.argmax(1), a.shape[1]),
            hard[1] - hard[0],
            soft,
            soft + uncertain,
            float(ps.max(1).mean() - pa.max(1).mean()),
            uncertain,
            float((a.argmax(1) != s.argmax(1)).mean()),
        )
        found.append({"difference": difference, **dict(zip(EVIDENCE, map(float, values), strict=True))})
    return found


def pair_evidence(adapted: NDArray[Any], source: NDArray[Any], classes: int) -> float:
    """Log of how many pairs of images the adapted network predicts as one class, over the source's: the guard's."""
    counts = [np.bincount(each, minlength=classes) for each in (adapted, source)]
    pairs = [float((c * (c - 1)).sum()) / 2 + MIN_PAIRS for c in counts]
    return math.log(pairs[0] / pairs[1])


def _entropy(p: NDArray[Any]) -> float:
    p = p[p > 0]
    return -float(p @ np.log(p))


def run(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    cells = read_cells()
    done = {(c["world"], c["stream"], c["method"], c["images"]) for c in cells}
    for method in arguments.methods.split(","):
        for world in arguments.worlds.split(","):
            for stream in arguments.streams.split(","):
                key = world, stream, method, arguments.images
                if key in done or (world == "resnet56" and method.startswith("trust")):
                    continue
                try:
                    cells.append(run_cell(world, stream, method, arguments.images, arguments.networks, arguments.data))
                except (FileNotFoundError, tt.errors.TrustError) as error:
                    print(f"{world}, {stream}: left out ({error})", flush=True)
                    continue
                write_whole(RECORD, json.dumps(cells, separators=(",", ":")).encode())
                print(" | ".join(map(str, row_of(cells[-1]))), flush=True)


def read_cells() -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = json.loads(RECORD.read_text()) if RECORD.exists() else []
    return cells


# The page


def accuracy(batches: Iterable[dict[str, Any]], kind: int) -> float:
    labeled = [b for b in batches if b["labeled"]]
    right, size = (float(sum(values)) for values in ([b["right"][kind] for b in labeled], [b["size"] for b in labeled]))
    return 100 * right / max(1.0, size)


def split(cell: dict[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Batches of the whole stream, and the clean ones at its end."""
    last = max(b["stretch"] for b in cell["batches"])
    return cell["batches"], [b for b in cell["batches"] if b["stretch"] == last]


def delay_of(cell: dict[str, Any]) -> int | None:
    """Batches from where the method has fallen 10 points below the source to where the source has more weight."""
    batches = cell["batches"]
    for i in range(len(batches) - WINDOW + 1):
        part = batches[i : i + WINDOW]
        if part[0]["labeled"] and accuracy(part, 1) < accuracy(part, 0) - 10:
            return next((j - i for j in range(i, len(batches)) if batches[j]["weight"] < 0.5), len(batches) - i)
    return None


def row_of(cell: dict[str, Any]) -> list[str]:
    whole, clean = split(cell)
    numbers = [f"{accuracy(part, kind):.1f}" for part in (whole, clean) for kind in range(3)]
    alarms = sum(e.startswith("alarm") for b in whole for e in b["events"])
    delay = delay_of(cell)
    loss = accuracy(whole, 0) - accuracy(whole, 2)
    lost = accuracy(whole, 1) - accuracy(whole, 2) if accuracy(whole, 1) > accuracy(whole, 0) else 0.0
    miss = [
        *(["stream"] if loss > 0.5 else []),
        *(["clean"] if accuracy(clean, 0) - accuracy(clean, 2) > 0.5 else []),
        *(["gain"] if lost > 0.3 else []),
    ]
    return [
        *(cell["stream"], cell["method"], str(len(whole)), *numbers, str(alarms)),
        *("-" if delay is None else str(delay), f"{100 * cell['cost']:+.0f} %"),
        *(f"{100 * (cell['seconds'][1] / cell['seconds'][0] - 1):+.0f} %", ", ".join(miss)),
    ]


def area_under_curve(scores: NDArray[Any], harmful: NDArray[np.bool_]) -> float:
    """Probability that a harmful window has more evidence than one that is not."""
    high, low = scores[harmful][:, None], scores[~harmful][None]
    return float(((high > low) + 0.5 * (high == low)).mean()) if high.size and low.size else math.nan


def evidence_table(cells: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Head and rows."""
    rows = []
    cells = [c for c in cells if "runs" not in c["stream"]]
    for world in WORLDS:
        windows = [w for c in cells if c["world"] == world for w in c["evidence"] if abs(w["difference"]) >= 1]
        harmful = np.array([w["difference"] < 0 for w in windows], dtype=bool)
        if not windows:
            continue
        areas = [area_under_curve(np.array([w[kind] for w in windows]), harmful) for kind in EVIDENCE]
        rows.append([WORLDS[world], str(len(windows)), str(int(harmful.sum())), *(f"{a:.2f}" for a in areas)])
    return ["world", "windows", "harmful", *EVIDENCE], rows


def false_alarms(
    cells: list[dict[str, Any]], *, streams: int = 100, batches: int = 200
) -> tuple[list[str], list[list[str]]]:
    """Share of resampled harmless streams with an alarm at any time.

    "same": the source's predictions for two draws of images, of which neither is better. "recorded": predictions of
    both networks for the same images, from stretches where the method was at least as good as the source.
    """
    rng = np.random.default_rng(0)
    rows = []
    pools: dict[str, list[NDArray[Any]]] = {"same": [], "recorded": []}
    for cell in cells:
        for number in {b["stretch"] for b in cell["batches"] if b["labeled"]}:
            inside = [i for i, b in enumerate(cell["batches"]) if b["stretch"] == number]
            part = [cell["batches"][i] for i in inside]
            pairs = np.concatenate([np.array(cell["classes"][i]).T for i in inside])
            pools["same"].append(pairs[:, [1, 1]])
            if accuracy(part, 1) >= accuracy(part, 0):
                pools["recorded"].append(pairs)
    for kind, pool in pools.items():
        peaks = []
        for _ in range(streams if pool else 0):
            pairs, test = pool[rng.integers(len(pool))], HarmTest()
            few = False
            for _ in range(2 * batches):
                drawn = pairs[rng.integers(len(pairs), size=(BLOCK, 1 + (kind == "same"))), [0, 1]]
                tolerance = 0.0 if kind == "same" else TEST_TOLERANCE
                if not few:  # as in `Comparison.add`
                    test.add((spread_difference(drawn, 10) - tolerance) / TEST_SCALE)
                few = bool(equal_pairs(np.bincount(drawn[:, 1], minlength=10).astype(float)) > MAX_EQUAL)
            peaks.append(test.peak)
        shares = [f"{sum(p >= 1 / a for p in peaks)} of {len(peaks)}" for a in (0.1, 0.05, 0.01)]
        rows.append([kind, f"{batches} batches", *shares])
    return ["streams", "of", "alpha 0.1", "alpha 0.05", "alpha 0.01"], rows


def draw(cells: list[dict[str, Any]]) -> None:
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(WORLDS), figsize=(11, 3.6), sharey=True)
    for axis, (world, title) in zip(axes, WORLDS.items(), strict=True):
        own_cells = [c for c in cells if c["world"] == world and "runs" not in c["stream"]]
        windows = [(c["method"], w) for c in own_cells for w in c["evidence"]]
        for method in METHODS:
            own = [w for name, w in windows if name == method]
            axis.scatter([w[EVIDENCE[0]] for w in own], [w["difference"] for w in own], s=9, alpha=0.7, label=method)
        axis.axhline(0, color="gray", lw=0.7)
        axis.axvline(0, color="gray", lw=0.7)
        axis.set(title=title, xlabel="evidence for harm", xlim=(-1.2, 1.2))
    axes[0].set_ylabel("adapted - source (points)")
    axes[0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(FIGURE, metadata={"Date": None})


HEAD = """# What the guard does

<!-- generated by `python -m benchmarks.guard page`; do not edit -->

`tt.Stream(method, guard=tt.Guard(alpha=0.01))` compares the adapted network with the source, serves a mixture of both
weighted by label-free evidence, and undoes adaptation that a sequential test finds harmful
([In production](../guides/production.md)). Measured on a CPU, batches of 64, severity 5, one seed, with each method's
own options and no calibration. Streams are short, since a CPU is slow: the column "batches" says how long each was, and
one image of four clean batches is 0.4 points. The guard's constants were chosen on recordings of other corruptions
(`speckle_noise`, `gaussian_blur`, `spatter`, `saturate`) on the same networks. Five rules were changed after first
runs of these cells had failed: how changes are looked for (row, shipped), when classes are few (row, ResNet-56), the
evidence in runs of labels (tide, LayerNorm), how one class is recognized (one class, LayerNorm) and over how many
images (runs of labels, LayerNorm). `tide` and the streams of one class and of runs were measured with the present
rules, the other cells before the last two, which concern streams of one class.

Short stretches are hard on gains: where the source predicts few classes, it serves the first batch after each change.
The 256 images that the guard may predict before it skips updates are a tenth or more of the passes of so short a
stream. In runs, harm lasts until the classes have changed three times.
"""
COLUMNS = ["stream", "method", "batches", "source", "alone", "guarded", "source", "alone", "guarded", "alarms", "delay"]
LEGEND = """The first three accuracies are of all labeled images of the stream, the other three of the clean
images at its end. Delay: batches from where the method alone has fallen 10 points below the source
until the source has more weight in what the guard serves. Passes, time: what the guard adds to the
method alone, in forward and backward passes and in seconds of one core; less than zero where it
skips updates. Misses: "stream" or "clean", more than 0.5 points below the source; "gain", more
than 0.3 points of a gain lost.
"""


def page() -> None:
    cells = read_cells()
    parts = [HEAD, *summary(cells), ""]
    for world, title in WORLDS.items():
        rows = [row_of(c) for c in cells if c["world"] == world]
        if rows:
            rows.sort(key=lambda row: (list(STREAMS).index(row[0]), METHODS.index(row[1])))
            parts += [f"## {title}", "", table([*COLUMNS, "passes", "time", "misses"], rows), ""]
    parts += [LEGEND]
    parts += ["## Evidence against the true difference", "", "![evidence](guard_evidence.svg)", ""]
    parts += [EVIDENCE_TEXT, table(*evidence_table(cells)), ""]
    parts += ["## False alarms", "", FALSE_ALARM_TEXT, table(*false_alarms(cells)), ""]
    draw(cells)
    write_whole(PAGE, ("\n".join(parts).rstrip() + "\n").encode())


EVIDENCE_TEXT = """One dot is a window of 256 images of an unguarded stream: how much more often the adapted network
predicts the same class for two of its images than the source does (log of the ratio), against the
difference in accuracy. Below, the area under the curve with which each kind of evidence tells windows in which
adaptation loses a point or more from those in which it gains one. Runs of labels are left out: there
all of these mislead, and the guard compares blocks of images instead.
"""
FALSE_ALARM_TEXT = """Streams of 200 batches of 64, drawn with replacement from recorded predictions. "same": the source
against itself on other images, without the tolerance of 0.05 nats: the null hypothesis at its
boundary. "recorded": stretches in which the method alone was at least as good as the source. The
proof that alarms are at most alpha is in `trust_tta/live/sequential_test.py`; it holds for any
stream whose expected evidence is never above the tolerance.
"""


def summary(cells: list[dict[str, Any]]) -> list[str]:
    rows = [(accuracy(a, k), accuracy(b, k)) for k in range(3) for a, b in map(split, cells)]
    n = len(cells)
    source, alone, guarded = rows[:n], rows[n : 2 * n], rows[2 * n :]

    def near(kind: list[tuple[float, float]], part: int) -> str:
        losses = [s[part] - k[part] for s, k in zip(source, kind, strict=True)]
        return f"{sum(x <= 0.5 for x in losses)} of {n} (worst {max(0.0, *losses):.1f} below)"

    gains = [(a[0] - s[0], a[0] - g[0]) for s, a, g in zip(source, alone, guarded, strict=True) if a[0] - s[0] > 0.5]
    kept = sum(lost <= 0.3 for _, lost in gains)
    most = sum(lost <= 0.3 * gain for gain, lost in gains)
    return [
        f"| {n} cells | alone | guarded |",
        "| --- | --- | --- |",
        f"| whole stream within 0.5 points of the source, or above it | {near(alone, 0)} | {near(guarded, 0)} |",
        f"| clean images afterwards | {near(alone, 1)} | {near(guarded, 1)} |",
        f"| where the method gains: at most 0.3 points of it lost | | {kept} of {len(gains)} |",
        f"| where the method gains: at most 30 % of it lost | | {most} of {len(gains)} |",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    runs = commands.add_parser("run")
    runs.add_argument("--networks", type=Path, default=Path("networks"))
    runs.add_argument("--data", type=Path, default=Path("data"))
    runs.add_argument("--images", type=int, default=512, help="of each stretch")
    runs.add_argument("--worlds", default=",".join(WORLDS))
    runs.add_argument("--streams", default=",".join(STREAMS))
    runs.add_argument("--methods", default=",".join(METHODS))
    commands.add_parser("page")
    arguments = parser.parse_args()
    run(arguments) if arguments.command == "run" else page()


if __name__ == "__main__":
    main()
