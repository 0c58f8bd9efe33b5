"""Figures for papers, as PDF and SVG, with the page's colours and markers; only those for which there are data."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from trust_tta.atomic import replacing
from trust_tta.optional import require
from trust_tta.report import analysis_figures, series
from trust_tta.report.charts import Curve, Dots, Look, off_scale
from trust_tta.report.groups import Group, read_contents
from trust_tta.report.palette import MARKERS, display_name, domain_name, style_of
from trust_tta.results.order_records import OrderRecord

Axes: TypeAlias = Any  # of matplotlib
Draw: TypeAlias = Callable[[Axes], None]

MARKS = {
    "circle": "o", "square": "s", "diamond": "D", "up": "^", "down": "v",
    "left": "<", "plus": "P", "cross": "X", "star": "*",
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
# The option behind each of the paper's curves, with the name of its file.
SWEEPS = {
    "k": "number_of_orders",
    "steps": "iterations",
    "evaluate_order": "evaluation_order",
    "kind": "augmentation",
    "merge": "merge",
}


def write_figures(
    store: str | os.PathLike[str], folder: str | os.PathLike[str], *, analyses: Sequence[OrderRecord] = ()
) -> list[Path]:
    """Draw all figures that the store and the analyses have data for; gives the files, a PDF and an SVG each."""
    groups = read_contents(store).groups
    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    names: set[str] = set()
    for name, size, draw in [*_figures(groups), *analysis_figures.figures(analyses)]:
        unique = next(n for i in range(1, 10_000) if (n := name if i == 1 else f"{name}_{i}") not in names)
        names.add(unique)
        written += save(out / unique, size, draw)
    return written


def save(stem: Path, size: tuple[float, float], draw: Draw) -> list[Path]:
    """One figure as `<stem>.pdf` and `<stem>.svg`."""
    pyplot = require("matplotlib.figure", extra="figures")
    with _style():
        figure = pyplot.Figure(figsize=size, layout="constrained")
        draw(figure.add_subplot())
        files = [stem.with_name(f"{stem.name}.{ending}") for ending in ("pdf", "svg")]
        for file in files:
            metadata = {"CreationDate": None} if file.suffix == ".pdf" else {"Date": None}
            with replacing(file) as temporary:
                figure.savefig(temporary, format=file.suffix[1:], metadata=metadata)
    return files


@contextmanager
def _style() -> Iterator[None]:
    matplotlib = require("matplotlib", extra="figures")
    with matplotlib.rc_context(STYLE):
        yield


def _figures(groups: Sequence[Group]) -> Iterator[tuple[str, tuple[float, float], Draw]]:
    for group in groups:
        if not group.cells:
            continue
        where = _slug(f"{group.experiment} {group.dataset} {group.setting} {group.batch_size}")
        width = max(4.0, 0.5 * len(group.domains) * max(1.0, len(group.rows) / 6) + 1.5)
        dots = series.domain_dots(group)
        yield f"bars_{where}", (min(width, 12), 3.2), _bars(group, dots, "accuracy in %")
        found = series.gains(dots)
        if found is not None and found[1]:
            against = f"gain over {display_name(found[0].label)} in points"
            yield f"gain_{where}", (min(width, 12), 3.2), _bars(group, found[1], against)
        if series.costs(group):
            yield f"cost_{where}", (5.2, 3.2), _cost(group)
        curves = series.running_accuracy(group)
        if curves:
            yield f"stream_{where}", (5.2, 3.2), _lines(curves, "images seen")
        for sweep in series.sweeps(group):
            name = SWEEPS.get(sweep.option, f"option_{_slug(sweep.option)}")
            yield f"{name}_{sweep.method}_{where}", (3.6, 2.8), _sweep(sweep)
        if _aggregation(group):
            yield f"aggregation_{where}", (3.6, 2.8), _columns(_aggregation(group))
    for sizes in series.batch_size_curves(groups):
        yield f"batch_size_{_slug(sizes.dataset)}", (3.6, 2.8), _lines(sizes.curves, "batch size", marked=True)


def _bars(group: Group, every: Sequence[Dots], label: str) -> Draw:
    def draw(axes: Axes) -> None:
        dots = [d for d in every if any(d.values)]
        width = 0.84 / max(len(dots), 1)
        for i, d in enumerate(dots):
            found = [(j, v) for j, v in enumerate(d.values) if v is not None]
            axes.bar(
                [j + (i - (len(dots) - 1) / 2) * width for j, _ in found],
                [100 * v[0] for _, v in found],
                width,
                yerr=[100 * (v[1] or 0.0) for _, v in found],
                color=style_of(d.look.method).light,
                alpha=1.0 if d.look.variant == 0 else max(0.35, 1 - 0.2 * d.look.variant),
                label=display_name(d.look.label),
                error_kw={"lw": 0.6},
            )
        axes.set_xticks(range(len(group.domains)), [domain_name(d) for d in group.domains], rotation=35, ha="right")
        axes.set_ylabel(label)
        axes.margins(x=0.01)
        axes.grid(visible=False, axis="x")
        axes.figure.legend(ncols=min(7, len(dots)), loc="outside upper center")

    return draw


def _cost(group: Group) -> Draw:
    def draw(axes: Axes) -> None:
        look = series.looks(group)
        for cost in series.costs(group):
            axes.plot(cost.passes, 100 * cost.accuracy, linestyle="none", **_mark(look[cost.row.label], 7))
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        _leave_out_far(axes, [[100 * cost.accuracy] for cost in series.costs(group)])
        axes.set_xlabel("forward and backward passes a batch")
        axes.set_ylabel("mean accuracy in %")
        axes.figure.legend(loc="outside right upper")

    return draw


def _lines(curves: Sequence[Curve], axis: str, *, marked: bool = False) -> Draw:
    def draw(axes: Axes) -> None:
        for curve in curves:
            mark = _mark(curve.look, 5) if marked else {"color": style_of(curve.look.method).light}
            dash = ("-", "--", ":", "-.")[min(curve.look.variant, 3)]
            x, y = [p[0] for p in curve.points], [100 * p[1] for p in curve.points]
            axes.plot(x, y, **{**mark, "linestyle": dash, "label": display_name(curve.look.label)})
        _leave_out_far(axes, [[100 * p[1] for p in curve.points] for curve in curves])
        axes.set_xlabel(axis)
        axes.set_ylabel("accuracy in %")
        if len(curves) > 6:
            axes.figure.legend(loc="outside right upper")
        else:
            axes.legend()

    return draw


def _leave_out_far(axes: Axes, lines: Sequence[Sequence[float]]) -> None:
    """Cut the frame above lines so low that they would squeeze the rest; a note says that it was cut."""
    floor = off_scale([sum(line) / len(line) for line in lines])
    kept = [v for line in lines if sum(line) / len(line) >= floor for v in line]
    if len(kept) < sum(map(len, lines)):
        margin = 0.08 * (max(kept) - min(kept))
        axes.set_ylim(min(kept) - margin, max(kept) + margin)
        axes.set_title("frame cut above the lowest", fontsize=7, loc="right")


def _sweep(sweep: series.Sweep) -> Draw:
    if not sweep.numeric:
        return _columns([(Look(0, str(x), sweep.method), y) for x, y in sweep.points])
    points = tuple((float(x), y) for x, y in sweep.points)
    return _lines([Curve(Look(0, sweep.method, sweep.method), points)], sweep.option, marked=True)


def _aggregation(group: Group) -> list[tuple[Look, float]]:
    """The ways to aggregate over orders, where more than one was run."""
    reached, look = series.means(group), series.looks(group)
    wanted = ("ensemble", "repetition", "augmentation", "trust_naive", "trust")
    rows = [row for row in group.rows if row.method in wanted and row.label in reached]
    several = len({row.method for row in rows} & {"ensemble", "repetition", "trust"}) > 1
    return [(look[row.label], reached[row.label]) for row in rows] if several else []


def _columns(values: Sequence[tuple[Look, float]]) -> Draw:
    def draw(axes: Axes) -> None:
        names = [display_name(look.label) for look, _ in values]
        heights = [100 * y for _, y in values]
        drawn = axes.bar(range(len(names)), heights, 0.6, color=[style_of(look.method).light for look, _ in values])
        axes.bar_label(drawn, fmt="%.1f", fontsize=7.5)
        axes.set_xticks(range(len(names)), names, rotation=25, ha="right")
        axes.set_ylim(max(0.0, min(heights) - 5), max(heights) + 2)
        axes.set_ylabel("accuracy in %")
        axes.grid(visible=False, axis="x")

    return draw


def _mark(look: Look, size: float) -> dict[str, Any]:
    style = style_of(look.method)
    shape = style.marker if look.variant == 0 else MARKERS[(MARKERS.index(style.marker) + look.variant) % len(MARKERS)]
    return {
        "marker": MARKS[shape],
        "markersize": size,
        "color": style.light,
        "markerfacecolor": "white" if style.hollow else style.light,
        "label": display_name(look.label),
    }


def _slug(text: str) -> str:
    return "".join(c if c.isalnum() or c in "-." else "_" for c in text)[:60]
