"""The report as one self-contained HTML page; a new section is a table or chart that page.html calls."""

from __future__ import annotations

import base64
import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup, escape

from trust_tta import __version__
from trust_tta.atomic import write_whole
from trust_tta.config_io import read_asset
from trust_tta.report import charts, samples, svg, tables
from trust_tta.report.model import Report
from trust_tta.report.paper import compare, load_published
from trust_tta.report.summary import summarize
from trust_tta.report.text import domain_name, duration, safe
from trust_tta.report.theme import NAMED_STYLES
from trust_tta.results import Cell, CellKey, Provenance
from trust_tta.results.record import VALUES

_PROVENANCE = tuple(f.name for f in fields(Provenance) if f.name not in ("started", "finished"))
_KEY = tuple(f.name for f in fields(CellKey) if f.name != "options")


def write_page(report: Report, out_path: str | os.PathLike[str], *, title: str | None = None) -> None:
    write_whole(Path(out_path), render_page(report, title=title))


def render_page(report: Report, *, title: str | None = None) -> str:
    places = [tuple((name, getattr(cell.provenance, name)) for name in _PROVENANCE) for cell in report.cells]
    environments = Counter(places)
    runs = {cell.key: i for i, cell in enumerate(report.cells)}
    pictures: dict[bytes, int] = {}  # each picture once, with its index
    colors = [f".{name} {{ --light: {s.light}; --dark: {s.dark}; }}" for name, s in NAMED_STYLES.items()]
    html = (
        _templates()
        .get_template("page.html")
        .render(
            title=title or "Test-time adaptation: results",
            style=read_asset("page.css", room="report") + "\n".join(colors),
            script=read_asset("page.js", room="report"),
            version=__version__,
            report=report,
            published=load_published(),
            fullest=max(range(len(report.groups)), key=lambda i: len(report.groups[i].cells), default=0),
            environments=environments,
            runs=lambda cells: ",".join(str(runs[cell.key]) for cell in cells),
            picture_index=lambda picture: pictures.setdefault(picture, len(pictures)),
            data=lambda: _payload(report.cells, places, list(pictures)),
        )
    )
    return safe(html)


def embedded_json(value: object) -> str:
    """JSON that is safe inside a script element."""
    return htmlsafe_json_dumps(_finite(value), separators=(",", ":"), allow_nan=False)


@cache
def _templates() -> Environment:
    """The template environment: values are escaped, undefined names are errors."""
    environment = Environment(
        loader=PackageLoader("trust_tta.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {
        "charts": charts, "samples": samples, "tables": tables, "summarize": summarize, "duration": duration,
        "compare": compare,
    }  # fmt: skip
    environment.filters["domain"] = domain_name
    environment.filters["key"] = lambda variant: Markup(svg.legend_key(variant))
    environment.filters["svg"] = lambda chart: Markup(svg.render(chart))  # the renderer escapes all text
    environment.filters["json"] = embedded_json
    # A percent sign stays with its number.
    environment.filters["prose"] = lambda text: Markup(str(escape(text)).replace(" %", "&nbsp;%"))
    environment.tests["number"] = lambda value: value is not None and math.isfinite(value)
    return environment


def _payload(
    cells: Sequence[Cell], environments: Sequence[tuple[tuple[str, object], ...]], pictures: Sequence[bytes]
) -> dict[str, object]:
    """The data shown on a click on a number: a row per run, shared texts, and pictures as data URLs."""
    options, distinct = sorted({cell.key.options for cell in cells}), list(dict.fromkeys(environments))
    rows = [
        [
            cell.key.digest,
            *(getattr(cell.key, name) for name in _KEY),
            options.index(cell.key.options),
            *(getattr(cell.result, name) for name in VALUES),
            distinct.index(environment),
            cell.provenance.started,
            cell.provenance.finished,
        ]
        for cell, environment in zip(cells, environments, strict=True)
    ]
    kinds = ["image/png" if picture.startswith(b"\x89PNG") else "image/webp" for picture in pictures]
    return {
        "header": ["digest", *_KEY, "options", *VALUES, "environment", "started", "finished"],
        "runs": rows,
        "options": options,
        "environments": [dict(found) for found in distinct],
        "pictures": [f"data:{k};base64,{base64.b64encode(p).decode()}" for k, p in zip(kinds, pictures, strict=True)],
    }


def _finite(value: Any) -> Any:
    """A JSON value without NaN (null instead) and control characters."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return safe(value)
    if isinstance(value, dict):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return value
