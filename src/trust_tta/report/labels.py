"""The names of a group's lines: a method, with the options that set it apart from what its lines have in common."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, TypeAlias

from trust_tta.results import CellKey, canonical_json

Labelling: TypeAlias = Callable[[CellKey], str]


def row_labels(keys: Iterable[CellKey]) -> Labelling:
    """ "trust (k=2)": options that vary, less those with the value that most lines of the method have."""
    options: dict[str, dict[str, Mapping[str, Any]]] = defaultdict(dict)
    for key in keys:
        if key.options not in options[key.method]:
            options[key.method][key.options] = key.option_values
    usual = {method: usual_options(list(found.values())) for method, found in options.items()}

    @cache
    def label(method: str, text: str) -> str:
        values, common = options[method][text], usual[method]
        shown = [f"{n}={values[n]}" for n in sorted(values) if canonical_json(values[n]) != common.get(n)]
        return f"{method} ({', '.join(shown)})" if shown else method

    return lambda key: label(key.method, key.options)


def usual_options(variants: list[Mapping[str, Any]]) -> dict[str, str]:
    """The value, as JSON, that more than half of the variants give to an option which all of them have."""
    found = {}
    for name in {name for values in variants for name in values}:
        counts = Counter(canonical_json(values[name]) for values in variants if name in values)
        value, count = counts.most_common(1)[0]
        if 2 * count > len(variants) == counts.total():
            found[name] = value
    return found
