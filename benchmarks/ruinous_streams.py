"""Streams that ruin methods, then clean images: with and without the guard, on the network and images that ship.

    python benchmarks/ruinous_streams.py OUT [--methods tent,shot] [--streams noise,mixed] [--batches 2000] ...

Writes OUT.json and OUT.md, after each run anew. "after": accuracy of what is served for clean images once the stream
is over; "stream": accuracy on the stream itself, for those that have labels; "source": of the network that did not
adapt, with the method's statistics. "cost": time of the guard over that of the method alone, on benign streams.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import trust_tta as tt
from trust_tta.atomic import replacing
from trust_tta.data.embedded import load_sample
from trust_tta.live.alarms import Reference, calibrate
from trust_tta.methods.base import Method

Images = NDArray[np.uint8]

RUINOUS = ("noise", "constant", "one class", "flips", "nan", "mixed")
BENIGN = ("clean", "gaussian_noise", "fog")
REFERENCE_IMAGES, CLEAN_IMAGES = 512, 512
NETWORK = {"name": "vmamba_nano", "checkpoint": "vmamba_nano_cifar10"}


@dataclass
class Run:
    """One method on one stream."""

    method: str
    stream: str
    guard: str
    batches: int
    source: float
    after: float
    stream_accuracy: float | None
    seconds: float
    events: dict[str, int] = field(default_factory=dict)


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
        if name not in self.corrupted:
            self.corrupted[name] = tt.corrupt(self.images, name, severity=5, seed=0)
        return self.corrupted[name]

    def batch(self, stream: str, i: int, size: int) -> tuple[Images, NDArray[np.int64] | None]:
        """The i-th batch of a stream; labels where its images have them."""
        chance = np.random.default_rng([i, 17])
        if stream == "noise":
            return chance.integers(0, 256, (size, 32, 32, 3), dtype=np.uint8), None
        if stream == "constant":
            colours = chance.integers(0, 256, (size, 1, 1, 3), dtype=np.uint8)
            return np.broadcast_to(colours, (size, 32, 32, 3)).copy(), None
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--methods", default=",".join(m for m in tt.list_methods() if m not in ("source", "foa")))
    parser.add_argument("--streams", default=",".join((*RUINOUS, *BENIGN)))
    parser.add_argument("--guards", default="none,uncalibrated,calibrated")
    parser.add_argument("--batches", type=int, default=2000)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, help="of methods that have one; their own by default")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    material, runs = gather_material(), list[Run]()
    for name in arguments.methods.split(","):
        reference = calibrate(
            make(name, arguments), [as_input(b, arguments) for b in split(material.reference, arguments.batch_size)]
        )
        source = serve(make(name, arguments).evaluate, material, arguments)
        for stream in arguments.streams.split(","):
            for guard in arguments.guards.split(","):
                runs.append(run(name, stream, guard, reference, material, arguments, source=source))
                print(row(runs[-1]), flush=True)
                write(arguments.out, runs, vars(arguments))


def gather_material() -> Material:
    images, labels = load_sample()
    order = np.random.default_rng(0).permutation(len(images))
    images, labels = images[order], labels[order]
    a, b = REFERENCE_IMAGES, REFERENCE_IMAGES + CLEAN_IMAGES
    return Material(images[b:], labels[b:], images[a:b], labels[a:b], images[:a])


def make(name: str, arguments: argparse.Namespace) -> Method:
    model = tt.create_model(NETWORK["name"], checkpoint=NETWORK["checkpoint"]).to(arguments.device)
    options: dict[str, Any] = {}
    method = tt.create_method(name, model)
    if arguments.lr is not None and hasattr(method.options, "lr"):
        options["lr"] = arguments.lr
    return tt.create_method(name, model, **options)


def run(
    name: str,
    stream: str,
    guard: str,
    reference: Reference,
    material: Material,
    arguments: argparse.Namespace,
    *,
    source: float,
) -> Run:
    live = tt.Stream(
        make(name, arguments),
        guard=None if guard == "none" else tt.Guard(),
        reference=reference if guard == "calibrated" else None,
    )
    events: Counter[str] = Counter()
    right = seen = 0
    seconds = 0.0
    for i in range(arguments.batches):
        images, labels = material.batch(stream, i, arguments.batch_size)
        inputs = as_input(images, arguments)
        if stream == "nan":
            inputs[i % 2 :: 2] = float("nan")
        start = now(arguments)
        result = live(inputs)
        seconds += now(arguments) - start
        events.update(f"{e.kind}: {e.action}" for e in result.events)
        if labels is not None and stream != "nan":
            right += int((result.logits.argmax(1).cpu().numpy() == labels).sum())
            seen += len(labels)
    after = serve(lambda images: live(images).logits, material, arguments)
    live.close()
    share = 100 * right / seen if seen else None
    return Run(name, stream, guard, arguments.batches, source, after, share, seconds, dict(events))


def serve(predict: Any, material: Material, arguments: argparse.Namespace) -> float:
    """Accuracy on the clean images, in per cent."""
    right = 0
    for images, labels in zip(
        split(material.clean, arguments.batch_size), split(material.clean_labels, arguments.batch_size), strict=True
    ):
        right += int((predict(as_input(images, arguments)).argmax(1).cpu().numpy() == labels).sum())
    return 100 * right / len(material.clean)


def split(values: NDArray[Any], size: int) -> list[NDArray[Any]]:
    return [values[i : i + size] for i in range(0, len(values), size)]


def as_input(images: Images, arguments: argparse.Namespace) -> Tensor:
    mean, std = torch.tensor((0.4914, 0.4822, 0.4465)), torch.tensor((0.2470, 0.2435, 0.2616))
    floats = (torch.from_numpy(images).float() / 255 - mean) / std
    return floats.permute(0, 3, 1, 2).contiguous().to(arguments.device)


def now(arguments: argparse.Namespace) -> float:
    """Seconds that this thread worked, so that other programs do not count; on a GPU, seconds."""
    if arguments.device == "cpu":
        return time.thread_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def write(out: Path, runs: list[Run], arguments: dict[str, Any]) -> None:
    content = {"arguments": {k: str(v) for k, v in arguments.items() if k != "out"}, "runs": [asdict(r) for r in runs]}
    with replacing(out.with_suffix(".json")) as file:
        file.write_text(json.dumps(content, indent=1) + "\n")
    lines = [
        "| method | stream | guard | source | after | stream | cost | events |",
        "|---|---|---|---|---|---|---|---|",
    ]
    alone = {(r.method, r.stream): r.seconds for r in runs if r.guard == "none"}
    for r in runs:
        bare = alone.get((r.method, r.stream))
        cost = r.seconds / bare - 1 if bare and r.stream in BENIGN and r.guard != "none" else None
        lines.append(row(r, cost))
    with replacing(out.with_suffix(".md")) as file:
        file.write_text("\n".join(lines) + "\n")


def row(r: Run, cost: float | None = None) -> str:
    events = ", ".join(f"{kind} x{count}" for kind, count in r.events.items())
    share = "" if r.stream_accuracy is None else f"{r.stream_accuracy:.1f}"
    spent = "" if cost is None else f"{100 * cost:+.1f} %"
    return f"| {r.method} | {r.stream} | {r.guard} | {r.source:.1f} | {r.after:.1f} | {share} | {spent} | {events} |"


if __name__ == "__main__":
    main()
