"""Flags shared by several commands, the syntax of their values, and the engines."""

from __future__ import annotations

import os
import tomllib
from argparse import ArgumentParser, ArgumentTypeError, BooleanOptionalAction, Namespace
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from trust_tta.errors import ConfigError
from trust_tta.schema import Schema, flag_of, schema_fields

if TYPE_CHECKING:
    from argparse import _ActionsContainer

    from trust_tta.bench.processes import SweepEngine
    from trust_tta.distributed.sweeps import TaskResources

# Metavars that the default value does not determine.
_METAVARS = {
    "model.checkpoint": "FILE",
    "model.num_classes": "N",
    "model.classes": "FILE",
    "data.root": "FOLDER",
    "data.images": "FILE",
    "data.labels": "FILE",
    "data.domains": "A,B",
    "data.limit": "N",
    "stream.batch_size": "N[,N]",
    "stream.seeds": "N[,N]",
    "store": "FILE",
}
_TABLE_FLAGS = {"model.overrides": "--override", "data.options": "--data-option"}
_RESULTS = ("clean_after", "keep_samples", "confusion")  # for benchmarks only


def use_passive_threads() -> None:
    """Let idle OpenMP threads sleep instead of spin; call this before PyTorch is imported.

    Spinning slows down a busy machine, by a factor of 10 on two cores. GNU's OpenMP still spins for 20 microseconds, so
    that the next operation finds its threads awake.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "passive"
        os.environ.setdefault("GOMP_SPINCOUNT", "2000")


def add_run_arguments(parser: ArgumentParser, *, results: bool = False) -> None:
    """Add the configuration file and a flag for each of its keys, with `results` also for those of `bench` alone."""
    from trust_tta.bench.config import RunConfig

    parser.add_argument("config", nargs="?", type=Path, metavar="CONFIG", help="TOML file; flags override what it says")
    add_schema_arguments(parser, RunConfig, without=("methods", *(() if results else _RESULTS)))
    parser.add_argument("--small", action="store_true", help="run the configuration's section [small]")


def add_network_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", metavar="NAME", help="a variant, timm:NAME or package.module:Name (default: the checkpoint's)")
    add("--checkpoint", metavar="FILE", help=".pth or .safetensors file, or a known name (default: the network's own)")
    add("--preprocessing", metavar="NAME", help="imagenet, cifar32, ... (default: the network's)")
    add("--classes", metavar="FILE", help="class names, one per line, or a folder of class folders")


def add_schema_arguments(parser: _ActionsContainer, schema: type[Schema], *, without: Collection[str] = ()) -> None:
    """Add a flag for every field of a schema, whose value is TOML or a list of names."""
    for key, default, text in schema_fields(schema):
        flag = flag_of(key)
        shown = "" if default in (..., None, {}) or "default" in text else f" (default {_default_text(default)})"
        text = f"{text}{shown}".replace("`", "'").replace("%", "%%")
        if key in without:
            continue
        if key in _TABLE_FLAGS:
            flag, text = _TABLE_FLAGS[key], f"{text}; repeatable"
            parser.add_argument(flag, dest=key, type=keyword, action="append", metavar="NAME=VALUE", help=text)
        elif isinstance(default, bool):
            parser.add_argument(flag, dest=key, action=BooleanOptionalAction, help=text)
        else:
            metavar = _METAVARS.get(key) or {float: "X", int: "N", tuple: "A,B,C"}.get(type(default), "NAME")
            read = names_list if metavar == "A,B" else toml_value if metavar in ("N", "X", "N[,N]", "A,B,C") else str
            parser.add_argument(flag, dest=key, type=read, metavar=metavar, help=text)


def schema_values(arguments: Namespace, schema: type[Schema]) -> dict[str, Any]:
    """The fields of a schema that were given as flags, as nested tables."""
    values: dict[str, Any] = {}
    for key, _, _ in schema_fields(schema):
        if (given := getattr(arguments, key, None)) is not None:
            *outer, name = key.split(".")
            table = values
            for inner in outer:
                table = table.setdefault(inner, {})
            table[name] = dict(given) if key in _TABLE_FLAGS else given
    return values


def names_list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def integers(text: str) -> list[int]:
    """`1,2` as a list of integers."""
    try:
        return [int(part) for part in names_list(text)]
    except ValueError as error:
        raise ArgumentTypeError(f"{text!r} is not a list of integers; give one such as 0,1,2") from error


def toml_value(text: str) -> Any:
    """A value in TOML syntax; `0.5,0.5` is a list, a bare word is a string."""
    for written in (text, f"[{text}]") if "," in text else (text,):
        try:
            return tomllib.loads(f"value = {written}")["value"]
        except (tomllib.TOMLDecodeError, RecursionError, ValueError):
            continue
    return text


def keyword(text: str) -> tuple[str, Any]:
    """`depths=[1,1]` as a name and a value."""
    name, equals, written = text.partition("=")
    if not (name and equals and written):
        raise ArgumentTypeError(f"{text!r} is not NAME=VALUE; give it as depths=[1,1]")
    if name == "num_classes":
        raise ArgumentTypeError("num_classes is the number of classes of the data; omit it")
    return name, toml_value(written)


def method_option(text: str) -> tuple[str, str, Any]:
    """`trust.k=4` as method, option and value."""
    key, equals, written = text.partition("=")
    method, dot, name = key.rpartition(".")
    if not (equals and dot and method and name and written):
        raise ArgumentTypeError(f"{text!r} is not METHOD.OPTION=VALUE; give it as trust.k=4")
    return method, name, toml_value(written)


def _default_text(default: object) -> str:
    if isinstance(default, tuple):
        return ",".join(map(str, default))
    return f"{default:g}" if isinstance(default, float) else str(default).lower()


# engines: this process, several processes, or a Ray cluster


def add_engine_arguments(parser: ArgumentParser, *, task: str = "") -> None:
    """Add --engine and --address, and with a `task` --cpus and --gpus of each."""
    add = parser.add_argument
    add("--engine", default="local", choices=("local", "ray"), metavar="NAME",
        help="local (default), or ray: a Ray cluster")  # fmt: skip
    head = "head of the Ray cluster, or auto for the one on this machine (default: start one here, on loopback)"
    add("--address", metavar="HOST:PORT", help=head)
    if task:
        add("--cpus", type=int, metavar="N", help=f"CPUs, and threads, of a {task} on the cluster (default 1)")
        shared = f"GPUs of a {task} on the cluster, such as 0.25 (default: 1 where it uses one)"
        add("--gpus", type=float, metavar="X", help=shared)


def check_engine(arguments: Namespace, *flags: str) -> None:
    """Refuse cluster flags without a cluster, and numbers out of range, before PyTorch is imported."""
    given = [flag for flag in ("address", *flags) if getattr(arguments, flag) is not None]
    if arguments.engine == "local" and given:
        raise ConfigError(f"--{given[0]} is for a cluster; add --engine ray, or omit it")
    for flag in ("processes", "cpus"):
        number = getattr(arguments, flag, None)
        if number is not None and number < 1:
            raise ConfigError(f"--{flag} {number}: give 1 or more")
    gpus = getattr(arguments, "gpus", None)
    if gpus is not None and not 0 <= gpus <= 1024:
        raise ConfigError(f"--gpus {gpus:g}: give 0 or more")


@contextmanager
def open_cluster(arguments: Namespace, *, device: str) -> Iterator[tuple[ModuleType, TaskResources]]:
    """Connect to Ray; yields the module and the resources of each task."""
    from trust_tta.distributed.cluster import connected
    from trust_tta.distributed.sweeps import choose_resources

    cpus, started_here = arguments.cpus or 1, arguments.address is None
    most = arguments.processes * cpus if arguments.processes and started_here else None
    with connected(arguments.address, cpus=most) as ray:
        yield ray, choose_resources(device, ray.cluster_resources(), cpus=cpus, gpus=arguments.gpus)


@contextmanager
def make_engine(arguments: Namespace, *, device: str) -> Iterator[SweepEngine | None]:
    """Yield the engine of --engine and --processes; None to run in this process."""
    if arguments.engine == "local":
        from trust_tta.bench.processes import run_in_processes

        several = arguments.processes is not None and arguments.processes > 1
        yield partial(run_in_processes, processes=arguments.processes) if several else None
        return
    from trust_tta.distributed.sweeps import run_on_cluster

    with open_cluster(arguments, device=device) as (ray, resources):
        yield partial(run_on_cluster, ray=ray, resources_per_task=resources, max_tasks=arguments.processes)
