"""The names of a group's lines: a method, with the options that set it apart from what its lines have in common."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, TypeAlias

from trust_tta.results import CellKey, canonical_json

Labelling: TypeAlias = Callable[[CellKey], str]
Stated: TypeAlias = tuple[str, Mapping[str, Any]]  # a method and the options that an experiment states for it


def row_labels(keys: Iterable[CellKey], stated: Iterable[Stated] = ()) -> Labelling:
    """ "trust (k=2)": options that vary, less those with the method's usual value.

    Usual is what the one line has that none of the `stated` methods, with the options that an experiment states,
    describes: it was run as it comes. Without such a line it is what most lines of the method have.
    """
    options: dict[str, dict[str, Mapping[str, Any]]] = defaultdict(dict)
    for key in keys:
        if key.options not in options[key.method]:
            options[key.method][key.options] = key.option_values
    known = list(stated)
    usual = {
        method: usual_options(_as_it_comes(found.values(), [o for m, o in known if m == method]))
        for method, found in options.items()
    }

    @cache
    def label(method: str, text: str) -> str:
        values, common = options[method][text], usual[method]
        shown = [f"{n}={values[n]}" for n in sorted(values) if canonical_json(values[n]) != common.get(n)]
        return f"{method} ({', '.join(shown)})" if shown else method

    return lambda key: label(key.method, key.options)


def stated_methods(configs: Iterable[str]) -> list[Stated]:
    """The methods of recorded configurations; one that was written by something else than `bench` states none."""
    stated: list[Stated] = []
    for text in configs:
        try:
            methods = json.loads(text)["methods"]
            stated += [(str(method["name"]), dict(method["options"])) for method in methods]
        except (ValueError, TypeError, KeyError):
            continue
    return stated


def _as_it_comes(variants: Iterable[Mapping[str, Any]], stated: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The one variant that no stated options describe; else all of them."""
    every, described = list(variants), [options for options in stated if options]
    plain = [values for values in every if not any(options.items() <= values.items() for options in described)]
    return plain if described and len(plain) == 1 else every


def usual_options(variants: list[Mapping[str, Any]]) -> dict[str, str]:
    """The value, as JSON, that more than half of the variants give to an option which all of them have."""
    found = {}
    for name in {name for values in variants for name in values}:
        counts = Counter(canonical_json(values[name]) for values in variants if name in values)
        value, count = counts.most_common(1)[0]
        if 2 * count > len(variants) == counts.total():
            found[name] = value
    return found
