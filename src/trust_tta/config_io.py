"""Reading text, JSON and TOML files within size limits, with one-line errors."""

from __future__ import annotations

import difflib
import json
import os
import stat
import tomllib
from collections.abc import Callable
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any, NoReturn

from trust_tta.errors import ConfigError, TrustError

MAX_BYTES = 16 << 20
MAX_DEPTH = 64  # nesting of arrays and tables


def read_text(path: Path | str, *, error: type[TrustError] = ConfigError) -> str:
    """The text of a UTF-8 file of at most 16 MiB; raises `error` if the file is missing, too large or not text."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # a pipe would block, a device need not end
            raise error(f"'{path}' is not a file; give the path of a text file")
        with Path(path).open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except TrustError:
        raise
    except FileNotFoundError:
        wanted = Path(path)
        siblings = [file.name for file in wanted.parent.glob(f"*{wanted.suffix}")] if wanted.parent.is_dir() else []
        close = difflib.get_close_matches(wanted.name, siblings, n=1)
        hint = f"did you mean '{wanted.with_name(close[0])}'?" if close else "check the path"
        raise error(f"there is no file '{path}'; {hint}") from None
    except (OSError, ValueError) as problem:
        raise error(f"'{path}' cannot be read: {_one_line(problem)}") from problem
    if len(content) > MAX_BYTES:
        raise error(f"'{path}' is larger than {MAX_BYTES} bytes; a configuration is far smaller")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        raise error(f"'{path}' is not UTF-8 text: {_one_line(problem)}; save it as UTF-8") from problem


def read_json(path: Path | str, *, error: type[TrustError] = ConfigError) -> Any:
    """The content of a JSON file."""
    return parse_json(read_text(path, error=error), where=f"'{path}'", error=error)


def read_toml(path: Path | str) -> dict[str, Any]:
    """The content of a TOML file."""
    table: dict[str, Any] = _parse(tomllib.loads, read_text(path), "TOML", where=f"'{path}'", error=ConfigError)
    return table


def read_asset(name: str, *, room: str = "") -> str:
    """The text of a file that ships in the assets of the package, or of one of its rooms."""
    return resources.files("trust_tta").joinpath(room, "assets", name).read_text(encoding="utf-8")


def read_class_names(path: Path | str) -> tuple[str, ...]:
    """Class names in label order: the lines of a text file, or the sorted subfolders of a folder."""
    if Path(path).is_dir():
        names = sorted(entry.name for entry in Path(path).iterdir() if entry.is_dir())
    else:
        names = [line.strip() for line in read_text(path).splitlines() if line.strip()]
    if not names or len(set(names)) < len(names):
        raise ConfigError(f"'{path}' has no class names or a name twice; give a file with one name per line")
    return tuple(names)


def parse_json(text: str | bytes | bytearray, *, where: str, error: type[TrustError] = ConfigError) -> Any:
    """Parsed JSON; NaN and Infinity are refused, as JSON has neither."""

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is not valid in JSON")

    return _parse(partial(json.loads, parse_constant=refuse), text, "JSON", where=where, error=error)


def _parse(
    loads: Callable[[Any], Any], text: str | bytes | bytearray, kind: str, *, where: str, error: type[TrustError]
) -> Any:
    try:
        value = loads(text)
    except (ValueError, RecursionError) as problem:
        raise error(f"{where} is not {kind}: {_one_line(problem)}") from problem
    if is_too_deep(value):
        raise error(f"{where} is nested deeper than {MAX_DEPTH} levels; make it flatter")
    return value


def is_too_deep(value: Any) -> bool:
    """Whether lists and tables are nested deeper than MAX_DEPTH."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [item for item in level if isinstance(item, (dict, list, tuple))]
        if not level:
            return False
        level = [child for item in level for child in (item.values() if isinstance(item, dict) else item)]
    return True


def _one_line(problem: BaseException) -> str:
    if isinstance(problem, RecursionError):
        return f"it is nested deeper than {MAX_DEPTH} levels"
    text = " ".join(str(problem).split())
    return "it has an integer of thousands of digits" if "integer string conversion" in text else text[:200]
