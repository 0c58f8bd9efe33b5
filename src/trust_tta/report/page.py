"""One self-contained HTML page from a store: no network, no fonts to fetch, nothing but this file."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from html import escape
from importlib import resources
from pathlib import Path

from trust_tta._version import __version__
from trust_tta.atomic import replacing
from trust_tta.report import beside, charts, markup, pictures, sections, series
from trust_tta.report.accuracy import accuracy_table
from trust_tta.report.analysis_charts import analyses_part
from trust_tta.report.groups import Contents, Group, read_contents
from trust_tta.report.palette import palette_css
from trust_tta.report.published import load_published
from trust_tta.report.text import safe
from trust_tta.results import Cell, CellKey, Facts
from trust_tta.results.order_records import OrderRecord
from trust_tta.results.select import VALUES

_FACTS = tuple(f.name for f in fields(Facts) if f.name not in ("started", "finished"))
_KEY = tuple(f.name for f in fields(CellKey))


def write_page(
    store_path: str | os.PathLike[str],
    out_path: str | os.PathLike[str],
    *,
    title: str | None = None,
    analyses: Sequence[OrderRecord] = (),
) -> None:
    """Write the page of a store to `out_path`, whole or not at all."""
    html = render_page(read_contents(store_path), title=title, analyses=analyses)
    with replacing(Path(out_path)) as temporary:
        temporary.write_text(safe(html), encoding="utf-8")


def render_page(contents: Contents, *, title: str | None = None, analyses: Sequence[OrderRecord] = ()) -> str:
    """The page as text."""
    cells, groups = contents.cells, contents.groups
    run_index = {cell.key.digest: i for i, cell in enumerate(cells)}
    facts = _distinct_facts(cells)
    album: pictures.Album = {}
    shown = [_group(i, group, run_index, pictures.samples(group, contents, album)) for i, group in enumerate(groups)]
    if not shown:
        shown = ['<p class="summary lead">The store is empty: nothing has been planned or run yet.</p>']
    return _fill(
        _asset("page.html"),
        {
            "title": escape(title or "Test-time adaptation: results"),
            "style": _asset("page.css") + palette_css(),
            "status": escape(_status(contents)),
            "groups": _group_menu(groups),
            "body": "".join([*shown, _across(groups), analyses_part(analyses)]),
            "facts": _facts_part(cells, facts),
            "data": markup.embedded_json({**_payload(cells, facts), "pictures": pictures.addresses(album)}),
            "script": _asset("page.js"),
        },
    )


def _group(i: int, group: Group, run_index: Mapping[str, int], samples: str) -> str:
    charts_of_group = (
        markup.section("By domain", sections.by_domain(group)),
        markup.section("Accuracy against cost", sections.cost(group)),
        markup.section("Along the stream", sections.stream(group)),
        markup.section("Before and after the update", sections.before_after(group)),
    )
    labels = [row.label for row in group.rows]
    runs = {k: tuple(run_index[cell.key.digest] for cell in series.row_cells(group, k)) for k in labels}
    grid = "".join(f'<div class="cell">{part}</div>' for part in charts_of_group if part)
    parts = [
        sections.words(group),
        sections.pickers(group),
        markup.section("Accuracy", accuracy_table(group, run_index)),
        f'<div class="grid">{grid}</div>' if grid else "",
        sections.equal_cost(group, load_published(), runs),
        sections.stability(group),
        sections.calibration(group, runs),
        sections.ablations(group),
        samples,
        beside.comparisons(group, load_published(), runs),
    ]
    heading = f"<h2>{escape(group.experiment)} <span>{escape(group.title)}</span></h2>"
    return f'<section class="group" id="group-{i}">{heading}{"".join(parts)}</section>'


def _across(groups: Sequence[Group]) -> str:
    """What compares groups with each other."""
    drawn = [
        markup.drawing("batch size", f"Mean accuracy by batch size, {sizes.title}.", _batch_chart(sizes))
        for sizes in series.batch_size_curves(groups)
    ]
    sizes = markup.section("Batch size", f'<div class="grid free">{"".join(drawn)}</div>' if drawn else "")
    both = sizes + beside.sweep_comparisons(groups, load_published())
    return f'<section class="across"><h2>Across experiments</h2>{both}</section>' if both else ""


def _batch_chart(sizes: series.BatchSizes) -> str:
    return charts.line_chart(f"Batch size: {sizes.title}", sizes.curves, axis="batch size", doubling=True)


def _group_menu(groups: Sequence[Group]) -> str:
    """A choice of groups, the fullest shown first."""
    if len(groups) < 2:
        return ""
    fullest = max(range(len(groups)), key=lambda i: len(groups[i].cells))
    options = "".join(
        f'<option value="{i}"{" selected" if i == fullest else ""}>{escape(f"{g.experiment}: {g.title}")}</option>'
        for i, g in enumerate(groups)
    )
    return f'<label class="pick">results <select id="group">{options}</select></label>'


def _status(contents: Contents) -> str:
    counts = contents.counts
    parts = [f"{counts.done} cells finished"]
    parts += [f"{n} {word}" for n, word in ((counts.failed, "failed"), (counts.running, "running")) if n]
    parts += [f"{counts.pending} still to be run"] if counts.pending else []
    return f"{', '.join(parts)}. Written by trust-tta {__version__}."


def _distinct_facts(cells: Sequence[Cell]) -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
    for cell in cells:
        facts = _circumstances(cell)
        if facts not in found:
            found.append(facts)
    return found


def _circumstances(cell: Cell) -> dict[str, object]:
    values = asdict(cell.facts)
    return {name: values[name] for name in _FACTS}


def _payload(cells: Sequence[Cell], facts: Sequence[dict[str, object]]) -> dict[str, object]:
    """What a click on a number shows: a row a run, long texts once."""
    options = sorted({cell.key.options for cell in cells})
    places = {text: i for i, text in enumerate(options)}
    names = [name for name in _KEY if name != "options"]
    rows = [
        [
            cell.key.digest,
            *(getattr(cell.key, name) for name in names),
            places[cell.key.options],
            *(getattr(cell.result, name) for name in VALUES),
            facts.index(_circumstances(cell)),
            cell.facts.started,
            cell.facts.finished,
        ]
        for cell in cells
    ]
    header = ["digest", *names, "options", *VALUES, "facts", "started", "finished"]
    return {"header": header, "runs": rows, "options": options, "facts": list(facts)}


def _facts_part(cells: Sequence[Cell], facts: Sequence[dict[str, object]]) -> str:
    """The circumstances of the runs, one list for each that differs."""
    if not cells:
        return ""
    parts = []
    for i, found in enumerate(facts):
        count = sum(_circumstances(cell) == found for cell in cells)
        items = "".join(
            f"<dt>{escape(name)}</dt><dd>{escape(str(value))}</dd>"
            for name, value in found.items()
            if name != "config" and value is not None
        )
        config = f"<details><summary>configuration</summary><pre>{escape(str(found['config']))}</pre></details>"
        parts.append(f'<div class="facts" id="facts-{i}"><h4>{count} runs</h4><dl>{items}</dl>{config}</div>')
    return markup.section("How it was run", *parts)


def _asset(name: str) -> str:
    return resources.files("trust_tta.report").joinpath("assets", name).read_text(encoding="utf-8")


def _fill(template: str, values: Mapping[str, str]) -> str:
    """Put each value at its `<!--name-->`, in one pass, so that no value is read as a template."""
    return re.sub(r"<!--(\w+)-->", lambda found: values[found[1]], template)
