"""Figures for papers, as PDF and SVG, with the page's colors and markers; only those for which there are data."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from trust_tta.atomic import replacing
from trust_tta.optional import require
from trust_tta.report import order_charts, series
from trust_tta.report.charts import off_scale
from trust_tta.report.model import Group, Report, Variant
from trust_tta.report.series import Curve, Dots
from trust_tta.report.text import domain_name, safe_line
from trust_tta.report.theme import STYLES
from trust_tta.results.order_records import EntropyByOrder, LossSurface, MemoryByK, OrderRecord, WeightNorms

Axes: TypeAlias = Any  # of matplotlib
Draw: TypeAlias = Callable[[Axes], None]
Figure: TypeAlias = tuple[str, tuple[float, float], Draw]  # name, size in inches, drawing

MARKS = {
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
# The option behind each of the paper's curves, with the name of its file.
SWEEPS = {
    "k": "number_of_orders",
    "steps": "iterations",
    "evaluate_order": "evaluation_order",
    "kind": "augmentation",
    "merge": "merge",
}


def write_figures(report: Report, folder: str | os.PathLike[str]) -> list[Path]:
    """Draw all figures that the report has data for; gives the files, a PDF and an SVG each."""
    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    names: set[str] = set()
    for name, size, draw in [*_figures(report.groups), *_order_figures(report.order_records)]:
        unique = next(n for i in range(1, 10_000) if (n := name if i == 1 else f"{name}_{i}") not in names)
        names.add(unique)
        written += save(out / unique, size, draw)
    return written


def save(stem: Path, size: tuple[float, float], draw: Draw) -> list[Path]:
    """One figure as `<stem>.pdf` and `<stem>.svg`."""
    matplotlib, pyplot = (require(name, extra="figures") for name in ("matplotlib", "matplotlib.figure"))
    with matplotlib.rc_context(STYLE):
        figure = pyplot.Figure(figsize=size, layout="constrained")
        draw(figure.add_subplot())
        files = [stem.with_name(f"{stem.name}.{ending}") for ending in ("pdf", "svg")]
        for file in files:
            metadata = {"CreationDate": None} if file.suffix == ".pdf" else {"Date": None}
            with replacing(file) as temporary:
                figure.savefig(temporary, format=file.suffix[1:], metadata=metadata)
    return files


def _figures(groups: Sequence[Group]) -> Iterator[Figure]:
    for group in groups:
        if not group.cells:
            continue
        where = _slug(f"{group.experiment} {group.dataset} {group.setting} {group.batch_size}")
        width = max(4.0, 0.5 * len(group.domains) * max(1.0, len(group.variants) / 6) + 1.5)
        wide, middle, small = (min(width, 12), 3.2), (5.2, 3.2), (3.6, 2.8)
        yield f"bars_{where}", wide, partial(_bars, group=group, every=series.domain_dots(group), label="accuracy in %")
        base = series.baseline(group)
        gains = series.domain_dots(group, over=base) if base is not None else []
        if base is not None and gains:
            label = f"gain over {base.name} in points"
            yield f"gain_{where}", wide, partial(_bars, group=group, every=gains, label=label)
        if group.costs:
            yield f"cost_{where}", middle, partial(_cost, group=group)
        curves = series.running_accuracy(group)
        if curves:
            yield f"stream_{where}", middle, partial(_lines, curves=curves, axis="images seen")
        for sweep in series.sweeps(group):
            name = SWEEPS.get(sweep.option, f"option_{_slug(sweep.option)}")
            lines = partial(_lines, curves=[sweep.curve], axis=sweep.option, marked=True)
            named = [(Variant(0, str(x), sweep.method), y) for x, (y, _) in sweep.points]
            draw = lines if sweep.numeric else partial(_columns, values=named)
            yield f"{name}_{sweep.method}_{where}", small, draw
        aggregation = _aggregation(group)
        if aggregation:
            yield f"aggregation_{where}", small, partial(_columns, values=aggregation)
    for sizes in series.batch_size_curves(groups):
        draw = partial(_lines, curves=sizes.curves, axis="batch size", marked=True)
        yield f"batch_size_{_slug(sizes.dataset)}", (3.6, 2.8), draw


def _bars(axes: Axes, group: Group, every: Sequence[Dots], label: str) -> None:
    dots = [d for d in every if any(d.values)]
    width = 0.84 / max(len(dots), 1)
    for i, d in enumerate(dots):
        found = [(j, v) for j, v in enumerate(d.values) if v is not None]
        axes.bar(
            [j + (i - (len(dots) - 1) / 2) * width for j, _ in found],
            [100 * v[0] for _, v in found],
            width,
            yerr=[100 * (v[1] or 0.0) for _, v in found],
            color=d.variant.style.light,
            alpha=1.0 if d.variant.number == 0 else max(0.35, 1 - 0.2 * d.variant.number),
            label=d.variant.name,
            error_kw={"lw": 0.6},
        )
    axes.set_xticks(range(len(group.domains)), [domain_name(d) for d in group.domains], rotation=35, ha="right")
    axes.set_ylabel(label)
    axes.margins(x=0.01)
    axes.grid(visible=False, axis="x")
    axes.figure.legend(ncols=min(7, len(dots)), loc="outside upper center")


def _cost(axes: Axes, group: Group) -> None:
    for cost in group.costs:
        half = group.mean(cost.variant.label).half_width
        mark = {"linestyle": "none", "elinewidth": 0.6, **_mark(cost.variant, 7)}
        axes.errorbar(cost.passes, 100 * cost.accuracy, yerr=None if half is None else 100 * half, **mark)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    _leave_out_far(axes, [[100 * cost.accuracy] for cost in group.costs])
    axes.set_xlabel("forward and backward passes per batch")
    axes.set_ylabel("mean accuracy in %")
    axes.figure.legend(loc="outside right upper")


def _lines(axes: Axes, curves: Sequence[Curve], axis: str, *, marked: bool = False) -> None:
    for curve in curves:
        mark = _mark(curve.variant, 5) if marked else {"color": curve.variant.style.light}
        mark |= {"linestyle": ("-", "--", ":", "-.")[min(curve.variant.number, 3)], "label": curve.variant.name}
        x, y = [p[0] for p in curve.points], [100 * p[1] for p in curve.points]
        halves = [0.0 if half is None else 100 * half for half in curve.halves]
        axes.errorbar(x, y, yerr=halves if any(halves) else None, elinewidth=0.6, **mark)
    _leave_out_far(axes, [[100 * p[1] for p in curve.points] for curve in curves])
    axes.set_xlabel(axis)
    axes.set_ylabel("accuracy in %")
    if len(curves) > 6:
        axes.figure.legend(loc="outside right upper")
    else:
        axes.legend()


def _leave_out_far(axes: Axes, lines: Sequence[Sequence[float]]) -> None:
    """Cut off lines so low that they would squeeze the rest; a note says so."""
    floor = off_scale([sum(line) / len(line) for line in lines])
    kept = [v for line in lines if sum(line) / len(line) >= floor for v in line]
    if len(kept) < sum(map(len, lines)):
        margin = 0.08 * (max(kept) - min(kept))
        axes.set_ylim(min(kept) - margin, max(kept) + margin)
        axes.set_title("frame cut above the lowest", fontsize=7, loc="right")


def _aggregation(group: Group) -> list[tuple[Variant, float]]:
    """The ways to aggregate over orders, where more than one was run."""
    reached = group.means()
    wanted = ("ensemble", "repetition", "augmentation", "trust_naive", "trust")
    found = [variant for variant in group.variants if variant.method in wanted and variant.label in reached]
    several = len({variant.method for variant in found} & {"ensemble", "repetition", "trust"}) > 1
    return [(variant, reached[variant.label]) for variant in found] if several else []


def _columns(axes: Axes, values: Sequence[tuple[Variant, float]]) -> None:
    names, heights = [variant.name for variant, _ in values], [100 * y for _, y in values]
    drawn = axes.bar(range(len(names)), heights, 0.6, color=[variant.style.light for variant, _ in values])
    axes.bar_label(drawn, fmt="%.1f", fontsize=7.5)
    axes.set_xticks(range(len(names)), names, rotation=25, ha="right")
    axes.set_ylim(max(0.0, min(heights) - 5), max(heights) + 2)
    axes.set_ylabel("accuracy in %")
    axes.grid(visible=False, axis="x")


def _mark(variant: Variant, size: float) -> dict[str, Any]:
    color = variant.style.light
    return {
        "marker": MARKS[variant.style.shape(variant.number)],
        "markersize": size,
        "color": color,
        "markerfacecolor": "white" if variant.style.hollow else color,
        "label": variant.name,
    }


def _order_figures(records: Sequence[OrderRecord]) -> Iterator[Figure]:
    """Figures of what was found out about orders; maps of the same orders share one."""
    maps = [r for r in records if isinstance(r, EntropyByOrder)]
    if maps:
        columns = len(order_charts.aligned(maps)[0])
        yield "entropy_by_order", (0.42 * columns + 1.4, 0.4 * len(maps) + 1.0), partial(_entropy, maps=maps)
    for record in records:
        if isinstance(record, LossSurface):
            yield "loss_surface", (3.8, 3.2), partial(_surface, record=record)
        elif isinstance(record, WeightNorms):
            yield "weight_norms", (5.5, 0.16 * len(record.names) + 1.0), partial(_norms, record=record)
        elif isinstance(record, MemoryByK):
            yield "memory_by_k", (3.4, 2.6), partial(_memory, record=record)


def _entropy(axes: Axes, maps: Sequence[EntropyByOrder]) -> None:
    columns, rows = order_charts.aligned(maps)
    shades = [order_charts.shades(numbers) for numbers in rows]
    for i, (record, numbers) in enumerate(zip(maps, rows, strict=True)):
        best = order_charts.lowest(numbers, record.k)
        for j, v in enumerate(numbers):
            ink: dict[str, Any] = {"color": "white" if shades[i][j] < 0.45 else "black"}
            ink |= {"weight": "bold" if j in best else None}
            axes.text(j, i, f"{v:.2f}", ha="center", va="center", fontsize=6, **ink)
    axes.imshow(shades, cmap="Blues_r", aspect="auto", vmin=-0.1, vmax=1.3)
    axes.set_xticks(range(len(columns)), columns, rotation=60, fontsize=7)
    axes.set_yticks(range(len(maps)), [safe_line(record.title) for record in maps])
    axes.grid(visible=False)


def _surface(axes: Axes, record: LossSurface) -> None:
    filled = axes.contourf(record.x, record.y, record.loss, 16, cmap="Blues_r")
    axes.figure.colorbar(filled, ax=axes, label="loss")
    mark = {"markeredgecolor": "white", "markersize": 9, "linestyle": "none"}
    x, y = [p.x for p in record.adapted], [p.y for p in record.adapted]
    axes.plot(x, y, "^", color=STYLES["trust_naive"].light, label="adapted", **mark)
    axes.plot(record.mean.x, record.mean.y, "X", color=STYLES["trust"].light, label="mean", **mark)
    axes.set_title(safe_line(record.title), fontsize=8)
    axes.legend()
    axes.grid(visible=False)


def _norms(axes: Axes, record: WeightNorms) -> None:
    places = range(len(record.names))
    axes.barh(places, record.mean, xerr=record.deviation, color=STYLES["trust"].light, error_kw={"lw": 0.6})
    axes.set_yticks(places, [safe_line(name) for name in record.names], fontsize=6)
    axes.invert_yaxis()
    axes.set_xlabel("mean L2 norm over orders, and deviation")
    axes.set_title(safe_line(record.title), fontsize=8)


def _memory(axes: Axes, record: MemoryByK) -> None:
    base = record.baseline or 1
    axes.plot(record.k, [p / base for p in record.peak], marker="*", markersize=8, color=STYLES["trust"].light)
    axes.set_xlabel("number of orders")
    axes.set_ylabel("relative peak memory")
    axes.set_title(safe_line(record.title), fontsize=8)


def _slug(text: str) -> str:
    return re.sub(r"[^\w.-]", "_", text)[:60]
