"""`trust-tta train`: a network from scratch, resumable, into one described file."""

from __future__ import annotations

import time
import tomllib
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trust_tta.cli.common import wait_politely
from trust_tta.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from trust_tta.models.vmamba import VMamba
    from trust_tta.preprocessing import Preprocessing
    from trust_tta.training.data import TrainingData
    from trust_tta.training.loop import EpochRecord, TrainResult
    from trust_tta.training.recipe import TrainRecipe

    Images = tuple[NDArray[np.uint8], NDArray[np.int64]]

HELP = "train a network from scratch; run again, it goes on after the last whole epoch"
EXAMPLES = """\
  trust-tta train --data cifar10 --root data --out runs/nano --device cuda --precision bf16
  trust-tta train --data pacs --root data --target photo --size 96 --out runs/pacs_photo    leaves one domain out
  trust-tta train --data folder --root my_images --size 64 --epochs 50 --out runs/mine      my_images/<class>/*.jpg
  trust-tta train --data cifar10 --recipe recipe.toml --set depths=[1,1] --set dims=[32,64] --out runs/small"""

CHECKPOINT = "checkpoint.pt"
FLAGS = ("epochs", "batch_size", "lr", "seed", "precision")  # fields of the recipe with a flag of their own


def add_arguments(parser: ArgumentParser) -> None:
    add_data_arguments(parser)
    parser.add_argument("--model", default="vmamba_nano", metavar="NAME", help="variant (default: vmamba_nano)")
    parser.add_argument(
        "--set", type=setting, action="append", default=[], metavar="NAME=VALUE", help="change the variant; repeatable"
    )
    parser.add_argument("--size", type=int, metavar="N", help="pixels of a side (default: 32 for CIFAR, else 96)")
    parser.add_argument("--recipe", metavar="FILE", help="TOML file with fields of the recipe; flags come after it")
    parser.add_argument("--epochs", type=int, metavar="N", help="(default 100)")
    parser.add_argument("--batch-size", type=int, metavar="N", help="(default 512)")
    parser.add_argument("--lr", type=float, metavar="RATE", help="(default 0.003)")
    parser.add_argument("--seed", type=int, metavar="N", help="(default 0)")
    parser.add_argument("--precision", metavar="NAME", help="float32 or bf16 (default float32)")


def add_data_arguments(parser: ArgumentParser) -> None:
    """The flags that `train` and `finetune` share."""
    parser.add_argument("--data", required=True, metavar="NAME", help="cifar10, cifar100, pacs or folder")
    parser.add_argument("--root", default="data", metavar="FOLDER", help="where the data set lies (default: data)")
    parser.add_argument("--out", required=True, metavar="FOLDER", help="for model.safetensors, train.json, card.md")
    parser.add_argument("--target", metavar="DOMAIN", help="domain to leave out, as in leave-one-domain-out")
    parser.add_argument("--share", type=float, default=0.1, metavar="X", help="held out for validation (default 0.1)")
    parser.add_argument("--device", default="auto", metavar="DEVICE", help="auto, cpu, cuda or cuda:1")


def setting(text: str) -> tuple[str, Any]:
    """`depths=[1,1]` as a name and a value, written as in TOML; a bare word is a text."""
    name, equals, written = text.partition("=")
    if not (name and equals and written):
        raise ArgumentTypeError(f"{text!r} is not NAME=VALUE; give it as depths=[1,1]")
    if name == "num_classes":
        raise ArgumentTypeError("num_classes is the number of classes of the data; leave it out")
    try:
        return name, tomllib.loads(f"value = {written}")["value"]
    except tomllib.TOMLDecodeError:
        return name, written


def run(arguments: Namespace) -> None:
    wait_politely()
    import torch

    from trust_tta.bench.environment import choose_device
    from trust_tta.cli.progress import progress
    from trust_tta.models.factory import create_model
    from trust_tta.training.data import open_training_data
    from trust_tta.training.loop import train

    begun = time.perf_counter()
    device = choose_device(arguments.device)
    recipe = read_recipe(arguments)
    data = open_training_data(
        arguments.data, arguments.root, target=arguments.target, share=arguments.share, seed=recipe.seed
    )
    torch.manual_seed(recipe.seed)
    model = create_model(arguments.model, num_classes=len(data.dataset.class_names), **dict(arguments.set))
    model.preprocessing = fitting(picture_size(arguments), recipe)
    model.classes = tuple(data.dataset.class_names)
    pictures, held_out = read_pictures(data, picture_size(arguments), recipe)
    print(f"{len(pictures[0])} images of {data.description} to train on, {len(held_out[0])} {data.measured_on} images")
    with progress(recipe.epochs, "epochs") as advance:
        done = 0

        def after(record: EpochRecord) -> None:
            nonlocal done
            show(record, recipe)
            advance(record.epoch + 1 - done)  # a run that goes on starts in the middle
            done = record.epoch + 1

        result = train(
            model,
            *pictures,
            recipe,
            device=device,
            checkpoint_path=Path(arguments.out) / CHECKPOINT,
            evaluate=lambda network: score(network, held_out, recipe, device),
            progress=after,
        )
    if result.first_epoch:
        print(f"went on after epoch {result.first_epoch} of an earlier run")
    finish(arguments, result, data, pictures, held_out, recipe, device, time.perf_counter() - begun)


def picture_size(arguments: Namespace) -> int:
    if arguments.size is None:
        return 32 if arguments.data.lower().startswith("cifar") else 96
    if arguments.size < 8:
        raise ConfigError(f"--size is {arguments.size}; it must be at least 8 pixels")
    return int(arguments.size)


def read_recipe(arguments: Namespace) -> TrainRecipe:
    """Defaults that fit the data and the size, then the file, then the flags; every mistake in one line."""
    from dataclasses import fields

    from trust_tta.preprocessing import IMAGENET_MEAN, IMAGENET_STD
    from trust_tta.training.recipe import TrainRecipe

    size = picture_size(arguments)
    values: dict[str, Any] = {"crop_padding": size // 8, "cutout": size // 4}
    if not arguments.data.lower().startswith("cifar"):
        values |= {"mean": IMAGENET_MEAN, "std": IMAGENET_STD}
    given = read_toml(arguments.recipe) if arguments.recipe else {}
    given |= {name: getattr(arguments, name) for name in FLAGS if getattr(arguments, name) is not None}
    epochs = given.get("epochs", TrainRecipe.epochs)
    if "warmup_epochs" not in given and isinstance(epochs, int):
        values["warmup_epochs"] = min(TrainRecipe.warmup_epochs, max(epochs, 0) / 4)
    known = {field.name for field in fields(TrainRecipe)}
    mistakes = network_mistakes(arguments)
    unknown = sorted(given.keys() - known)
    if unknown:
        mistakes.append(f"TrainRecipe has no field {', '.join(unknown)}; its fields are {', '.join(sorted(known))}")
    try:
        recipe = TrainRecipe(**{**values, **{name: value for name, value in given.items() if name in known}})
    except ConfigError as error:
        mistakes.append(str(error))
    if mistakes:
        raise ConfigError("; ".join(mistakes))
    return recipe


def network_mistakes(arguments: Namespace) -> list[str]:
    """What is wrong with --model and --set."""
    from trust_tta.models.factory import list_models
    from trust_tta.models.variants import VARIANTS

    if arguments.model not in VARIANTS:
        return [f"--model {arguments.model!r} is unknown; the models are {', '.join(list_models())}"]
    changes, mistakes = dict(arguments.set), []
    if "drop_path" in changes:
        mistakes.append("--set drop_path does not hold in training; give drop_path in the file of --recipe")
    try:
        VARIANTS[arguments.model].override(changes)
    except ConfigError as error:
        mistakes.append(str(error))
    return mistakes


def read_toml(path: str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"the recipe '{path}' cannot be read ({error.strerror}); give a TOML file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the recipe '{path}' is not TOML: {error}") from error


def fitting(size: int, recipe: TrainRecipe) -> Preprocessing:
    """Images squashed to size x size, normalized as the recipe says."""
    from trust_tta.preprocessing import Preprocessing

    return Preprocessing(size=size, resize=None, crop=False, mean=recipe.mean, std=recipe.std)


def read_pictures(data: TrainingData, size: int, recipe: TrainRecipe) -> tuple[Images, Images]:
    """Images and labels to train on, and those held out, squashed to size x size."""
    from trust_tta.cli.progress import progress
    from trust_tta.training.data import Pictures, read_arrays

    fit = fitting(size, recipe)
    with progress(len(data.chosen) + len(data.held_out), "reading") as advance:
        chosen, held_out = (Pictures(data.dataset, indices) for indices in (data.chosen, data.held_out))
        return (read_arrays(chosen, fit, advance), chosen.labels), (
            read_arrays(held_out, fit, advance),
            held_out.labels,
        )


def score(model: VMamba, images: Images, recipe: TrainRecipe, device: torch.device) -> float:
    from trust_tta.training.evaluation import accuracy

    return accuracy(model, *images, mean=recipe.mean, std=recipe.std, device=device, batch_size=_many(images))


def show(record: EpochRecord, recipe: TrainRecipe) -> None:
    print(
        f"epoch {record.epoch + 1:3d}/{recipe.epochs}  loss {record.loss:.4f}  lr {record.lr:.2e}  "
        f"accuracy {100 * (record.accuracy or 0):.2f} %  {record.seconds:.2f} s",
        flush=True,
    )


def finish(
    arguments: Namespace,
    result: TrainResult,
    data: TrainingData,
    pictures: Images,
    held_out: Images,
    recipe: TrainRecipe,
    device: torch.device,
    seconds: float,
) -> None:
    """Take the running statistics of the averaged weights anew, measure, write."""
    from dataclasses import asdict

    from trust_tta.data.files import hash_pixels
    from trust_tta.training.card import TRAINED
    from trust_tta.training.evaluation import recalibrate
    from trust_tta.training.outputs import Origin, write_network

    size = pictures[0].shape[1]
    accuracies = {"averaged weights": score(result.average, held_out, recipe, device)}
    recalibrate(
        result.average,
        pictures[0],
        mean=recipe.mean,
        std=recipe.std,
        device=device,
        batch_size=min(_many(pictures), len(pictures[0])),
    )
    accuracies["averaged weights, new statistics"] = score(result.average, held_out, recipe, device)
    origin = Origin(
        variant=arguments.model,
        overrides=dict(arguments.set),
        data=data,
        hashes={"train": hash_pixels(pictures[0]), data.measured_on: hash_pixels(held_out[0])},
        preprocessing=fitting(size, recipe),
        recipe=asdict(recipe),
    )
    write_network(
        Path(arguments.out),
        result.average,
        origin,
        accuracy=accuracies,
        history=[asdict(record) for record in result.history],
        seconds=seconds,
        device=device,
        how=TRAINED,
    )
    report(arguments.out, list(accuracies.values())[-1], data.measured_on)


def report(out: str, accuracy: float, measured_on: str) -> None:
    """The last lines: how good it is, where it lies, what to do with it."""
    from trust_tta.training.outputs import WEIGHTS

    print(f"{100 * accuracy:.2f} % of the {measured_on} images are right")
    print(f"the network is in {Path(out) / WEIGHTS}; next: trust-tta bench --checkpoint {Path(out) / WEIGHTS}")


def _many(images: Images) -> int:
    """Images at a time without gradients: as many pixels as 1000 of 32 x 32."""
    side: int = images[0].shape[1]
    return max(16, 1000 * 32 * 32 // side**2)
