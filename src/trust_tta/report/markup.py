"""HTML as text: tables and figures in one form, every string from outside escaped."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TypeAlias

from trust_tta.report.charts import Look, legend_marker
from trust_tta.report.palette import display_name
from trust_tta.report.text import safe

Runs: TypeAlias = Mapping[str, tuple[int, ...]]  # the places of the runs of each line, by its label


@dataclass(frozen=True)
class Entry:
    """One place of a table: its text, the number to sort by, what hovering says, and the runs it comes from."""

    text: str
    value: float | None = None
    tip: str = ""
    role: str = ""
    runs: tuple[int, ...] = ()
    small: str = ""


@dataclass(frozen=True)
class Line:
    """One row of a table; with a look it carries the method's marker and follows the method picker."""

    head: str
    entries: tuple[Entry, ...]
    look: Look | None = None
    runs: tuple[int, ...] = ()  # that its entries come from, where they do not say so themselves


def data_table(name: str, caption: str, header: Sequence[str], lines: Sequence[Line], *, groups: int = 0) -> str:
    """A sortable table with buttons for CSV and LaTeX; the first `groups` columns carry their number in data-d."""
    worded = {j for line in lines for j, entry in enumerate(line.entries, start=1) if entry.role == "words"}
    heads = [
        f'<th scope="col"{_column(j, groups)}{_aligned(j in worded)}>{_sorter(text)}</th>'
        for j, text in enumerate(header)
    ]
    body = "".join(_row(line, groups) for line in lines)
    several = any(entry.small for line in lines for entry in line.entries)
    spread = '<button type="button" data-spread aria-pressed="false">± std</button>' if several else ""
    return (
        f'<figure class="table" data-name="{escape(name)}"><div class="scroll" tabindex="-1"><table>'
        f"<caption><span>{escape(caption)}</span></caption><thead><tr>{''.join(heads)}</tr></thead><tbody>{body}</tbody></table></div>"
        f'<div class="tools">{spread}<button type="button" data-save="csv">CSV</button>'
        '<button type="button" data-save="tex">LaTeX</button></div></figure>'
    )


def drawing(name: str, caption: str, chart: str, *, role: str = "") -> str:
    """A figure with its caption and a button that saves it as SVG."""
    return (
        f'<figure class="drawing {role}" data-name="{escape(name)}"><div class="scroll">{chart}</div>'
        f"<figcaption>{escape(caption)}</figcaption>"
        '<div class="tools"><button type="button" data-save="svg">SVG</button></div></figure>'
    )


def choices(legend: str, names: Sequence[str], charts: Sequence[str]) -> str:
    """Several contents of which one is shown, picked by name."""
    buttons = "".join(
        f'<button type="button" aria-pressed="{"true" if i == 0 else "false"}">{escape(name)}</button>'
        for i, name in enumerate(names)
    )
    panes = "".join(f'<div class="pane"{"" if i == 0 else " hidden"}>{chart}</div>' for i, chart in enumerate(charts))
    bar = f'<div class="segments" role="group" aria-label="{escape(legend)}">{buttons}</div>'
    return f'<div class="choices">{bar}{panes}</div>'


def dropdown(legend: str, names: Sequence[str], charts: Sequence[str]) -> str:
    """Like `choices`, for more than fit on a line."""
    options = "".join(f"<option>{escape(name)}</option>" for name in names)
    panes = "".join(f'<div class="pane"{"" if i == 0 else " hidden"}>{chart}</div>' for i, chart in enumerate(charts))
    bar = f'<label class="pick">{escape(legend)} <select>{options}</select></label>'
    return f'<div class="choices">{bar}{panes}</div>'


def prose(text: str) -> str:
    """Escaped text in which a percent sign stays with its number."""
    return escape(text).replace(" %", "&nbsp;%")


def section(title: str, *parts: str, note: str = "", role: str = "") -> str:
    """A titled part of the page; empty where there is nothing to show."""
    if not any(parts):
        return ""
    said = f'<p class="note">{prose(note)}</p>' if note else ""
    return f'<section class="part {role}"><h3>{escape(title)}</h3>{said}{"".join(parts)}</section>'


def chip(kind: str, index: int, text: str, look: Look | None = None) -> str:
    """A button that shows or hides a method or a domain everywhere in its group."""
    mark = legend_marker(look) if look is not None else ""
    return f'<button type="button" class="chip" data-{kind}="{index}" aria-pressed="true">{mark}{escape(text)}</button>'


def embedded_json(value: object) -> str:
    """JSON that may stand inside a script element: nothing in it can end the element."""
    text = json.dumps(_finite(value), ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _row(line: Line, groups: int) -> str:
    mark = legend_marker(line.look) if line.look is not None else ""
    series = f' data-s="{line.look.index}"' if line.look is not None else ""
    series += f' data-r="{",".join(map(str, line.runs))}"' if line.runs else ""
    name = display_name(line.head) if line.look is not None else line.head
    cells = "".join(_entry(entry, _column(j + 1, groups)) for j, entry in enumerate(line.entries))
    return f'<tr{series}><th scope="row"><span class="who">{mark}{escape(name)}</span></th>{cells}</tr>'


def _entry(entry: Entry, column: str) -> str:
    attributes = column
    attributes += f' data-v="{entry.value!r}"' if entry.value is not None and math.isfinite(entry.value) else ""
    attributes += f' data-tip="{escape(entry.tip)}"' if entry.tip else ""
    attributes += f' data-r="{",".join(map(str, entry.runs))}"' if entry.runs else ""
    attributes += f' class="{entry.role}"' if entry.role else ""
    small = f"<small>{escape(entry.small)}</small>" if entry.small else ""
    return f"<td{attributes}>{escape(entry.text)}{small}</td>"


def _column(j: int, groups: int) -> str:
    return f' data-d="{j - 1}"' if 1 <= j <= groups else ""


def _aligned(words: bool) -> str:
    return ' class="words"' if words else ""


def _sorter(text: str) -> str:
    return f'<button type="button" class="sort">{escape(text)}</button>'


def _finite(value: object) -> object:
    """JSON has no NaN: such numbers become null; text is made safe to show."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return safe(value)
    if isinstance(value, dict):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return value
