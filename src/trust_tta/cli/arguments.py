"""Flags that several commands share, how their values are written, and what they change in a configuration."""

from __future__ import annotations

import os
import tomllib
from argparse import ArgumentParser, ArgumentTypeError, BooleanOptionalAction, Namespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from argparse import _ActionsContainer

    from trust_tta.schema import Schema

# Flag, key in the configuration, kind of value, help.
_KEYS = (
    ("experiment", "experiment", "NAME", "name of the experiment (default: that of the configuration file)"),
    (
        "checkpoint",
        "model.checkpoint",
        "FILE",
        ".pth or .safetensors file, or a known name; {domain} stands for the domain",
    ),
    ("model", "model.name", "NAME", "variant of the network (default: what the checkpoint says)"),
    (
        "preprocessing",
        "model.preprocessing",
        "NAME",
        "preset such as imagenet, squash224, cifar32 (default: the checkpoint's)",
    ),
    ("dataset", "data.dataset", "NAME", "sample (shipped images), array (with --images and --labels), or a data set"),
    ("root", "data.root", "FOLDER", "folder that holds the data sets (default: data)"),
    ("images", "data.images", "FILE", "uint8 (n, h, w, 3) .npy file, for --dataset array"),
    ("labels", "data.labels", "FILE", ".npy file of its labels"),
    (
        "setting",
        "stream.setting",
        "NAME",
        "online, continual, standard, mixed, correlated, gradual, or several joined by +",
    ),
    ("device", "device", "DEVICE", "auto, cpu, cuda or cuda:1"),
    ("dtype", "dtype", "NAME", "float32 or bf16"),
    ("store", "store", "FILE", "results store (default: runs/EXPERIMENT.sqlite)"),
)
_NUMBERS = (
    ("num-classes", "model.num_classes", "outputs of the network (default: what the checkpoint or the data say)"),
    ("severity", "data.severity", "1 to 5 (default 5)"),
    ("limit", "data.limit", "at most this many images per domain, drawn by the seed"),
)
_LISTS = (
    ("domains", "data.domains"),
    ("batch-size", "stream.batch_size"),
    ("seeds", "stream.seeds"),
)


def wait_politely() -> None:
    """Let PyTorch's threads sleep while they wait; to be called before it is imported.

    Threads that spin slow a busy machine down: 10 times on two cores.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def add_run_arguments(parser: ArgumentParser) -> None:
    """The configuration file and the flags that change it."""
    parser.add_argument("config", nargs="?", metavar="CONFIG", help="TOML file; flags override what it says")
    for flag, _, kind, text in _KEYS:
        parser.add_argument(f"--{flag}", metavar=kind, help=text)
    for flag, _, text in _NUMBERS:
        parser.add_argument(f"--{flag}", type=int, metavar="N", help=text)
    parser.add_argument("--domains", type=names_list, metavar="A,B", help="domains, in this order (default: all)")
    parser.add_argument("--batch-size", type=integers, metavar="N[,N]", help="one batch size or several (default 128)")
    parser.add_argument("--seeds", type=integers, metavar="N[,N]", help="one seed or several (default 0)")
    parser.add_argument("--small", action="store_true", help="run the configuration's section [small]")


def flag_keys() -> dict[str, str]:
    """The flags of `add_run_arguments` and the keys of a configuration that they set."""
    return {f"--{flag}": key for flag, key, *_ in (*_KEYS, *_NUMBERS, *_LISTS)}


def changes(arguments: Namespace) -> dict[str, Any]:
    """What the flags of `add_run_arguments` change in a configuration."""
    changed: dict[str, Any] = {}
    for flag, key in flag_keys().items():
        value = getattr(arguments, flag[2:].replace("-", "_"))
        if value is None:
            continue
        *tables, name = key.split(".")
        table = changed
        for inner in tables:
            table = table.setdefault(inner, {})
        table[name] = value
    return changed


def add_schema_arguments(parser: _ActionsContainer, schema: type[Schema]) -> None:
    """A flag for every field of a schema; values are checked by the schema, all at once."""
    for name, field in schema.model_fields.items():
        flag, default = f"--{name.replace('_', '-')}", field.get_default()
        text = f"{field.description} (default {_written(default)})"
        if isinstance(default, bool):
            parser.add_argument(flag, action=BooleanOptionalAction, default=None, help=text.replace("%", "%%"))
        else:
            kind = "A,B,C" if isinstance(default, tuple) else "NAME" if isinstance(default, str) else "N"
            parser.add_argument(flag, type=value, metavar=kind, help=text.replace("%", "%%"))


def schema_values(arguments: Namespace, schema: type[Schema]) -> dict[str, Any]:
    """The fields of a schema for which a flag was given."""
    given = {name: getattr(arguments, name) for name in schema.model_fields}
    return {name: written for name, written in given.items() if written is not None}


def names_list(text: str) -> list[str]:
    """`a,b` as a list."""
    return [part.strip() for part in text.split(",") if part.strip()]


def integers(text: str) -> list[int]:
    """`1,2` as a list of integers."""
    try:
        return [int(part) for part in names_list(text)]
    except ValueError as error:
        raise ArgumentTypeError(f"{text!r} is not a list of integers; give one such as 0,1,2") from error


def value(text: str) -> Any:
    """A value as TOML writes it; `0.5,0.5` is a list, a bare word a string."""
    for written in (text, f"[{text}]") if "," in text else (text,):
        try:
            return tomllib.loads(f"value = {written}")["value"]
        except (tomllib.TOMLDecodeError, RecursionError, ValueError):
            continue
    return text


def setting(text: str) -> tuple[str, Any]:
    """`depths=[1,1]` as a name and a value."""
    name, equals, written = text.partition("=")
    if not (name and equals and written):
        raise ArgumentTypeError(f"{text!r} is not NAME=VALUE; give it as depths=[1,1]")
    if name == "num_classes":
        raise ArgumentTypeError("num_classes is the number of classes of the data; omit it")
    return name, value(written)


def option(text: str) -> tuple[str, str, Any]:
    """`trust.k=4` as method, option and value."""
    key, equals, written = text.partition("=")
    method, dot, name = key.rpartition(".")
    if not (equals and dot and method and name and written):
        raise ArgumentTypeError(f"{text!r} is not METHOD.OPTION=VALUE; give it as trust.k=4")
    return method, name, value(written)


def _written(default: object) -> str:
    if isinstance(default, tuple):
        return ",".join(map(str, default))
    return f"{default:g}" if isinstance(default, float) else str(default).lower()
