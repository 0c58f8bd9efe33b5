"""Groups as text for the terminal, and their tables as CSV, Markdown and LaTeX files."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from trust_tta.atomic import replacing
from trust_tta.report.groups import Group
from trust_tta.report.summary import summarise
from trust_tta.report.tables import layout, notes, to_csv, to_latex, to_markdown, to_text
from trust_tta.report.text import safe

_RENDERERS = {"csv": to_csv, "md": to_markdown, "tex": to_latex}


def group_text(group: Group) -> str:
    """Title, table, notes and summary of a group, as a terminal shows them."""
    lines = [f"{group.experiment}: {group.title}"]
    if group.cells:
        lines += [to_text(layout(group.table(), baseline=_baseline(group), spread=_spread(group))).rstrip()]
        lines += [f"({note})" for note in notes(group.table())]
    return "\n".join([*lines, " ".join(summarise(group)), ""])


def write_tables(groups: Sequence[Group], folder: str | os.PathLike[str]) -> list[Path]:
    """Each group's table in three formats; gives the files."""
    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for i, group in enumerate(group for group in groups if group.cells):
        name = re.sub(r"[^\w.-]+", "_", f"{i + 1:02d}_{group.experiment}_{group.title}")[:100]
        drawn = layout(group.table(), baseline=_baseline(group), spread=_spread(group))
        for ending, render in _RENDERERS.items():
            path = out / f"{name}.{ending}"
            with replacing(path) as temporary:
                temporary.write_text(safe(render(drawn)), encoding="utf-8")
            written.append(path)
    return written


def _baseline(group: Group) -> str | None:
    table = group.table()
    return next((row.label for row in group.rows if row.method in ("source", "bn") and row.label in table.rows), None)


def _spread(group: Group) -> bool:
    return any(entry.n > 1 for line in group.table().cells for entry in line)
