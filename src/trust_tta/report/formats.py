"""Tables as plain text, Markdown, CSV and LaTeX, the same numbers in each; a report in the terminal."""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path

from trust_tta.atomic import write_whole
from trust_tta.report.model import Report, ResultGroup, make_groups
from trust_tta.report.summary import summarize
from trust_tta.report.tables import DataTable, Row, TableCell, accuracy_table, cost_table, make_table, notes
from trust_tta.report.text import safe, safe_line
from trust_tta.results import Cell
from trust_tta.results.display import MISSING
from trust_tta.results.export import csv_text

_LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", MISSING: "--"}
_LATEX |= {c: rf"\{c}" for c in "&%$#_{}"}


def plain_table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> DataTable:
    """A table of texts; the first of each row is its name."""
    return make_table("", "", header, [Row(name, tuple(map(TableCell, rest))) for name, *rest in lines])


def to_text(table: DataTable) -> str:
    """Aligned columns for a terminal; the best of each column carries a star."""
    lines = [[row.name, *(_shown(e) + ("*" if e.best else "") for e in row.cells)] for row in table.rows]
    starred = [any(line[j].endswith("*") for line in lines) for j in range(len(table.columns))]
    # Unstarred entries keep the star's place, so that digits stand under digits.
    lines = [[t if t.endswith("*") or not starred[j] else f"{t} " for j, t in enumerate(line)] for line in lines]
    heads = [column.title + " " * star for column, star in zip(table.columns, starred, strict=True)]
    heads[0] = ""
    widths = [max(len(line[j]) for line in [heads, *lines]) for j in range(len(heads))]
    rule = ["-" * width for width in widths]
    left = [j == 0 or column.role == "words" for j, column in enumerate(table.columns)]
    texts = [
        "  ".join(t.ljust(w) if at_left else t.rjust(w) for t, w, at_left in zip(line, widths, left, strict=True))
        for line in [heads, rule, *lines]
    ]
    return "".join(f"{text.rstrip()}\n" for text in texts)


def to_markdown(table: DataTable) -> str:
    """A pipe table; the best of each column is bold."""
    rule = ["---", *("---" if column.role == "words" else "---:" for column in table.columns[1:])]
    body = [[row.name, *(f"**{_shown(e)}**" if e.best else _shown(e) for e in row.cells)] for row in table.rows]
    head = ["", *(column.title for column in table.columns[1:])]
    shown = [[escape(text, quote=False).replace("|", r"\|") for text in row] for row in (head, *body)]  # not as HTML
    return "".join(f"| {' | '.join(row)} |\n" for row in (shown[0], rule, *shown[1:]))


def to_csv(table: DataTable) -> str:
    """Comma-separated values as shown; a spread, where there is one, follows in a column of its own."""
    wide = [any(row.cells[j].std for row in table.rows) for j in range(len(table.columns) - 1)]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    heads = [[c.title, f"{c.title} std"] if w else [c.title] for c, w in zip(table.columns[1:], wide, strict=True)]
    writer.writerow(map(csv_text, [table.columns[0].title, *(title for both in heads for title in both)]))
    for row in table.rows:
        texts = [["" if "gap" in e.role.split() else e.text, *([e.std] if w else [])]
                 for e, w in zip(row.cells, wide, strict=True)]  # fmt: skip
        writer.writerow(map(csv_text, [row.name, *(text for both in texts for text in both)]))
    return out.getvalue()


def to_latex(table: DataTable) -> str:
    """A booktabs tabular; the best of each column is bold."""

    def entry(cell: TableCell) -> str:
        text = rf"\textbf{{{_latex(cell.text)}}}" if cell.best else _latex(cell.text)
        return rf"{text} {{\scriptsize$\pm$ {_latex(cell.std)}}}" if cell.std else text

    body = [" & ".join([_latex(row.name), *map(entry, row.cells)]) for row in table.rows]
    head = " & ".join(["", *(_latex(column.title) for column in table.columns[1:])])
    kinds = "".join("l" if column.role == "words" else "r" for column in table.columns[1:])
    lines = [rf"\begin{{tabular}}{{l{kinds}}}", r"\toprule", rf"{head} \\", r"\midrule"]
    return "\n".join([*lines, *(rf"{line} \\" for line in body), r"\bottomrule", r"\end{tabular}", ""])


RENDERERS: Mapping[str, Callable[[DataTable], str]] = {"csv": to_csv, "md": to_markdown, "tex": to_latex}


def write_tables(report: Report, folder: str | os.PathLike[str]) -> list[Path]:
    """Write each group's table of accuracies in three formats; returns the files."""
    written = []
    for i, group in enumerate(group for group in report.groups if group.cells):
        name = re.sub(r"[^\w.-]+", "_", f"{i + 1:02d}_{group.experiment}_{group.title}")[:100]
        drawn = accuracy_table(group)
        for ending, render in RENDERERS.items():
            written.append(Path(folder) / f"{name}.{ending}")
            write_whole(written[-1], safe(render(drawn)))
    return written


def tables_text(group: ResultGroup) -> str:
    """Title, accuracies by domain, and accuracy against cost."""
    if not group.cells:
        return f"{group.heading}\n"
    cost = cost_table(group)
    title = f"{group.heading}\n({'; '.join([*notes(group), '* best'])})"
    return f"{title}\n{to_text(accuracy_table(group))}" + (f"\n{to_text(cost)}" if cost else "")


def verdict(cells: Sequence[Cell]) -> str:
    """The best method and its margin, in two sentences for each group."""
    groups = make_groups(cells)
    several = len({group.experiment for group in groups}) > 1
    names = [f"{safe_line(group.experiment)}: " if several else "" for group in groups]
    return " ".join(name + " ".join(summarize(group)[:2]) for name, group in zip(names, groups, strict=True))


def _shown(cell: TableCell) -> str:
    return f"{cell.text}{cell.mark} ± {cell.std}" if cell.std else cell.text + cell.mark


def _latex(text: str) -> str:
    return "".join(_LATEX.get(c, c) for c in text)
