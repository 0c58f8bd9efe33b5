"""How results are shown everywhere: labels of rows, the order of rows and columns, rounding."""

from __future__ import annotations

import json
import math
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from decimal import ROUND_HALF_EVEN, Decimal
from typing import Any, TypeAlias

from trust_tta.config_io import read_asset
from trust_tta.results.codec import canonical_json
from trust_tta.results.record import CellKey

METHODS = (
    "source", "bn", "bn_alpha", "bn_ema", "tent", "eta", "eata", "rdumb", "sar", "deyo", "shot", "roid", "cmf", "cotta",
    "rotta", "lame", "neo", "t3a", "foa", "dpcore",
    "trust_naive", "trust", "ensemble", "repetition", "augmentation", "tide",
)  # fmt: skip
_CORRUPTIONS = tuple(tomllib.loads(read_asset("corruptions.toml"))["cifar"])
CORRUPTIONS, HELD_OUT = _CORRUPTIONS[:15], _CORRUPTIONS[15:]  # those of the benchmarks, and the others
DATASETS = ("cifar10-c", "cifar100-c", "imagenet-c", "imagenet-sketch", "imagenet-v2", "imagenet-r", "pacs")
BASELINES = ("source", "bn")  # what gains are measured against: the first that is there
MISSING = "–"
PERCENTAGES = frozenset({"accuracy", "accuracy_before", "clean_accuracy", "ece"})
COUNTS = frozenset({"samples", "broken", "forwards", "backwards", "updates", "skipped_updates"})

_KNOWN = {"method": METHODS, "domain": ("clean", *CORRUPTIONS, *HELD_OUT), "dataset": DATASETS}
_MEBIBYTE = 2**20

Rank: TypeAlias = tuple[int, float, str]
Stated: TypeAlias = tuple[str, Mapping[str, Any], str]  # a method, the options stated for it, its label or ""


def make_label(method: str, options: Mapping[str, Any]) -> str:
    """The label of a method with the options that set it apart: "trust (k=2, merge=slerp)"."""
    shown = ", ".join(f"{name}={options[name]}" for name in sorted(options))
    return plain_text(f"{method} ({shown})" if shown else method)


def old_labels(cells: Iterable[tuple[CellKey, str]]) -> dict[str, str]:
    """Labels, by digest, for cells that were stored without one; each comes with its recorded configuration or "".

    A label that the configuration gives is taken. Else the label shows the options that vary among these cells, less
    those with the method's usual value: what the one variant has that no configuration states options for (it was run
    with its defaults), or else what most variants have.
    """
    pairs = list(cells)
    stated = _stated_methods({config for _, config in pairs})
    variants: dict[str, dict[str, Mapping[str, Any]]] = defaultdict(dict)
    for key, _ in pairs:
        if key.options not in variants[key.method]:
            variants[key.method][key.options] = key.option_values
    labels: dict[tuple[str, str], str] = {}
    for method, found in variants.items():
        known = [(options, label) for name, options, label in stated if name == method]
        usual = _usual_options(_defaults(list(found.values()), [options for options, _ in known]))
        for text, values in found.items():
            varied = {n: v for n, v in values.items() if canonical_json(v) != usual.get(n)}
            labels[method, text] = _given_label(values, known) or make_label(method, varied)
    return {key.digest: labels[key.method, key.options] for key, _ in pairs}


def plain_text(text: str) -> str:
    """The text without control characters, which a terminal would obey."""
    return "".join(char if char.isprintable() or 0xD800 <= ord(char) < 0xE000 else "?" for char in text)


def rank(field: str, value: object) -> Rank:
    """A sort key: known names first in their fixed order, then numbers by size, then words by alphabet, None last."""
    known = _KNOWN.get(field, ())
    if value in known:
        return 0, known.index(str(value)), ""
    if isinstance(value, int | float):
        return 1, float(value), ""
    return (3, 0.0, "") if value is None else (2, 0.0, str(value))


def key_rank(key: CellKey) -> tuple[Rank | str, ...]:
    """A total order on cells that does not depend on when they ran."""
    names = ("experiment", "dataset", "setting", "severity", "domain", "method", "options", "batch_size", "seed")
    return (*(rank(name, getattr(key, name)) for name in names), key.digest)


def format_percent(x: float | None) -> str:
    """A fraction as percent with one digit, half to even on its shortest decimal: 0.7745 gives "77.4"."""
    return _format(x, scale=100, digits=1)


def format_gain(x: float | None) -> str:
    """A difference of two fractions in points, with its sign: "+1.3", "-0.2", "0.0"."""
    text = format_percent(x)
    return f"+{text}" if x is not None and x > 0 and text.strip("0.") else text


def format_value(name: str, x: float | None) -> str:
    """A value of the result field `name` as every table shows it; memory is shown in MiB."""
    if name in PERCENTAGES:
        return format_percent(x)
    if name == "peak_memory":
        return _format(None if x is None else x / _MEBIBYTE, scale=1, digits=1)
    return _format(x, scale=1, digits=0 if name in COUNTS else 3)


def _format(x: float | None, *, scale: int, digits: int) -> str:
    if x is None or math.isnan(x):
        return MISSING
    if math.isinf(x):
        return "inf" if x > 0 else "-inf"
    rounded = (Decimal(repr(float(x))) * scale).quantize(Decimal(1).scaleb(-digits), rounding=ROUND_HALF_EVEN)
    return f"{abs(rounded) if rounded == 0 else rounded:f}"


def _stated_methods(configs: Iterable[str]) -> list[Stated]:
    """The methods of recorded configurations; one that was written by something else than `bench` states none."""
    stated: list[Stated] = []
    for text in sorted(configs):
        try:
            methods = json.loads(text)["methods"]
            stated += [(str(m["name"]), dict(m["options"]), plain_text(str(m.get("label", "")))) for m in methods]
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            continue
    return stated


def _given_label(values: Mapping[str, Any], known: Iterable[tuple[Mapping[str, Any], str]]) -> str:
    """The label stated with the options that describe `values` most closely."""
    fits = [(len(options), label) for options, label in known if options.items() <= values.items()]
    most = max((count for count, _ in fits), default=0)
    return next((label for count, label in fits if count == most and label), "")


def _defaults(variants: list[Mapping[str, Any]], stated: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The one variant that no stated options describe; else all of them."""
    described = [options for options in stated if options]
    plain = [values for values in variants if not any(options.items() <= values.items() for options in described)]
    return plain if described and len(plain) == 1 else variants


def _usual_options(variants: list[Mapping[str, Any]]) -> dict[str, str]:
    """The value, as JSON, that more than half of the variants give to an option which all of them have."""
    found = {}
    for name in {name for values in variants for name in values}:
        counts = Counter(canonical_json(values[name]) for values in variants if name in values)
        value, count = counts.most_common(1)[0]
        if 2 * count > len(variants) == counts.total():
            found[name] = value
    return found
