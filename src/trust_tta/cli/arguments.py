"""Flags that several commands share, the syntax of their values, and what they change in a configuration."""

from __future__ import annotations

import os
import re
import tomllib
from argparse import ArgumentParser, ArgumentTypeError, BooleanOptionalAction, Namespace
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trust_tta.errors import ConfigError

if TYPE_CHECKING:
    from argparse import _ActionsContainer

    from trust_tta.bench.config import RunConfig
    from trust_tta.schema import Schema

# The metavar of a key's flag, where its default does not determine it; tables have no flag.
_KINDS = {
    "model.name": "NAME",
    "model.checkpoint": "FILE",
    "model.num_classes": "N",
    "model.preprocessing": "NAME",
    "data.dataset": "NAME",
    "data.root": "FOLDER",
    "data.images": "FILE",
    "data.labels": "FILE",
    "data.domains": "A,B",
    "data.limit": "N",
    "stream.batch_size": "N[,N]",
    "stream.seeds": "N[,N]",
    "store": "FILE",
}
_TABLES = ("methods", "model.overrides", "data.options")
_TABLE_FLAGS = {"--override": "model.overrides", "--data-option": "data.options"}
_RESULTS = ("clean_after", "keep_samples", "confusion")  # for benchmarks only


def wait_politely() -> None:
    """Let PyTorch's threads sleep while they wait; call this before it is imported.

    Spinning threads slow down a busy machine: by a factor of 10 on two cores. GNU's may spin for 20 microseconds
    first: a busy machine does not feel it, and an operation that follows at once need not wake them.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "passive"
        os.environ.setdefault("GOMP_SPINCOUNT", "2000")


def add_run_arguments(parser: ArgumentParser, *, results: bool = False) -> None:
    """The configuration file, and a flag for each of its keys; with `results` also for what a benchmark keeps."""
    from trust_tta.bench.config import RunConfig
    from trust_tta.schema import outline

    parser.add_argument("config", nargs="?", metavar="CONFIG", help="TOML file; flags override what it says")
    for key, default, text in outline(RunConfig):
        if key not in _TABLES and (results or key not in _RESULTS):
            _add_flag(parser, key, default, text)
    for flag, key in _TABLE_FLAGS.items():
        text = next(text for name, _, text in outline(RunConfig) if name == key)
        parser.add_argument(
            flag, type=setting, action="append", default=[], metavar="NAME=VALUE", help=f"{text}; repeatable"
        )
    parser.add_argument("--small", action="store_true", help="run the configuration's section [small]")


def add_option_argument(parser: ArgumentParser, *, method: str = "METHOD") -> None:
    """The flag for options of methods, or of one."""
    parser.add_argument(
        "--option",
        type=option,
        action="append",
        default=[],
        metavar=f"{method}.OPTION=VALUE",
        help=f"an option of {'a method' if method == 'METHOD' else method.upper()}; repeatable",
    )


def read_experiments(arguments: Namespace, changed: dict[str, Any]) -> tuple[RunConfig, ...]:
    """The experiments of the configuration, with what the flags and `changed` change in it."""
    from trust_tta.bench.parsing import read_parts

    path = Path(arguments.config) if arguments.config else None
    with in_words_of_flags(arguments):
        return read_parts(path, changes(arguments) | changed, small=arguments.small)


def changes(arguments: Namespace) -> dict[str, Any]:
    """What the flags of `add_run_arguments` change in a configuration."""
    changed: dict[str, Any] = {}
    tables = {key: dict(getattr(arguments, flag[2:].replace("-", "_"))) for flag, key in _TABLE_FLAGS.items()}
    for key, given in [*_given(arguments).items(), *((key, table) for key, table in tables.items() if table)]:
        *outer, name = key.split(".")
        table = changed
        for inner in outer:
            table = table.setdefault(inner, {})
        table[name] = given
    return changed


@contextmanager
def in_words_of_flags(arguments: Namespace) -> Iterator[None]:
    """Let mistakes in a configuration name flags instead of keys, where flags were typed or should have been."""
    from trust_tta.bench.config import RunConfig
    from trust_tta.schema import outline

    try:
        yield
    except ConfigError as error:
        keys = _given(arguments) if arguments.config else [key for key, _, _ in outline(RunConfig)]
        raise ConfigError(name_flags(str(error), keys)) from error


def name_flags(message: str, keys: Iterable[str]) -> str:
    """The message with the flags of `keys` in their place, also of single entries of a list."""
    for key in keys:
        message = re.sub(rf"(?<![\w.-]){re.escape(key)}(\.\d+)?(?= is |: )", _flag(key), message)
    return message


def _flag(key: str) -> str:
    """The flag of a key: its table's name if the key is called `name`, else its own."""
    table, _, name = key.rpartition(".")
    return f"--{table if name == 'name' else name}".replace("_", "-")


def _given(arguments: Namespace) -> dict[str, Any]:
    """The keys of a configuration for which a flag was typed."""
    from trust_tta.bench.config import RunConfig
    from trust_tta.schema import outline

    values = {key: getattr(arguments, _flag(key)[2:].replace("-", "_"), None) for key, _, _ in outline(RunConfig)}
    return {key: value for key, value in values.items() if value is not None and key not in _TABLES}


def _add_flag(parser: ArgumentParser, key: str, default: object, text: str) -> None:
    flag, kind = _flag(key), _KINDS.get(key)
    shown = "" if default in (..., None) or "default" in text else f" (default {_written(default)})"
    text = f"{text}{shown}".replace("`", "'").replace("%", "%%")
    if isinstance(default, bool):
        parser.add_argument(flag, action=BooleanOptionalAction, default=None, help=text)
        return
    types: dict[str, Callable[[str], Any]] = {"A,B": names_list, "N[,N]": integers, "N": int}
    read = types.get(kind or "") or (type(default) if isinstance(default, int | float) else str)
    metavar = kind or ("X" if read is float else "N" if read is int else "NAME")
    parser.add_argument(flag, type=read, metavar=metavar, help=text)


def add_schema_arguments(parser: _ActionsContainer, schema: type[Schema], *, but: type[Schema] | None = None) -> None:
    """A flag for every field of a schema `but` those of another; the schema checks all values at once."""
    for name in [name for name in schema.model_fields if but is None or name not in but.model_fields]:
        field = schema.model_fields[name]
        flag, default = f"--{name.replace('_', '-')}", field.get_default()
        text = f"{field.description} (default {_written(default)})"
        if isinstance(default, bool):
            parser.add_argument(flag, action=BooleanOptionalAction, default=None, help=text.replace("%", "%%"))
        else:
            kind = "A,B,C" if isinstance(default, tuple) else "NAME" if isinstance(default, str) else "N"
            parser.add_argument(flag, type=value, metavar=kind, help=text.replace("%", "%%"))


def schema_values(arguments: Namespace, schema: type[Schema]) -> dict[str, Any]:
    """The fields of a schema that were given as flags."""
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
    """A value in TOML syntax; `0.5,0.5` is a list, a bare word is a string."""
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
