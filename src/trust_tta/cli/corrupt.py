"""`trust-tta corrupt`: corrupt an image array or an image folder."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from pathlib import Path
from typing import Any

from trust_tta.cli.arguments import integers, names_list
from trust_tta.cli.output import ProgressDisplay, say, writable_folder
from trust_tta.errors import ConfigError

EXAMPLES = """\
  trust-tta corrupt data/cifar10/test_images.npy data/CIFAR-10-C --severities 1,2,3,4,5 --workers 2
  trust-tta corrupt data/imagenet/val data/ImageNet-C --corruptions fog,snow
  trust-tta corrupt photos photos-c --size none --table imagenet --seed 1"""


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("input", metavar="INPUT", help="a .npy file, uint8 (n, h, w, 3), or a folder of images")
    add("output", metavar="OUTPUT", help="folder for <corruption>.npy and labels.npy, or for folders")
    add("--corruptions", type=names_list, metavar="A,B", help="which of the 19 (default: the 15 of the benchmarks)")
    add("--severities", type=integers, default=[5], metavar="N[,N]", help="1 to 5 (default 5)")
    add("--seed", type=int, default=0, metavar="N", help="seed of the random numbers (default 0)")
    add("--workers", type=int, default=os.cpu_count() or 1, metavar="N", help="processes (default: one per core)")
    add("--labels", metavar="FILE", help="the array's labels (default: for X_images.npy, X_labels.npy beside it)")
    add("--table", choices=("cifar", "imagenet"), help="table of severities (default: by the image size)")
    add("--size", type=_size, default=224, metavar="N", help="cut folder images to N pixels, or none (default 224)")


def run(arguments: Namespace) -> None:
    writable_folder("OUTPUT", arguments.output)
    from trust_tta.data.corrupt_dataset import corrupt_array, corrupt_folder
    from trust_tta.data.corruptions.table import CORRUPTIONS

    source = Path(arguments.input)
    options: dict[str, Any] = {name: getattr(arguments, name) for name in ("severities", "seed", "table", "workers")}
    options["corruptions"] = CORRUPTIONS if arguments.corruptions is None else arguments.corruptions
    with ProgressDisplay() as progress:
        if source.is_dir():
            if arguments.labels:
                raise ConfigError("--labels belong to an array; the labels of an image folder are its class folders")
            paths = corrupt_folder(source, arguments.output, size=arguments.size, progress=progress, **options)
        else:
            beside = source.with_name(source.name.replace("images", "labels"))
            labels = arguments.labels or (beside if beside != source and beside.is_file() else None)
            paths = corrupt_array(source, arguments.output, labels=labels, progress=progress, **options)
    for path in paths:
        say(str(path))
    if not source.is_dir() and not labels:
        say(f"no labels were found next to '{source}', so labels.npy was not written; use --labels", stream=sys.stderr)


def _size(text: str) -> int | None:
    if text == "none":
        return None
    try:
        return int(text)
    except ValueError as error:
        raise ArgumentTypeError(
            f"{text!r} is not a number of pixels; give one, or none to keep images whole"
        ) from error
