"""Flags that several commands share, and what they mean as changes to a configuration."""

from __future__ import annotations

import os
import tomllib
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from typing import Any

# Flag, place in the configuration, help.
_PLACES = (
    ("experiment", "experiment", "name of the experiment (default: that of the configuration's file)"),
    ("checkpoint", "model.checkpoint", ".pth or .safetensors file, or a known name; {domain} stands for the domain"),
    ("model", "model.name", "variant of the network (default: as the checkpoint says)"),
    ("preprocessing", "model.preprocessing", "preset such as imagenet, squash224, cifar32 (default: the checkpoint's)"),
    ("dataset", "data.dataset", "sample (shipped images), array (with --images, --labels), or a data set"),
    ("root", "data.root", "folder that holds the data sets (default: data)"),
    ("images", "data.images", "uint8 (n, h, w, 3) .npy file of the data set 'array'"),
    ("labels", "data.labels", ".npy file of its labels"),
    ("setting", "stream.setting", "online, continual, standard, mixed, correlated, gradual, or several joined by +"),
    ("device", "device", "auto, cpu, cuda or cuda:1"),
    ("dtype", "dtype", "float32 or bf16"),
    ("store", "store", "results store (default: runs/EXPERIMENT.sqlite)"),
)
_NUMBERS = (
    ("num-classes", "model.num_classes", "outputs of the network (default: as the checkpoint or the data say)"),
    ("severity", "data.severity", "1 to 5 (default 5)"),
    ("limit", "data.limit", "at most so many images of each domain, drawn by the seed"),
)


def wait_politely() -> None:
    """Let the threads of PyTorch sleep while they wait; to be called before it is imported.

    Threads that spin bring a machine on which anything else runs nearly to a halt: 10 times slower on two cores.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def add_run_arguments(parser: ArgumentParser) -> None:
    """The configuration file and the flags that change it."""
    parser.add_argument("config", nargs="?", metavar="CONFIG", help="TOML file; flags change what it says")
    for flag, _, text in _PLACES:
        parser.add_argument(f"--{flag}", metavar=flag.upper(), help=text)
    for flag, _, text in _NUMBERS:
        parser.add_argument(f"--{flag}", type=int, metavar="N", help=text)
    parser.add_argument("--domains", type=names, metavar="A,B", help="domains in this order (default: all)")
    parser.add_argument("--batch-size", type=numbers, metavar="N[,N]", help="one or several (default 128)")
    parser.add_argument("--seeds", type=numbers, metavar="N[,N]", help="one or several (default 0)")


def changes(arguments: Namespace) -> dict[str, Any]:
    """What the flags of `add_run_arguments` change in a configuration."""
    places = {flag.replace("-", "_"): place for flag, place, _ in (*_PLACES, *_NUMBERS)}
    places |= {"domains": "data.domains", "batch_size": "stream.batch_size", "seeds": "stream.seeds"}
    changed: dict[str, Any] = {}
    for flag, place in places.items():
        value = getattr(arguments, flag)
        if value is None:
            continue
        *tables, name = place.split(".")
        table = changed
        for inner in tables:
            table = table.setdefault(inner, {})
        table[name] = value
    return changed


def names(text: str) -> list[str]:
    """`a,b` as a list."""
    return [part.strip() for part in text.split(",") if part.strip()]


def numbers(text: str) -> list[int]:
    """`1,2` as a list of whole numbers."""
    try:
        return [int(part) for part in names(text)]
    except ValueError as error:
        raise ArgumentTypeError(f"{text!r} is not a list of whole numbers; give one as 0,1,2") from error


def option(text: str) -> tuple[str, str, Any]:
    """`trust.k=4` as method, option and value; values are written as in TOML, a bare word is a text."""
    place, equals, written = text.partition("=")
    method, dot, name = place.partition(".")
    if not (equals and dot and method and name and written):
        raise ArgumentTypeError(f"{text!r} is not METHOD.OPTION=VALUE; give it as trust.k=4")
    try:
        return method, name, tomllib.loads(f"value = {written}")["value"]
    except tomllib.TOMLDecodeError:
        return method, name, written
