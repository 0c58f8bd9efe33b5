"""Labels, sort order and number formats shared by all tables."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from decimal import ROUND_HALF_EVEN, Decimal
from typing import Any, TypeAlias

from trust_tta.config_io import read_asset
from trust_tta.results.record import CellKey

METHODS = (
    "source", "bn", "bn_alpha", "bn_ema", "tent", "eta", "eata", "rdumb", "sar", "deyo", "shot", "roid", "cmf", "cotta",
    "rotta", "lame", "neo", "t3a", "foa", "dpcore",
    "trust_naive", "trust", "ensemble", "repetition", "augmentation", "tide",
)  # fmt: skip
_CORRUPTIONS = tuple(tomllib.loads(read_asset("corruptions.toml"))["cifar"])
CORRUPTIONS, HELD_OUT = _CORRUPTIONS[:15], _CORRUPTIONS[15:]  # the 15 test corruptions, and the 4 for validation
DATASETS = ("cifar10-c", "cifar100-c", "imagenet-c", "imagenet-sketch", "imagenet-v2", "imagenet-r", "pacs")
BASELINES = ("source", "bn")  # methods that gains are measured against
MISSING = "–"

_KNOWN = {"method": METHODS, "domain": ("clean", *CORRUPTIONS, *HELD_OUT), "dataset": DATASETS}

SortKey: TypeAlias = tuple[int, float, str]


def make_label(method: str, options: Mapping[str, Any]) -> str:
    """A method's label with its options: "trust (k=2, merge=slerp)"."""
    shown = ", ".join(f"{name}={options[name]}" for name in sorted(options))
    return plain_text(f"{method} ({shown})" if shown else method)


def plain_text(text: str) -> str:
    """The text with a question mark for each control character."""
    return "".join(char if char.isprintable() or 0xD800 <= ord(char) < 0xE000 else "?" for char in text)


def sort_key(field: str, value: object) -> SortKey:
    """A sort key: known names in their fixed order, then numbers, then other names alphabetically, then None."""
    known = _KNOWN.get(field, ())
    if value in known:
        return 0, known.index(str(value)), ""
    if isinstance(value, int | float):
        return 1, float(value), ""
    return (3, 0.0, "") if value is None else (2, 0.0, str(value))


def cell_sort_key(key: CellKey) -> tuple[SortKey | str, ...]:
    """A sort key for cells, independent of when they ran."""
    names = ("experiment", "dataset", "setting", "severity", "domain", "method", "options", "batch_size", "seed")
    return (*(sort_key(name, getattr(key, name)) for name in names), key.digest)


def format_percent(x: float | None) -> str:
    """A fraction as percent with one digit, half to even on its shortest decimal: 0.7745 gives "77.4"."""
    return _format(x, scale=100, digits=1)


def format_gain(x: float | None) -> str:
    """A difference of two fractions in points, with its sign: "+1.3", "-0.2", "0.0"."""
    text = format_percent(x)
    return f"+{text}" if x is not None and x > 0 and text.strip("0.") else text


def format_number(x: float | None) -> str:
    """A number with three decimals."""
    return _format(x, scale=1, digits=3)


def _format(x: float | None, *, scale: int, digits: int) -> str:
    if x is None or math.isnan(x):
        return MISSING
    if math.isinf(x):
        return "inf" if x > 0 else "-inf"
    rounded = (Decimal(repr(float(x))) * scale).quantize(Decimal(1).scaleb(-digits), rounding=ROUND_HALF_EVEN)
    return f"{abs(rounded) if rounded == 0 else rounded:f}"
