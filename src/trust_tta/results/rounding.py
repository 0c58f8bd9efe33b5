"""The one rounding rule of terminal, page and paper."""

from __future__ import annotations

import math
from decimal import ROUND_HALF_EVEN, Decimal

MISSING = "–"

PERCENTAGES = frozenset({"accuracy", "accuracy_before", "clean_accuracy", "ece"})
COUNTS = frozenset({"samples", "broken", "forwards", "backwards", "updates", "skipped_updates"})
_MEBIBYTE = 2**20


def format_percent(x: float | None) -> str:
    """A fraction as percent with one digit, half to even on its shortest decimal: 0.7745 gives "77.4"."""
    return _format(x, scale=100, digits=1)


def format_gain(x: float | None, *, name: str = "accuracy") -> str:
    """A difference of two values of the field `name`, with its sign: "+1.3", "-0.2", "0.0"."""
    text = format_value(name, x)
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
