"""Train a small VMamba on CIFAR-10 and write it as fp16 safetensors with the course of the training.

Needs torch, numpy, safetensors (and triton on a GPU) and the package on the path:
    PYTHONPATH=src python -m benchmarks.train_cifar10 --data data/cifar10 --out runs/nano --minutes 7
`--data` holds {train,test}_{images,labels}.npy, or the parts that pack_images.py wrote.
The averaged weights are exported, with running statistics taken anew on the training images: decided before any
test image is seen. Run again, it goes on from the last whole epoch.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch
from benchmarks.packing import unpack
from numpy.typing import NDArray

from trust_tta.atomic import replacing
from trust_tta.data.dataset import array_dataset
from trust_tta.data.files import hash_pixels
from trust_tta.data.specs import find_spec
from trust_tta.errors import TrustError
from trust_tta.models.checkpoint import Checkpoint
from trust_tta.models.factory import create_model
from trust_tta.models.vmamba import VMamba
from trust_tta.preprocessing import Preprocessing
from trust_tta.training.data import TrainingData
from trust_tta.training.evaluation import accuracy, recalibrate
from trust_tta.training.export import export_model
from trust_tta.training.loop import EpochRecord, TrainResult, train
from trust_tta.training.outputs import Origin
from trust_tta.training.recipe import TrainRecipe

Arrays = tuple[NDArray[np.uint8], NDArray[np.int64]]
RESERVE = 20.0  # seconds kept for the last evaluations and the files


def main() -> None:
    begun = time.perf_counter()
    options = parse()
    pictures, test = (read(options.data, name, options.limit) for name in ("train", "test"))
    print(
        f"{len(pictures[0])} training and {len(test[0])} test images after {time.perf_counter() - begun:.1f} s",
        flush=True,
    )
    recipe = TrainRecipe(precision=options.precision, seed=options.seed).override(json.loads(options.recipe))
    torch.manual_seed(recipe.seed)
    model = create_model(options.model, num_classes=10)
    model.set_scan_backend(options.backend)
    options.out.mkdir(parents=True, exist_ok=True)
    recipe = choose_epochs(options, model, pictures, recipe, begun)
    result = train(
        model,
        *pictures,
        recipe,
        device=options.device,
        checkpoint_path=options.checkpoint or options.out / "checkpoint.pt",
        evaluate=lambda network: score(network, test, recipe, options.device),
        progress=lambda record: show(record, recipe),
    )
    finish(options, model, result, pictures, test, recipe, time.perf_counter() - begun)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder for model.safetensors and train.json")
    parser.add_argument("--checkpoint", type=Path, help="file for the unfinished state (default: OUT/checkpoint.pt)")
    parser.add_argument("--epochs", type=int, help="default: the recipe's")
    parser.add_argument("--minutes", type=float, help="end within so many minutes of the start; sets the epochs")
    parser.add_argument("--recipe", default="{}", help="fields of TrainRecipe as JSON, such as '{\"lr\": 0.002}'")
    parser.add_argument("--model", default="vmamba_nano")
    parser.add_argument("--precision", choices=("float32", "bf16"), default="bf16")
    parser.add_argument("--backend", default="auto", help="scan backend")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--limit", type=int, help="use so many training and test images only")
    return parser.parse_args()


def read(folder: Path, name: str, limit: int | None) -> Arrays:
    """The arrays of one split, from .npy files or packed parts."""
    if (folder / f"{name}.json").is_file():
        images, labels = unpack(folder, name)
    else:
        images, labels = np.load(folder / f"{name}_images.npy"), np.load(folder / f"{name}_labels.npy")
    return images[:limit], labels[:limit].astype(np.int64)


def choose_epochs(
    options: argparse.Namespace, model: VMamba, pictures: Arrays, recipe: TrainRecipe, begun: float
) -> TrainRecipe:
    """The recipe with the epochs asked for, or with as many as the minutes allow; a plan once made is kept."""
    if options.epochs:
        return replace(recipe, epochs=options.epochs, warmup_epochs=min(recipe.warmup_epochs, options.epochs / 4))
    if not options.minutes:
        return recipe
    plan = options.out / "plan.json"
    if plan.is_file():
        epochs = int(json.loads(plan.read_text())["epochs"])
    else:
        seconds = measure_epoch(model, pictures, recipe, options.device)
        left = 60 * options.minutes - RESERVE - (time.perf_counter() - begun)
        epochs = max(2, int(left / (1.08 * seconds + 0.5)))  # room for evaluations, checkpoints and slower spells
        print(f"{seconds:.2f} s an epoch without evaluation: {epochs} epochs in the {left:.0f} s left", flush=True)
        write_json(plan, {"epochs": epochs})
    return replace(recipe, epochs=epochs, warmup_epochs=min(recipe.warmup_epochs, epochs / 4))


def measure_epoch(model: VMamba, pictures: Arrays, recipe: TrainRecipe, device: str, *, steps: int = 20) -> float:
    """Seconds of an epoch, from the second of two short ones on a copy of the network; the first fills caches."""
    images, labels = pictures
    size = min(recipe.batch_size, len(images))
    few = images[: steps * size]
    harmless = replace(recipe, epochs=2, warmup_epochs=0, plain_share=0, lr=1e-6)
    result = train(copy.deepcopy(model), few, labels[: len(few)], harmless, device=device)
    return result.history[1].seconds * (len(images) // size) / (len(few) // size)


def score(model: VMamba, data: Arrays, recipe: TrainRecipe, device: str) -> float:
    return accuracy(model, *data, mean=recipe.mean, std=recipe.std, device=device)


def show(record: EpochRecord, recipe: TrainRecipe) -> None:
    print(
        f"epoch {record.epoch + 1:3d}/{recipe.epochs}  loss {record.loss:.4f}  lr {record.lr:.2e}  "
        f"accuracy {100 * (record.accuracy or 0):.2f} %  {record.seconds:.2f} s",
        flush=True,
    )


def finish(
    options: argparse.Namespace,
    model: VMamba,
    result: TrainResult,
    pictures: Arrays,
    test: Arrays,
    recipe: TrainRecipe,
    seconds: float,
) -> None:
    """Export the averaged weights, measure the file as a user will load it, write the course."""
    scores = {
        "last_weights": score(model, test, recipe, options.device),
        "averaged_weights": score(result.average, test, recipe, options.device),
    }
    recalibrate(result.average, pictures[0], mean=recipe.mean, std=recipe.std, device=options.device)
    scores["averaged_weights_new_statistics"] = score(result.average, test, recipe, options.device)
    path = options.out / "model.safetensors"
    digest = hash_pixels(pictures[0])
    metadata = describe(options.model, pictures, recipe, digest).metadata(scores["averaged_weights_new_statistics"])
    export_model(result.average, path, metadata=metadata)
    shipped = create_model(options.model, num_classes=10, checkpoint=path).to(options.device)
    shipped.set_scan_backend(options.backend)
    scores["exported_file"] = score(shipped, test, recipe, options.device)
    course = {
        "model": options.model,
        "accuracy": scores,
        "sha256": Checkpoint.open(path).sha256,
        "data_sha256": {"train": digest, "test": hash_pixels(test[0])},
        "seconds": seconds,
        "first_epoch": result.first_epoch,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if options.device.startswith("cuda") else "cpu",
        "recipe": asdict(recipe),
        "history": [asdict(record) for record in result.history],
    }
    write_json(options.out / "train.json", course)
    print(*(f"{name}: {100 * value:.2f} %" for name, value in scores.items()), f"{seconds:.0f} s", sep="\n")


def describe(variant: str, pictures: Arrays, recipe: TrainRecipe, digest: str) -> Origin:
    spec, size = find_spec("cifar10"), pictures[0].shape[1]
    dataset = array_dataset(*pictures, spec.class_names, name=spec.name, domain="train")
    chosen = np.arange(len(dataset), dtype=np.int64)
    return Origin(
        variant=variant,
        overrides={},
        data=TrainingData(spec, dataset, chosen, chosen[:0], "test"),
        hashes={"train": digest},
        preprocessing=Preprocessing(size=size, resize=None, crop=False, mean=recipe.mean, std=recipe.std),
        recipe=asdict(recipe),
    )


def write_json(path: Path, content: object) -> None:
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    try:
        main()
    except TrustError as error:
        sys.exit(f"error: {error}")
