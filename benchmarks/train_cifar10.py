"""Train a small VMamba on CIFAR-10 within a given time, as the shipped network was trained.

Needs the package on the path (and triton on a GPU):
    PYTHONPATH=src python -m benchmarks.train_cifar10 --data data/cifar10 --out runs/nano --minutes 7
`--data` holds {train,test}_{images,labels}.npy, or the parts that pack_images.py wrote. Writes the files of
`trust-tta train`; run again, it continues after the last whole epoch.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.packing import unpack
from numpy.typing import NDArray

from trust_tta.atomic import replacing
from trust_tta.data.dataset import array_dataset
from trust_tta.data.specs import find_spec
from trust_tta.errors import TrustError
from trust_tta.models.factory import create_model
from trust_tta.schema import parse
from trust_tta.training import TrainingData, TrainRecipe, train
from trust_tta.training.loop import fit
from trust_tta.training.tasks import classification

RESERVE = 20.0  # seconds kept for the last evaluations and the files


class Lines:
    """Progress as one line per epoch."""

    def start(self, total: int | None, what: str) -> None:
        pass

    def advance(self, n: int = 1) -> None:
        pass

    def note(self, text: str) -> None:
        print(text, flush=True)

    def finish(self) -> None:
        pass


def main() -> None:
    begun = time.perf_counter()
    options = parse_arguments()
    data = read(options.data, options.limit)
    recipe = parse(TrainRecipe, {"precision": "bf16", **json.loads(options.recipe)}, where="--recipe")
    options.out.mkdir(parents=True, exist_ok=True)
    if options.minutes:
        left = 60 * options.minutes - RESERVE - (time.perf_counter() - begun)
        recipe = with_epochs(recipe, choose_epochs(options, data, recipe, left))
    trained = train(data, recipe, out=options.out, model=options.model, device=options.device, progress=Lines())
    for name, value in trained.record["accuracy"].items():
        print(f"{name}: {100 * value:.2f} %")
    print(f"{trained.record['seconds']:.0f} s")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder for model.safetensors, train.json and card.md")
    parser.add_argument("--minutes", type=float, help="end within so many minutes of the start; sets the epochs")
    parser.add_argument("--recipe", default="{}", help="fields of TrainRecipe as JSON, such as '{\"lr\": 0.002}'")
    parser.add_argument("--model", default="vmamba_nano")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--limit", type=int, help="use so many training and test images only")
    return parser.parse_args()


def read(folder: Path, limit: int | None) -> TrainingData:
    """Both parts of CIFAR-10, from .npy files or packed parts, the test part held out."""
    parts = [read_part(folder, name, limit) for name in ("train", "test")]
    images, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    spec = find_spec("cifar10")
    dataset = array_dataset(images, labels, spec.class_names, name=spec.name, domain="train")
    chosen, held_out = np.split(np.arange(len(dataset), dtype=np.int64), [len(parts[0][1])])
    return TrainingData(spec, dataset, chosen, held_out, "test")


def read_part(folder: Path, name: str, limit: int | None) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    if (folder / f"{name}.json").is_file():
        images, labels = unpack(folder, name)
    else:
        images, labels = np.load(folder / f"{name}_images.npy"), np.load(folder / f"{name}_labels.npy")
    return images[:limit], labels[:limit].astype(np.int64)


def choose_epochs(options: argparse.Namespace, data: TrainingData, recipe: TrainRecipe, left: float) -> int:
    """As many epochs as fit into the time left; a plan once made is kept."""
    plan = options.out / "plan.json"
    if plan.is_file():
        return int(json.loads(plan.read_text())["epochs"])
    seconds = measure_epoch(options, data, recipe)
    epochs = max(2, int(left / (1.08 * seconds + 0.5)))  # room for evaluations, saved states and slower spells
    print(f"{seconds:.2f} s per epoch without evaluation: {epochs} epochs in the {left:.0f} s left", flush=True)
    with replacing(plan) as temporary:
        temporary.write_text(json.dumps({"epochs": epochs}) + "\n")
    return epochs


def with_epochs(recipe: TrainRecipe, epochs: int) -> TrainRecipe:
    return recipe.changed(epochs=epochs, warmup_epochs=min(recipe.warmup_epochs, epochs / 4))


def measure_epoch(options: argparse.Namespace, data: TrainingData, recipe: TrainRecipe, *, steps: int = 20) -> float:
    """Seconds of an epoch, from the second of two short ones; the first fills caches."""
    total = len(data.chosen)
    size = min(recipe.batch_size, total)
    few = data.chosen[: steps * size]
    images: NDArray[Any] = np.stack([data.dataset.image(int(i)) for i in few])
    harmless = recipe.changed(epochs=2, warmup_epochs=0.0, plain_share=0.0, lr=1e-6)
    model = create_model(options.model, num_classes=10).to(options.device)
    result = fit(model, images, data.dataset.labels[few], harmless, task=classification(10))
    return result.history[1].seconds * (total // size) / (len(few) // size)


if __name__ == "__main__":
    try:
        main()
    except TrustError as error:
        sys.exit(f"error: {error}")
