"""Charts as PDF and SVG figures for papers: matplotlib draws the SVG elements of the page in light colors."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, TypeAlias
from xml.etree.ElementTree import Element

from trust_tta.atomic import replacing
from trust_tta.optional import require
from trust_tta.report import svg
from trust_tta.report.charts import Chart, paper_charts
from trust_tta.report.model import Report
from trust_tta.report.theme import NAMED_STYLES, OUTLINES, Style, style_of

Axes: TypeAlias = Any  # of matplotlib

PIXELS_PER_INCH = 100.0
INK, SOFT, FAINT = "#1d2026", "#596070", "#e6e3dc"
MARKERS = {
    "circle": "o", "square": "s", "diamond": "D", "up": "^", "down": "v",
    "left": "<", "plus": "P", "cross": "X", "star": "*", "right": ">", "pentagon": "p", "hexagon": "H", "thin": "d",
}  # fmt: skip
LINES: dict[str, dict[str, Any]] = {
    "grid": {"color": FAINT, "linewidth": 0.7},
    "rail": {"color": FAINT, "linewidth": 0.7},
    "whisker": {"linewidth": 0.9, "alpha": 0.55},
    "diagonal": {"color": SOFT, "linewidth": 0.7, "linestyle": "--"},
    "frontier": {"color": SOFT, "linewidth": 0.8, "linestyle": "--"},
    "trail": {"linewidth": 1.0, "alpha": 0.55},
    "curve": {"linewidth": 1.3},
}
DASHES = {"v0": "-", "v1": "--", "v2": ":", "v3": "-."}
STYLE = {"font.size": 8, "svg.fonttype": "none", "pdf.fonttype": 42, "svg.hashsalt": "trust-tta"}


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
    drawing = svg.draw(chart)
    width, height = map(float, drawing.attrib["viewBox"].split()[2:])
    with matplotlib.rc_context(STYLE):
        figure = figures.Figure(figsize=(width / PIXELS_PER_INCH, height / PIXELS_PER_INCH))
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set(xlim=(0, width), ylim=(height, 0))
        axes.axis("off")
        _draw(axes, drawing, 0.0)
        for order, artist in enumerate(axes.get_children()):
            artist.set_zorder(order)
        if chart.rows_of == "domain":  # on the page its buttons are the legend
            keys = []
            for variant in (series.variant for series in chart.series):
                style = style_of(variant.method)
                letter, look = MARKERS[style.shape(variant.number)], _marker_style(style, 5.0, hollow=style.hollow)
                keys += axes.plot([], [], letter, label=variant.name, **look)
            figure.legend(handles=keys, ncols=6, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
        files = [stem.with_name(f"{stem.name}.{ending}") for ending in ("pdf", "svg")]
        for file in files:
            metadata = {"CreationDate": None} if file.suffix == ".pdf" else {"Date": None}
            with replacing(file) as temporary:
                figure.savefig(temporary, format=file.suffix[1:], metadata=metadata, bbox_inches="tight")
    return files


def _draw(axes: Axes, shape: Element, down: float) -> None:
    """Draw an SVG element and its children, moved down."""
    get, classes = shape.attrib.get, shape.attrib.get("class", "").split()
    style = next((NAMED_STYLES[name] for name in classes if name in NAMED_STYLES), None)
    if shape.tag == "line":
        ends = [float(get(name, "")) for name in ("x1", "x2", "y1", "y2")]
        axes.plot(ends[:2], [end + down for end in ends[2:]], **_line_style(classes, style))
    elif shape.tag == "path" and "mark" in classes:
        x, y, size = map(float, re.findall(r"-?[\d.]+", get("transform", "")))
        letter = next(MARKERS[name] for name, outline in OUTLINES.items() if outline == get("d"))
        axes.plot(x, y + down, letter, **_marker_style(style, size, hollow="hollow" in classes))
    elif shape.tag == "path":
        for piece in get("d", "").split("M")[1:]:
            points = [tuple(map(float, point.split())) for point in piece.split("L")]
            axes.plot([x for x, _ in points], [y + down for _, y in points], **_line_style(classes, style))
    elif shape.tag == "text":
        turned = re.match(r"rotate\((\S+) ", get("transform", ""))
        axes.text(
            float(get("x", "")),
            float(get("y", "")) + down,
            (shape.text or "").replace("$", r"\$"),
            ha={"middle": "center", "end": "right"}.get(get("text-anchor", ""), "left"),
            rotation=-float(turned[1]) if turned else 0,
            rotation_mode="anchor",
            color=style.light if style else SOFT if {"tick", "axis"} & set(classes) else INK,
        )
    moved = re.search(r"translate\(0 (\S+)\)", get("transform", ""))
    for inner in shape:
        _draw(axes, inner, down + (float(moved[1]) if moved else 0.0))


def _marker_style(style: Style | None, size: float, *, hollow: bool) -> dict[str, Any]:
    color = style.light if style else INK
    return {"markersize": 1.2 * size, "color": color, "markerfacecolor": "white" if hollow else color}


def _line_style(classes: list[str], style: Style | None) -> dict[str, Any]:
    found = LINES[classes[0]] | ({"color": style.light} if style else {})
    return found | ({"linestyle": DASHES[classes[-1]]} if classes[-1] in DASHES else {})
