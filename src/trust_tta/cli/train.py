"""`trust-tta train`: a network, resumable, into one self-describing file."""

from __future__ import annotations

import shlex
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trust_tta.cli.arguments import (
    add_engine_arguments,
    add_schema_arguments,
    check_engine,
    keyword,
    open_cluster,
    schema_values,
    use_passive_threads,
)
from trust_tta.cli.output import ProgressDisplay, say, writable_folder
from trust_tta.config_io import read_toml
from trust_tta.data.registry import find_domain, find_spec
from trust_tta.errors import ConfigError, TrustError
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
    from trust_tta.training.runs import TrainedFiles, TrainingJob

EXAMPLES = """\
  trust-tta train --data cifar10 --root data --out runs/nano --device cuda --precision bf16
  trust-tta train --data pacs --root data --target photo --size 96 --out runs/pacs_photo    leaves one domain out
  trust-tta train --data pacs --target photo,sketch --out runs/pacs_{domain} --processes 2  one network for each
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
    add("--processes", type=int, metavar="N", help="networks trained at once, of several (default 1)")
    add_engine_arguments(parser, task="training")
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
    add("--target", metavar="DOMAIN", help="domain to leave out, as in leave-one-domain-out; train takes several: A,B")
    add("--share", type=float, default=0.1, metavar="X", help="share held out for validation (default 0.1)")
    add("--device", default="auto", metavar="DEVICE", help="auto, cpu, cuda or cuda:1")
    change = "change a field of the variant; repeatable"
    add("--set", type=keyword, action="append", default=[], metavar="NAME=VALUE", help=change)


def run(arguments: Namespace) -> None:
    """Train one network, or one for each left-out domain; a failure does not stop the others."""
    use_passive_threads()
    if arguments.size is not None and arguments.size < 8:
        raise ConfigError(f"--size {arguments.size}: give at least 8 pixels")
    check_engine(arguments, "cpus", "gpus")
    recipe = read_recipe(arguments)
    targets = arguments.target.split(",") if arguments.target is not None else [None]
    several = len(targets) > 1 or arguments.engine != "local"
    _check_targets(arguments, targets, recipe, several=several)
    trainings = [_training(arguments, target, recipe, several=several) for target in targets]
    ended: list[TrainedFiles | TrustError]
    with ProgressDisplay() as progress:
        if arguments.engine != "local":
            from trust_tta.distributed.trainings import train_on_cluster

            with open_cluster(arguments, device=arguments.device) as (ray, resources):
                ended = train_on_cluster(trainings, ray=ray, resources=resources, progress=progress)
        elif several:
            from trust_tta.training.runs import train_in_parallel

            ended = train_in_parallel(trainings, processes=arguments.processes or 1, progress=progress)
        else:
            ended = [trainings[0].run(progress)]
    failed = []
    for target, end in zip(targets, ended, strict=True):
        if isinstance(end, TrustError):
            failed.append(f"{target}: {end}")
        else:
            print_result(end, arguments, target)
    if failed:
        raise TrustError("; ".join(failed))


def _check_targets(
    arguments: Namespace, targets: Sequence[str | None], recipe: TrainRecipe | SegmentationRecipe, *, several: bool
) -> None:
    dense = isinstance(recipe, SegmentationRecipe)
    if several and (dense or not all(targets) or len(set(targets)) < len(targets)):
        raise ConfigError(f"--target {arguments.target}: name domains of a data set with several, each once, as A,B")
    if dense and arguments.target is not None:
        raise ConfigError(f"--target {arguments.target}: {arguments.data} has no domains to leave out; omit it")
    if len(targets) > 1 and "{domain}" not in arguments.out:
        raise ConfigError(f"--out {arguments.out}: several targets need a folder each; give {arguments.out}_{{domain}}")
    if not dense and arguments.target and (spec := find_spec(arguments.data)).domains:
        for target in targets:
            find_domain(spec, target)


def _training(
    arguments: Namespace, target: str | None, recipe: TrainRecipe | SegmentationRecipe, *, several: bool
) -> TrainingJob:
    out = arguments.out.replace("{domain}", target or "all")
    writable_folder("--out", out)
    import torch

    from trust_tta.bench.environment import choose_device
    from trust_tta.training.runs import TrainingJob

    local = arguments.engine == "local"
    init = arguments.init and arguments.init.replace("{domain}", target or "all")
    if init and Path(init).is_file():  # not a known name
        init = str(Path(init).resolve())
    return TrainingJob(
        data=arguments.data,
        root=str(Path(arguments.root).resolve()) if several else arguments.root,
        target=target,
        out=str(Path(out).resolve()) if several else out,
        recipe=recipe,
        model=arguments.model,
        overrides=dict(arguments.set),
        size=arguments.size,
        share=arguments.share,
        device=str(choose_device(arguments.device)) if local else arguments.device,
        init=init,
        threads=max(1, torch.get_num_threads() // (arguments.processes or 1)) if several else None,
    )


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


def print_result(trained: TrainedFiles, arguments: Namespace, target: str | None) -> None:
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
