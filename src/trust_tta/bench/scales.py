"""From the tables of a file to those of single experiments: its parts, its small scale, the flags given beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trust_tta.bench.aliases import merge, translate
from trust_tta.data.classes import fold_name
from trust_tta.errors import ConfigError

PARTS, SMALL = "parts", "small"


@dataclass(frozen=True)
class Tables:
    """The tables of one experiment; `where` stands before its mistakes."""

    where: str
    content: dict[str, Any]


def full_scale(content: Mapping[str, Any], mistakes: list[str]) -> list[Tables]:
    """One experiment for each of the file's [[parts]], or the file itself; a part's sections replace the file's."""
    base = translate({name: value for name, value in content.items() if name not in (PARTS, SMALL)})
    parts = content.get(PARTS)
    if parts is None:
        return [Tables("", base)]
    if not isinstance(parts, list) or not parts or not all(isinstance(part, Mapping) for part in parts):
        mistakes.append(f"{PARTS}: {parts!r} is not a list of tables; write [[{PARTS}]] before each")
        return [Tables("", base)]
    return [Tables(f"{PARTS}[{i}]: ", {**base, **translate(part)}) for i, part in enumerate(parts, start=1)]


def small_scale(content: Mapping[str, Any], *, name: str, mistakes: list[str]) -> Tables | None:
    """The file with the sections of [small] in place of its own: one experiment, with a name and store of its own."""
    section = content.get(SMALL)
    if section is None:
        return None
    if not isinstance(section, Mapping):
        mistakes.append(f"{SMALL}: {section!r} is not a table; write [{SMALL}.data] and the like")
        return None
    left_out = (PARTS, SMALL, "store")
    base = translate({name: value for name, value in content.items() if name not in left_out})
    base["experiment"] = f"{base.get('experiment', name)}-{SMALL}"
    return Tables(f"{SMALL}: ", {**base, **translate(section)})


def pick_parts(parts: Sequence[Tables], dataset: str) -> list[Tables]:
    """The parts of one data set."""
    data = [part.content.get("data") for part in parts]
    present = [str(table.get("dataset")) if isinstance(table, Mapping) else "none" for table in data]
    picked = [p for p, name in zip(parts, present, strict=True) if fold_name(name) == fold_name(dataset)]
    if not picked:
        raise ConfigError(f"no part is of the data set {dataset!r}; the parts are of {', '.join(present)}")
    return picked


def change(content: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The tables with the changes of a command line: `methods` picks among those given, `method_options` sets."""
    rest = {name: value for name, value in changes.items() if name not in ("methods", "method_options")}
    merged = merge(content, rest)
    entries = merged.get("methods", [])
    tables = [{"name": e} if isinstance(e, str) else e for e in (entries if isinstance(entries, list) else [entries])]
    if not all(isinstance(table, Mapping) for table in tables):  # told with the other mistakes
        return merged
    if "methods" in changes:
        tables = _pick(tables, changes["methods"])
    for method, option, value in changes.get("method_options", ()):
        if method not in [table.get("name") for table in tables]:
            raise ConfigError(f"the option {method}.{option} is for a method that is not run; add it to --methods")
        tables = [{**table, option: value} if table.get("name") == method else table for table in tables]
    merged["methods"] = tables
    return merged


def _pick(tables: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[Mapping[str, Any]]:
    """The tables with these names, in this order; a name without a table stands for the method's defaults."""
    return [table for name in names for table in ([t for t in tables if t.get("name") == name] or [{"name": name}])]
