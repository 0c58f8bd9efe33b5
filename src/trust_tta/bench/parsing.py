"""Reading experiments from a TOML file, from flags or from both; one error lists all mistakes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trust_tta.bench.config import RunConfig
from trust_tta.config_io import read_toml
from trust_tta.data.class_matching import fold_name
from trust_tta.errors import ConfigError
from trust_tta.schema import flag_of, schema_fields, show, validate

PARTS, SMALL = "parts", "small"


def read_parts(
    path: Path | None, changes: Mapping[str, Any] | None = None, *, small: bool = False
) -> tuple[RunConfig, ...]:
    """The experiments of a TOML file: one per [[parts]], or the one of [small].

    `changes`: values of the command line; a data set among them selects the parts that use it. The section [small] is
    checked even if it is not chosen.
    """
    content, changes = {} if path is None else read_toml(path), changes or {}
    mistakes: list[str] = []
    name, origin = ("experiment", "the command line") if path is None else (path.stem, str(path))
    base = {key: value for key, value in content.items() if key not in (PARTS, SMALL)}
    parts, reduced = content.get(PARTS), content.get(SMALL)
    chosen = [("", base)]  # the prefix of its mistakes, and the values of each experiment
    if isinstance(parts, list) and parts and all(isinstance(part, Mapping) for part in parts):
        chosen = [(f"{PARTS}[{i}]: ", {**base, **part}) for i, part in enumerate(parts, start=1)]
    elif parts is not None:
        mistakes.append(f"{PARTS}: {show(parts)} is not a list of tables; write [[{PARTS}]] before each")
    if reduced is not None and not isinstance(reduced, Mapping):
        mistakes.append(f"{SMALL}: {show(reduced)} is not a table; write [{SMALL}.data] and the like")
    elif reduced is not None:  # under its own name and store
        shared = {key: value for key, value in base.items() if key != "store"}
        shared["experiment"] = f"{base.get('experiment', name)}-{SMALL}"
        reduced = {**shared, **reduced}
    if small:
        if reduced is None and not mistakes:
            raise ConfigError(f"{origin} has no section [{SMALL}]; omit --small, or write one")
        chosen = [(f"{SMALL}: ", dict(reduced))] if isinstance(reduced, Mapping) else []
    elif parts is not None and "dataset" in changes.get("data", {}):
        chosen = _select_dataset(chosen, changes["data"]["dataset"])
    given = {f"{table}.{name}" for table, values in changes.items() if isinstance(values, Mapping) for name in values}
    given |= changes.keys() - {"methods"}  # which a file lists, too
    flags = {key: flag_of(key) for key, _, _ in schema_fields(RunConfig) if path is None or key in given}
    sections = [(where, apply_changes(values, changes)) for where, values in chosen]
    if isinstance(reduced, Mapping) and not small:
        sections.append((f"{SMALL}: ", dict(reduced)))
    return parse_sections(sections, name=name, origin=origin, mistakes=mistakes, flags=flags)[: len(chosen)]


def parse_config(content: Mapping[str, Any], *, name: str, origin: str) -> RunConfig:
    """The experiment that nested tables describe; one ConfigError lists all mistakes."""
    return parse_sections([("", content)], name=name, origin=origin)[0]


def parse_sections(
    sections: Sequence[tuple[str, Mapping[str, Any]]],
    *,
    name: str,
    origin: str,
    mistakes: Sequence[str] = (),
    flags: Mapping[str, str] | None = None,
) -> tuple[RunConfig, ...]:
    """One experiment per section (prefix of its error messages, and values); one error lists all mistakes.

    The error begins with the `mistakes` found before, and names a mistake that several sections share once.
    """
    listed, configs = list(mistakes), []
    for where, content in sections:
        values = {"experiment": name, **content}
        named = values["experiment"] if isinstance(values["experiment"], str) else name
        values = {"store": f"runs/{named}.sqlite", "model": {}, "data": {}, **values}
        config, wrong = validate(RunConfig, values, flags=flags)
        known = {mistake.split("]: ", 1)[-1] if mistake.startswith(PARTS) else mistake for mistake in listed}
        listed += [f"{where}{mistake}" for mistake in wrong if mistake not in known]
        configs += [config] if config is not None else []
    if listed:
        count = "1 mistake" if len(listed) == 1 else f"{len(listed)} mistakes"
        raise ConfigError(f"{origin} has {count}: {'; '.join(listed)}")
    return tuple(configs)


def merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the values of `changes`, inner tables merged field by field."""
    merged = dict(base)
    for name, value in changes.items():
        inner = merged.get(name)
        both = isinstance(inner, Mapping) and isinstance(value, Mapping)
        merged[name] = merge(inner, value) if both else value  # type: ignore[arg-type]
    return merged


def apply_changes(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`values` overridden by a command line: `methods` selects methods, `method_options` sets their options."""
    merged = merge(
        values, {name: value for name, value in changes.items() if name not in ("methods", "method_options")}
    )
    methods = merged.get("methods", [])  # one or a list of names and tables
    listed = methods if isinstance(methods, list | tuple) else [methods]
    tables = [{"name": entry} if isinstance(entry, str) else entry for entry in listed]
    if not all(isinstance(table, Mapping) for table in tables):  # reported with the other mistakes
        return merged
    if "methods" in changes:  # in this order; a name without a table stands for the method's defaults
        named = {name: [table for table in tables if table.get("name") == name] for name in changes["methods"]}
        tables = [table for name, found in named.items() for table in found or [{"name": name}]]
    for method, option, value in changes.get("method_options", ()):
        if method not in [table.get("name") for table in tables]:
            raise ConfigError(f"--option {method}.{option}: the method '{method}' is not run; add it to --methods")
        tables = [{**table, option: value} if table.get("name") == method else table for table in tables]
    if tables or "methods" in merged:
        merged["methods"] = tables
    return merged


def _select_dataset(sections: Sequence[tuple[str, Any]], dataset: str) -> list[tuple[str, Any]]:
    """The sections that use a data set."""
    data = [values.get("data") for _, values in sections]
    present = [str(table.get("dataset")) if isinstance(table, Mapping) else "none" for table in data]
    selected = [s for s, name in zip(sections, present, strict=True) if fold_name(name) == fold_name(dataset)]
    if not selected:
        raise ConfigError(f"no part uses the data set {dataset!r}; the parts use {', '.join(present)}")
    return selected
