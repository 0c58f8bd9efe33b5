"""Reading experiments from TOML, from flags or from both; all mistakes are reported at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trust_tta.bench.config import RunConfig
from trust_tta.config_io import read_toml
from trust_tta.errors import ConfigError
from trust_tta.schema import did_you_mean, examine, show

PARTS, SMALL = "parts", "small"

# Names that other projects' configurations use, dotted and in any case, and ours for them.
ALIASES = {
    "setting": "stream.setting",
    "rng_seed": "stream.seeds",
    "stream.seed": "stream.seeds",
    "test.batch_size": "stream.batch_size",
    "corruption.dataset": "data.dataset",
    "corruption.type": "data.domains",
    "corruption.severity": "data.severity",
    "corruption.num_ex": "data.limit",
    "data_dir": "data.root",
    "model.arch": "model.name",
    "model.ckpt_path": "model.checkpoint",
    "model.adaptation": "methods",
    "optim.lr": "options.lr",
    "optim.steps": "options.steps",
    "model.episodic": "options.episodic",
}
_KEPT = ("methods", "model.overrides", "model.preprocessing", "data.options", "options")  # they have keys of their own


@dataclass(frozen=True)
class Tables:
    """The tables of one experiment; its mistakes are prefixed with `where`."""

    where: str
    content: dict[str, Any]


def read_config(path: Path | None, changes: Mapping[str, Any] | None = None, *, small: bool = False) -> RunConfig:
    """The only experiment of a TOML file (None: of `changes` alone), with the `changes` of the command line."""
    experiments = read_parts(path, changes, small=small)
    if len(experiments) > 1:
        names = ", ".join(config.data.dataset for config in experiments)
        raise ConfigError(f"{path} has {len(experiments)} parts ({names}); choose one with --dataset")
    return experiments[0]


def read_parts(
    path: Path | None, changes: Mapping[str, Any] | None = None, *, small: bool = False
) -> tuple[RunConfig, ...]:
    """The experiments of a TOML file, one for each of its [[parts]], or the one of its small scale.

    A data set among the `changes` selects the parts that use it. The small scale is checked even if not chosen.
    """
    content, changes = {} if path is None else read_toml(path), changes or {}
    mistakes: list[str] = []
    name, origin = ("experiment", "the command line") if path is None else (path.stem, str(path))
    little = _small_scale(content, name=name, mistakes=mistakes)
    chosen = _full_scale(content, mistakes)
    if small:
        if little is None and not mistakes:
            raise ConfigError(f"{origin} has no section [{SMALL}]; omit --small, or write one")
        chosen = [little] if little is not None else []
    elif PARTS in content and "dataset" in changes.get("data", {}):
        chosen = _pick_parts(chosen, changes["data"]["dataset"])
    configs = [_make(tables.where, change(tables.content, changes), name, mistakes) for tables in chosen]
    if little is not None and not small:
        _make(little.where, little.content, name, mistakes)
    if mistakes:
        raise _error_of(mistakes, origin)
    return tuple(config for config in configs if config is not None)


def parse_config(content: Mapping[str, Any], *, name: str, origin: str) -> RunConfig:
    """The experiment that nested tables describe; one ConfigError lists all mistakes."""
    mistakes: list[str] = []
    config = _make("", content, name, mistakes)
    if config is None or mistakes:
        raise _error_of(mistakes, origin)
    return config


def translate(content: Mapping[str, Any]) -> dict[str, Any]:
    """`content` under our names, as nested tables; what is unknown keeps its name."""
    translated: dict[str, Any] = {}
    for name, value in _flatten(content):
        if name == "corruption.num_ex" and value == -1:  # means all images
            continue
        if name == "corruption.severity" and isinstance(value, list) and len(value) == 1:
            (value,) = value
        _put(translated, ALIASES.get(name, name).split("."), value)
    return translated


def merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the values of `changes`, inner tables merged field by field."""
    merged = dict(base)
    for name, value in changes.items():
        inner = merged.get(name)
        both = isinstance(inner, Mapping) and isinstance(value, Mapping)
        merged[name] = merge(inner, value) if both else value  # type: ignore[arg-type]
    return merged


def change(content: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The tables with the changes of a command line: `methods` selects methods, `method_options` sets options."""
    rest = {name: value for name, value in changes.items() if name not in ("methods", "method_options")}
    merged = merge(content, rest)
    tables = [{"name": entry} if isinstance(entry, str) else entry for entry in _listed(merged.get("methods", []))]
    if not all(isinstance(table, Mapping) for table in tables):  # reported with the other mistakes
        return merged
    if "methods" in changes:  # in this order; a name without a table stands for the method's defaults
        named = {name: [table for table in tables if table.get("name") == name] for name in changes["methods"]}
        tables = [table for name, found in named.items() for table in found or [{"name": name}]]
    for method, option, value in changes.get("method_options", ()):
        if method not in [table.get("name") for table in tables]:
            raise ConfigError(f"the option {method}.{option} is for a method that is not run; add it to --methods")
        tables = [{**table, option: value} if table.get("name") == method else table for table in tables]
    merged["methods"] = tables
    return merged


def _error_of(mistakes: list[str], origin: str) -> ConfigError:
    count = "1 mistake" if len(mistakes) == 1 else f"{len(mistakes)} mistakes"
    return ConfigError(f"{origin} has {count}: {'; '.join(mistakes)}")


def _make(where: str, content: Mapping[str, Any], name: str, mistakes: list[str]) -> RunConfig | None:
    """One experiment; its mistakes are added with the prefix `where`, those of a shared section only once."""
    values = {"experiment": name, **content}
    named = values["experiment"] if isinstance(values["experiment"], str) else name
    values.setdefault("store", f"runs/{named}.sqlite")
    for section in ("model", "data"):
        values.setdefault(section, {})
    found = _share_options(values)
    config, wrong = examine(RunConfig, values)
    known = {mistake.split("]: ", 1)[-1] if mistake.startswith(PARTS) else mistake for mistake in mistakes}
    mistakes += [f"{where}{mistake}" for mistake in (*wrong, *found) if mistake not in known]
    return config


def _share_options(values: dict[str, Any]) -> list[str]:
    """Give the options of the table `options` to the methods that have them; returns what is wrong with it."""
    shared = values.pop("options", {})
    if not isinstance(shared, Mapping):
        return [f"options is {show(shared)}; give a table"]
    methods = [{"name": entry} if isinstance(entry, str) else entry for entry in _listed(values.get("methods", []))]
    known = [_options_of(method.get("name")) if isinstance(method, Mapping) else None for method in methods]
    if shared:
        values["methods"] = [
            method if valid is None else {**{o: v for o, v in shared.items() if o in valid}, **method}
            for method, valid in zip(methods, known, strict=True)
        ]
    if None in known:  # unknown methods are reported anyway
        return []
    every = {option for valid in known for option in valid or ()}
    return [f"options.{o}: no listed method has it; {did_you_mean(o, sorted(every))}" for o in shared if o not in every]


def _options_of(method: Any) -> Mapping[str, Any] | None:
    from trust_tta.methods.registry import method_options

    try:
        return method_options(method)
    except (ConfigError, TypeError):
        return None


def _full_scale(content: Mapping[str, Any], mistakes: list[str]) -> list[Tables]:
    """One experiment for each of the file's [[parts]], or the file itself; a part's sections replace the file's."""
    base = translate({name: value for name, value in content.items() if name not in (PARTS, SMALL)})
    parts = content.get(PARTS)
    if parts is None:
        return [Tables("", base)]
    if not isinstance(parts, list) or not parts or not all(isinstance(part, Mapping) for part in parts):
        mistakes.append(f"{PARTS}: {show(parts)} is not a list of tables; write [[{PARTS}]] before each")
        return [Tables("", base)]
    return [Tables(f"{PARTS}[{i}]: ", {**base, **translate(part)}) for i, part in enumerate(parts, start=1)]


def _small_scale(content: Mapping[str, Any], *, name: str, mistakes: list[str]) -> Tables | None:
    """The file with its sections replaced by those of [small]: one experiment, with its own name and store."""
    section = content.get(SMALL)
    if section is None:
        return None
    if not isinstance(section, Mapping):
        mistakes.append(f"{SMALL}: {show(section)} is not a table; write [{SMALL}.data] and the like")
        return None
    base = translate({key: value for key, value in content.items() if key not in (PARTS, SMALL, "store")})
    base["experiment"] = f"{base.get('experiment', name)}-{SMALL}"
    return Tables(f"{SMALL}: ", {**base, **translate(section)})


def _pick_parts(parts: Sequence[Tables], dataset: str) -> list[Tables]:
    """The parts of one data set."""
    from trust_tta.data.classes import fold_name

    data = [part.content.get("data") for part in parts]
    present = [str(table.get("dataset")) if isinstance(table, Mapping) else "none" for table in data]
    picked = [p for p, name in zip(parts, present, strict=True) if fold_name(name) == fold_name(dataset)]
    if not picked:
        raise ConfigError(f"no part is of the data set {dataset!r}; the parts are of {', '.join(present)}")
    return picked


def _flatten(content: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Dotted lower-case names and their values."""
    pairs: list[tuple[str, Any]] = []
    for key, value in content.items():
        name = f"{prefix}{key.lower()}"
        if isinstance(value, Mapping) and value and name not in _KEPT:
            pairs += _flatten(value, f"{name}.")
        else:
            pairs.append((name, value))
    return pairs


def _put(table: dict[str, Any], path: list[str], value: Any) -> None:
    """Set a value in nested tables, created where missing; anything else in their place is reported later."""
    for name in path[:-1]:
        inner: Any = table.setdefault(name, {})
        if not isinstance(inner, dict):
            return
        table = inner
    table[path[-1]] = value


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]
