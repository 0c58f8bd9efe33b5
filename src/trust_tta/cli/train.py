"""`trust-tta train`: a network, resumable, into one self-describing file."""

from __future__ import annotations

import shlex
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from trust_tta.cli.arguments import add_schema_arguments, keyword, schema_values, use_passive_threads
from trust_tta.cli.output import ProgressDisplay, say, writable_folder
from trust_tta.config_io import read_toml
from trust_tta.errors import ConfigError
from trust_tta.models.variants import VARIANTS
from trust_tta.plugins import resolve
from trust_tta.training.recipe import (
    Recipe,
    SegmentationRecipe,
    TrainRecipe,
    is_segmentation,
    recipe_for,
    segmentation_recipe,
)

if TYPE_CHECKING:
    from trust_tta.training import Trained

EXAMPLES = """\
  trust-tta train --data cifar10 --root data --out runs/nano --device cuda --precision bf16
  trust-tta train --data pacs --root data --target photo --size 96 --out runs/pacs_photo    leaves one domain out
  trust-tta train --data folder --root my_images --size 64 --epochs 50 --out runs/mine      my_images/<class>/*.jpg
  trust-tta train --data camvid --model upernet_vmamba_nano --recipe recipes/camvid.toml --out runs/camvid
  trust-tta train --data cifar100 --init vmamba_nano_cifar10 --epochs 3 --lr 1e-3 --out runs/nano100
  trust-tta train --data cifar10 --recipe recipe.toml --set depths=[1,1] --set dims=[32,64] --out runs/small"""
KEPT = "the epochs before this one are kept"


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add_data_arguments(parser)
    add("--model", default="vmamba_nano", metavar="NAME", help="variant (default: vmamba_nano)")
    size = "pixels of a side (default: 32 for CIFAR, else 96; pictures with segmentation masks keep their size)"
    add("--size", type=int, metavar="N", help=size)
    start = "checkpoint to start from, where names and shapes fit: a file or a known name (default: random weights)"
    add("--init", metavar="FILE", help=start)
    recipe = parser.add_argument_group("recipe")
    recipe.add_argument("--recipe", metavar="FILE", help="TOML file with any of the following; flags override it")
    add_schema_arguments(recipe, TrainRecipe)
    pixels = parser.add_argument_group("recipe for segmentation (its defaults for the others differ; see the docs)")
    add_schema_arguments(pixels, SegmentationRecipe, without=Recipe.model_fields)


def add_data_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--data", required=True, metavar="NAME", help="cifar10, cifar100, pacs, folder, or one with segmentation masks")
    add("--root", default="data", metavar="FOLDER", help="folder of the data set (default: data)")
    add("--out", required=True, metavar="FOLDER", help="for model.safetensors, train.json and card.md")
    add("--target", metavar="DOMAIN", help="domain to leave out, as in leave-one-domain-out")
    add("--share", type=float, default=0.1, metavar="X", help="share held out for validation (default 0.1)")
    add("--device", default="auto", metavar="DEVICE", help="auto, cpu, cuda or cuda:1")
    change = "change a field of the variant; repeatable"
    add("--set", type=keyword, action="append", default=[], metavar="NAME=VALUE", help=change)


def run(arguments: Namespace) -> None:
    use_passive_threads()
    if arguments.size is not None and arguments.size < 8:
        raise ConfigError(f"--size {arguments.size}: give at least 8 pixels")
    recipe = read_recipe(arguments)
    writable_folder("--out", arguments.out)
    from trust_tta.bench.environment import choose_device
    from trust_tta.models.checkpoint import Checkpoint
    from trust_tta.training import open_training_data, train

    with ProgressDisplay() as progress:
        trained = train(
            open_training_data(
                arguments.data, arguments.root, target=arguments.target, share=arguments.share, seed=recipe.seed
            ),
            recipe,
            out=arguments.out,
            model=arguments.model,
            overrides=dict(arguments.set),
            size=arguments.size,
            init=None if arguments.init is None else Checkpoint.open(arguments.init),
            device=choose_device(arguments.device),
            progress=progress,
        )
    print_result(trained, arguments, arguments.target)


def read_recipe(arguments: Namespace) -> TrainRecipe | SegmentationRecipe:
    """The recipe of the file and the flags, with the defaults of the data; one error lists all mistakes."""
    flags = schema_values(arguments, TrainRecipe) | schema_values(arguments, SegmentationRecipe)
    mistakes, given = [], (read_toml(arguments.recipe) if arguments.recipe else {}) | flags
    if "drop_path" in dict(arguments.set):
        mistakes.append("--set drop_path has no effect in training; use --drop-path")
    try:
        resolve(arguments.model, VARIANTS, group="trust_tta.models")
        if arguments.model in VARIANTS:
            VARIANTS[arguments.model].override(dict(arguments.set))
    except ConfigError as error:
        mistakes.append(str(error))
    try:
        if is_segmentation(arguments.data):
            recipe: TrainRecipe | SegmentationRecipe = segmentation_recipe(given, where=arguments.recipe or "")
        else:
            recipe = recipe_for(arguments.data, given, size=arguments.size, where=arguments.recipe or "")
    except ConfigError as error:
        mistakes.append(str(error))
    if mistakes:
        raise ConfigError("; ".join(mistakes))
    return recipe


def print_result(trained: Trained, arguments: Namespace, target: str | None) -> None:
    """Print the score, the path of the weights, and a command that runs them."""
    score = "the mean IoU on" if is_segmentation(arguments.data) else "the accuracy on the"
    say(f"{score} {trained.record['measured_on']} images is {100 * trained.accuracy:.2f} %")
    dataset = arguments.data.lower()
    words = ["trust-tta", "bench", "--checkpoint", str(trained.weights)]
    if dataset == "cifar10":
        words += ["--dataset", "sample"]  # shipped test images, corrupted as they are read
    else:
        words += ["--dataset", dataset, "--root", arguments.root]
    if target:
        words += ["--domains", target]
    command = shlex.join([*words, "--methods", "source,tent,trust"])
    say(f"the network is in {trained.weights}; next: {command}")
