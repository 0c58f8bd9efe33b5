"""Eight replicas that each see an eighth of a stream, with and without averaging, against one that sees everything.

    PYTHONPATH=src python -m benchmarks.fleet --out docs/results/fleet.json

The network and the images are the shipped ones unless --images and --labels name others (uint8 .npy (n, h, w, 3), and
integers). The replicas are simulated in this process, in lockstep. Conditions are added to those that FILE holds.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import trust_tta as tt
from trust_tta.bench.environment import collect_facts
from trust_tta.data.embedded import load_sample
from trust_tta.fleet.averaging import Averaging, Merger, Offer
from trust_tta.fleet.replicas import Replica, source_of
from trust_tta.models.checkpoint import Checkpoint

REPLICAS = 8
BATCH = 8
POINTS = 16  # of a curve


class Images:
    """The stream: images as the network wants them, with labels, in an order of its own."""

    def __init__(self, arguments: argparse.Namespace, preprocessing: Any) -> None:
        images, labels = _read(arguments)
        order = np.random.default_rng(arguments.seed).permutation(len(images))[: arguments.count]
        corrupted = tt.corrupt(
            np.ascontiguousarray(images[order]), arguments.corruption, severity=5, seed=arguments.seed
        )
        self.inputs: Tensor = preprocessing(corrupted)
        self.labels = torch.as_tensor(labels[order])

    def __len__(self) -> int:
        return len(self.inputs) // (REPLICAS * BATCH) * (REPLICAS * BATCH)

    def batch(self, step: int, replica: int) -> tuple[Tensor, Tensor]:
        start = (step * REPLICAS + replica) * BATCH
        return self.inputs[start : start + BATCH], self.labels[start : start + BATCH]


def _read(arguments: argparse.Namespace) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    if arguments.images:
        return np.load(arguments.images), np.load(arguments.labels)
    images, labels = load_sample()
    return images, np.asarray(labels)


def make_replicas(checkpoint: Checkpoint, method: str, count: int, *, unguarded: int | None = None) -> list[Replica]:
    first = tt.create_method(method, checkpoint.load())
    methods = [first, *(first.fork() for _ in range(count - 1))]
    guards = [None if i == unguarded else tt.Guard() for i in range(count)]
    streams = [tt.Stream(each, guard=guard) for each, guard in zip(methods, guards, strict=True)]
    return [Replica(stream, f"replica {i}") for i, stream in enumerate(streams)]


def run(images: Images, checkpoint: Checkpoint, arguments: argparse.Namespace, *, condition: str) -> dict[str, Any]:
    """One condition: accuracies over all images so far, and over those of the replicas that are not poisoned."""
    every = int(condition.split()[-1]) if condition[-1].isdigit() else None
    poisoned = REPLICAS - 1 if condition.startswith(("noise", "forged")) else None
    alone = condition == "one sees all"
    replicas = make_replicas(checkpoint, arguments.method, 1 if alone else REPLICAS, unguarded=poisoned)
    policy = Averaging(every=every or 1, power=arguments.power)
    merger = Merger(source_of(replicas[0].stream.method), policy)
    right = torch.zeros(len(images) // (REPLICAS * BATCH), REPLICAS)
    generator = torch.Generator().manual_seed(0)
    merges = refused = left_out = sent = 0
    began = time.perf_counter()
    for step in range(len(right)):
        for r in range(REPLICAS):
            inputs, labels = images.batch(step, r)
            if r == poisoned:
                inputs = torch.randn(inputs.shape, generator=generator) * 3
            logits = replicas[0 if alone else r](inputs).logits
            right[step, r] = (logits.argmax(1) == labels).float().mean()
        if every and (step + 1) * REPLICAS * BATCH % every == 0:
            offers = {replica.name: replica.offer() for replica in replicas}
            if condition.startswith("forged") and poisoned is not None:
                offers[replicas[-1].name] = _forge(offers[replicas[-1].name], offers[replicas[0].name])
            sent += sum(offer.bytes for offer in offers.values())
            for merge in merger.merge(list(offers.values())):
                left_out += len(merge.left_out)
                sent += merge.state.bytes * len(merge.members)
                for replica in replicas:
                    if replica.name in merge.members:
                        merges += 1
                        refused += replica.take(merge, offers[replica.name]).action == "return"
    healthy = right[:, : REPLICAS - 1]
    curve = [float(right[: (i + 1) * len(right) // POINTS].mean()) for i in range(POINTS)]
    return {
        "condition": condition,
        "accuracy": float(right.mean()),
        "accuracy_second_half": float(right[len(right) // 2 :].mean()),
        "accuracy_of_seven": float(healthy.mean()),
        "curve": curve,
        "curve_of_seven": [float(healthy[: (i + 1) * len(right) // POINTS].mean()) for i in range(POINTS)],
        "merges_taken": merges - refused,
        "merges_returned": refused,
        "offers_left_out": left_out,
        "bytes": sent,
        "bytes_per_offer": merger.bases[0].bytes if every else 0,
        "seconds": time.perf_counter() - began,
    }


def _forge(own: Offer, other: Offer) -> Offer:
    """The offer of a replica that lies: garbage with the signature of another, and more evidence than anyone's."""
    return Offer(own.replica, own.base, 1000 * max(1, own.images), own.state, other.signature)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images")
    parser.add_argument("--labels")
    parser.add_argument("--count", type=int, default=4096)
    parser.add_argument("--corruption", default="gaussian_noise")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--method", default="tide")
    parser.add_argument("--power", type=float, default=Averaging().power)
    parser.add_argument(
        "--conditions", default="one sees all,no averaging,every 64,every 256,every 1024,noise 256,forged 256"
    )
    parser.add_argument("--out", required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    checkpoint = Checkpoint.open("vmamba_nano_cifar10")
    images = Images(arguments, checkpoint.load().preprocessing)
    facts = collect_facts(device=torch.device("cpu"), dtype="float32", config="{}")
    about = {name: getattr(facts, name) for name in ("trust_tta", "torch", "python", "platform", "threads", "commit")}
    about |= {"replicas": REPLICAS, "batch": BATCH, "images": len(images), "corruption": arguments.corruption}
    about |= {"method": arguments.method, "power": arguments.power, "seed": arguments.seed}
    path = Path(arguments.out)
    rows = {row["condition"]: row for row in json.loads(path.read_text())["conditions"]} if path.exists() else {}
    for condition in arguments.conditions.split(","):
        rows[condition] = run(images, checkpoint, arguments, condition=condition)
        shown = {k: v for k, v in rows[condition].items() if not k.startswith("curve")}
        print(json.dumps(shown), flush=True)
        record = {"about": about, "conditions": list(rows.values())}
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
