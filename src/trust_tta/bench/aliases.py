"""The names that configurations of the field use, and what they are called here."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

# From dotted names (any case) to ours; a list in the last column's place is taken apart by `translate`.
ALIASES: Mapping[str, str] = MappingProxyType(
    {
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
)
_KEPT = ("methods", "model.overrides", "model.preprocessing", "options")  # what lies within has names of its own


def translate(content: Mapping[str, Any]) -> dict[str, Any]:
    """`content` under our names, as nested tables; what is unknown keeps its name."""
    translated: dict[str, Any] = {}
    for name, value in _flatten(content):
        ours = ALIASES.get(name, name)
        if name == "corruption.num_ex" and value == -1:  # the field's word for all
            continue
        if name == "corruption.severity" and isinstance(value, list) and len(value) == 1:
            (value,) = value
        _put(translated, ours.split("."), value)
    return translated


def merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the values of `changes`, inner tables merged field by field."""
    merged = dict(base)
    for name, value in changes.items():
        inner = merged.get(name)
        both = isinstance(inner, Mapping) and isinstance(value, Mapping)
        merged[name] = merge(inner, value) if both else value  # type: ignore[arg-type]
    return merged


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
    """Set a value inside tables, made where missing; what is no table stays, to be told with the other mistakes."""
    for name in path[:-1]:
        inner: Any = table.setdefault(name, {})
        if not isinstance(inner, dict):
            return
        table = inner
    table[path[-1]] = value
