"""Charts as data: `charts` makes them from results, `svg` draws them for the page and `figures` for papers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from trust_tta.report.model import Variant
from trust_tta.results import format_percent

Kind: TypeAlias = Literal["dots", "scatter", "lines", "reliability"]
ACCURACY = "accuracy in %"


@dataclass(frozen=True)
class Point:
    """A value `y` (NaN: missing) at `x`, a number or the index of a category."""

    x: float
    y: float
    error: float | None = None  # half-width of the 95 % interval
    note: str = ""  # text of the tooltip after the value
    weight: float = 1.0  # opacity of a reliability bar


@dataclass(frozen=True)
class Series:
    """The points of one method."""

    variant: Variant
    points: tuple[Point, ...]

    @property
    def mean(self) -> float:
        return finite_mean(point.y for point in self.points)


@dataclass(frozen=True)
class Chart:
    """One chart.

    dots: a row per category, values on the horizontal axis; `rows_of` is what the page's pickers hide rows by.
    scatter: one point per series. lines: curves over numbers or over categories. reliability: accuracy by confidence.
    """

    kind: Kind
    name: str  # of its file
    title: str  # for screen readers
    series: tuple[Series, ...] = ()
    caption: str = ""
    choice: str = ""  # its name among the charts of a panel
    x_label: str = ""
    y_label: str = ACCURACY
    categories: tuple[str, ...] = ()
    rows_of: Literal["", "domain", "method"] = ""
    x_scale: Literal["linear", "log", "doubling"] = "linear"
    percent: bool = True  # values are fractions, shown in percent
    connected: tuple[tuple[Variant, ...], ...] = ()  # variants of a scatter plot joined by a line

    def shown(self, value: float) -> float:
        """A value in the unit of the axis."""
        return 100 * value if self.percent else value

    def text(self, value: float) -> str:
        return format_percent(value) if self.percent else f"{value:.4g}"


def split_outliers(series: Sequence[Series]) -> tuple[list[Series], list[Series]]:
    """Series on the chart's scale, and those so far below the others that they would compress it."""
    floor = outlier_floor([s.mean for s in series])
    return [s for s in series if not s.mean < floor], [s for s in series if s.mean < floor]


def outlier_floor(values: Sequence[float]) -> float:
    """The lowest value after a gap of 0.8 times the spread above it; at most a third of the values lie below."""
    order = sorted(v for v in values if math.isfinite(v))
    for cut in range(len(order) // 3, 0, -1):
        gap, spread = order[cut] - order[cut - 1], order[-1] - order[cut]
        if spread > 0 and gap > max(0.8 * spread, 0.02):
            return order[cut]
    return -math.inf


def finite_mean(values: Iterable[float]) -> float:
    """The mean of the finite values; NaN without any."""
    finite = [v for v in values if math.isfinite(v)]
    return math.fsum(finite) / len(finite) if finite else math.nan
