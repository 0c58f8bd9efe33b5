"""Charts as PDF and SVG figures for papers, drawn by matplotlib in the page's colors and markers."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

from trust_tta.atomic import replacing
from trust_tta.optional import require
from trust_tta.report.chart import Chart, Point, split_outliers
from trust_tta.report.charts import paper_charts
from trust_tta.report.model import Report, Variant

Axes: TypeAlias = Any  # of matplotlib

MARKERS = {
    "circle": "o", "square": "s", "diamond": "D", "up": "^", "down": "v",
    "left": "<", "plus": "P", "cross": "X", "star": "*", "right": ">", "pentagon": "p", "hexagon": "H", "thin": "d",
}  # fmt: skip
STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e8e6e1",
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 7.5,
    "svg.fonttype": "none",
    "pdf.fonttype": 42,
    "svg.hashsalt": "trust-tta",
}


def write_figures(report: Report, folder: str | os.PathLike[str]) -> list[Path]:
    """Write the paper charts of a report, each as PDF and SVG; returns the files."""
    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    names: set[str] = set()
    for where, chart in paper_charts(report):
        name = re.sub(r"[^\w.-]", "_", f"{chart.name} {where}".strip())[:90]
        unique = next(n for i in range(1, 10_000) if (n := name if i == 1 else f"{name}_{i}") not in names)
        names.add(unique)
        written += save(out / unique, chart)
    return written


def save(stem: Path, chart: Chart) -> list[Path]:
    """One chart as `<stem>.pdf` and `<stem>.svg`."""
    matplotlib, figures = (require(name, extra="figures") for name in ("matplotlib", "matplotlib.figure"))
    rows, columns = max(len(chart.rows), len(chart.categories)), len(chart.categories)
    sizes = {
        "dots": (5.5, max(0.3, 0.03 * len(chart.series)) * rows + 1.2),
        "scatter": (5.2, 3.2),
        "lines": (5.2, 3.2),
        "heatmap": (0.42 * columns + 1.4, 0.4 * len(chart.rows) + 1.0),
    }
    draw = {"dots": _dots, "scatter": _scatter, "lines": _lines, "heatmap": _heatmap}
    with matplotlib.rc_context(STYLE):
        figure = figures.Figure(figsize=sizes[chart.kind], layout="constrained")
        draw[chart.kind](figure.add_subplot(), chart)
        files = [stem.with_name(f"{stem.name}.{ending}") for ending in ("pdf", "svg")]
        for file in files:
            metadata = {"CreationDate": None} if file.suffix == ".pdf" else {"Date": None}
            with replacing(file) as temporary:
                figure.savefig(temporary, format=file.suffix[1:], metadata=metadata)
    return files


def _dots(axes: Axes, chart: Chart) -> None:
    shown = [s for s in chart.series if s.points]
    for i, series in enumerate(shown):
        offset = 0.7 * ((i + 0.5) / len(shown) - 0.5) if chart.rows_of == "domain" else 0.0
        rows = [point.x + offset for point in series.points]
        values = [chart.shown(point.y) for point in series.points]
        style = {"linestyle": "none", "elinewidth": 0.6, **_marker(series.variant, 4)}
        axes.errorbar(values, rows, xerr=_errors(chart, series.points), **style)
    axes.set_yticks(range(len(chart.categories)), chart.categories, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel(chart.y_label)
    if chart.rows_of == "domain":
        axes.figure.legend(ncols=min(6, len(shown)), loc="outside upper center")


def _scatter(axes: Axes, chart: Chart) -> None:
    for series in chart.series:
        (point,) = series.points
        style = {"linestyle": "none", "elinewidth": 0.6, **_marker(series.variant, 7)}
        axes.errorbar(point.x, chart.shown(point.y), yerr=_errors(chart, series.points), **style)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    _cut_outliers(axes, chart)
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    axes.figure.legend(loc="outside right upper")


def _lines(axes: Axes, chart: Chart) -> None:
    for series in chart.series:
        few = len(series.points) <= 16
        style = _marker(series.variant, 5) if few else {"color": series.variant.style.light}
        style |= {"linestyle": ("-", "--", ":", "-.")[min(series.variant.number, 3)], "label": series.variant.name}
        x, y = [point.x for point in series.points], [chart.shown(point.y) for point in series.points]
        axes.errorbar(x, y, yerr=_errors(chart, series.points), elinewidth=0.6, **style)
    if chart.x_scale == "doubling":
        ticks = sorted({point.x for series in chart.series for point in series.points})
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    if chart.categories:
        axes.set_xticks(range(len(chart.categories)), chart.categories, rotation=35, ha="right")
    else:
        _cut_outliers(axes, chart)
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    if len(chart.series) > 6:
        axes.figure.legend(loc="outside right upper")
    else:
        axes.legend()


def _heatmap(axes: Axes, chart: Chart) -> None:
    grid = chart.heatmap
    if grid is None:
        return
    axes.pcolormesh(grid.shades, cmap="Blues_r", vmin=-0.1, vmax=1.3)
    for i, row in enumerate(grid.values):
        for j, value in enumerate(row):
            color = "white" if grid.shades[i][j] < 0.45 else "black"
            weight = "bold" if (i, j) in grid.framed else "normal"
            where = {"ha": "center", "va": "center", "fontsize": 6}
            axes.text(j + 0.5, i + 0.5, f"{value:.2f}", color=color, weight=weight, **where)
    axes.set_xticks([j + 0.5 for j in range(len(chart.categories))], chart.categories, rotation=60, fontsize=7)
    axes.set_yticks([i + 0.5 for i in range(len(chart.rows))], chart.rows)
    axes.invert_yaxis()
    axes.grid(visible=False)


def _cut_outliers(axes: Axes, chart: Chart) -> None:
    """Cut the vertical axis above series that would compress the others, and say so."""
    kept, outliers = split_outliers(chart.series)
    if outliers:
        values = [chart.shown(p.y) for s in kept for p in s.points if math.isfinite(p.y)]
        margin = 0.08 * (max(values) - min(values))
        axes.set_ylim(min(values) - margin, max(values) + margin)
        names = ", ".join(s.variant.name for s in outliers)
        axes.set_title(f"below the frame: {names}", fontsize=7, loc="right")


def _errors(chart: Chart, points: Sequence[Point]) -> list[float] | None:
    """Half-widths of the intervals, or None without any."""
    found = [0.0 if point.error is None else chart.shown(point.error) for point in points]
    return found if any(found) else None


def _marker(variant: Variant, size: float) -> dict[str, Any]:
    color = variant.style.light
    return {
        "marker": MARKERS[variant.style.shape(variant.number)],
        "markersize": size,
        "color": color,
        "markerfacecolor": "white" if variant.style.hollow else color,
        "label": variant.name,
    }
