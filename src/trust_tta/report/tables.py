"""A table as plain text, Markdown, CSV and LaTeX: the same numbers, order and rounding in each."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from trust_tta.results.display import MISSING, PERCENTAGES, format_gain, format_value
from trust_tta.results.select import Aggregate, Table

SHORT_LABELS: Mapping[str, str] = MappingProxyType(
    {
        "gaussian_noise": "gauss",
        "shot_noise": "shot",
        "impulse_noise": "impulse",
        "defocus_blur": "defocus",
        "glass_blur": "glass",
        "motion_blur": "motion",
        "zoom_blur": "zoom",
        "brightness": "bright",
        "elastic_transform": "elastic",
        "pixelate": "pixel",
        "jpeg_compression": "jpeg",
    }
)
HIGHER_IS_BETTER = frozenset({"accuracy", "accuracy_before", "clean_accuracy"})
LOWER_IS_BETTER = frozenset({"nll", "ece", "brier", "seconds_median", "seconds_mean", "seconds_total", "peak_memory"})


@dataclass(frozen=True)
class Entry:
    """The text of one place in a table, its spread over seeds, and whether it is the best of its column."""

    text: str
    spread: str = ""
    best: bool = False


@dataclass(frozen=True)
class Layout:
    """A table ready to be drawn: a header and lines of entries, the row label first."""

    header: tuple[str, ...]
    lines: tuple[tuple[Entry, ...], ...]


def layout(
    table: Table, *, baseline: str | None = None, spread: bool = False, labels: Mapping[str, str] = SHORT_LABELS
) -> Layout:
    """Round every entry, mark the best of each column, add the mean, and the gain over the row `baseline`."""
    columns = [[line[j] for line in table.cells] for j in range(len(table.columns))]
    header = ["", *(labels.get(name, name) for name in table.columns)]
    if len(columns) > 1:
        columns.append(list(table.means))
        header.append("mean")
    drawn = [_column(table.value, column, spread) for column in columns]
    if baseline is not None:
        drawn.append([Entry(format_gain(gain, name=table.value)) for gain in table.gains(baseline)])
        header.append("gain")
    lines = tuple((Entry(row), *(column[i] for column in drawn)) for i, row in enumerate(table.rows))
    return Layout(tuple(header), lines)


def notes(table: Table) -> list[str]:
    """What a reader must know beside the numbers: unit, number of seeds, and what is missing."""
    counts = sorted({entry.n for line in table.cells for entry in line if entry.n})
    seeds = "no results" if not counts else f"mean over {counts[0]} seed" + ("" if counts == [1] else "s")
    if len(counts) > 1:
        seeds = f"mean over {counts[0]} to {counts[-1]} seeds"
    unit = " in percent" if table.value in PERCENTAGES else " in MiB" if table.value == "peak_memory" else ""
    missing = [
        f"{row} on {column}"
        for row, line in zip(table.rows, table.cells, strict=True)
        for column, entry in zip(table.columns, line, strict=True)
        if entry.missing
    ]
    return [f"{table.value}{unit}, {seeds}", *([f"missing: {', '.join(missing)}"] if missing else [])]


def to_text(drawn: Layout) -> str:
    """Aligned columns for a terminal; the best of each column carries a star."""
    lines = [[_plain(entry) + ("*" if entry.best else "") for entry in line] for line in drawn.lines]
    starred = [any(line[j].best for line in drawn.lines) for j in range(len(drawn.header))]
    # Unstarred entries keep the star's place, so that digits stand under digits.
    lines = [[t if t.endswith("*") or not starred[j] else f"{t} " for j, t in enumerate(line)] for line in lines]
    heads = [head + " " * star for head, star in zip(drawn.header, starred, strict=True)]
    widths = [max(len(line[j]) for line in [heads, *lines]) for j in range(len(heads))]
    rule = "  ".join("-" * width for width in widths)
    return "".join(
        f"{line}\n".replace(" \n", "\n") for line in [_align(heads, widths), rule, *(_align(x, widths) for x in lines)]
    )


def to_markdown(drawn: Layout) -> str:
    """A pipe table; the best of each column is bold."""
    rule = ["---", *["---:"] * (len(drawn.header) - 1)]
    body = [[_bold(_escape_pipe(_plain(e)), e.best, "**{}**") for e in line] for line in drawn.lines]
    rows = [[_escape_pipe(head) for head in drawn.header], rule, *body]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def to_csv(drawn: Layout) -> str:
    """Comma-separated values as shown; a spread, where there is one, follows in a column of its own."""
    spreads = [any(line[j].spread for line in drawn.lines) for j in range(len(drawn.header))]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(_flatten(zip(drawn.header, (f"{head} std" for head in drawn.header), spreads, strict=True)))
    for line in drawn.lines:
        texts = ("" if entry.text == MISSING else entry.text for entry in line)
        writer.writerow(_flatten(zip(texts, (entry.spread for entry in line), spreads, strict=True)))
    return out.getvalue()


def to_latex(drawn: Layout) -> str:
    """A booktabs tabular; the best of each column is bold."""
    body = [" & ".join(_latex_entry(entry) for entry in line) for line in drawn.lines]
    head = " & ".join(_escape_latex(name) for name in drawn.header)
    lines = [
        rf"\begin{{tabular}}{{l{'r' * (len(drawn.header) - 1)}}}",
        r"\toprule",
        rf"{head} \\",
        r"\midrule",
        *(rf"{line} \\" for line in body),
        r"\bottomrule",
        r"\end{tabular}",
    ]
    return "\n".join(lines) + "\n"


def _column(value: str, column: Sequence[Aggregate], spread: bool) -> list[Entry]:
    means = [entry.mean for entry in column if entry.mean is not None]
    best = None
    if len(column) > 1 and means and value in HIGHER_IS_BETTER | LOWER_IS_BETTER:
        best = format_value(value, max(means) if value in HIGHER_IS_BETTER else min(means))
    texts = [format_value(value, entry.mean) for entry in column]
    spreads = [format_value(value, entry.std) if spread and entry.std is not None else "" for entry in column]
    return [Entry(text, around, text == best) for text, around in zip(texts, spreads, strict=True)]


def _plain(entry: Entry) -> str:
    return f"{entry.text} ± {entry.spread}" if entry.spread else entry.text


def _align(line: Sequence[str], widths: Sequence[int]) -> str:
    first, *rest = (t.rjust(w) if j else t.ljust(w) for j, (t, w) in enumerate(zip(line, widths, strict=True)))
    return "  ".join([first, *rest])


def _bold(text: str, best: bool, pattern: str) -> str:
    return pattern.format(text) if best else text


def _escape_pipe(text: str) -> str:
    return text.replace("|", r"\|")


def _flatten(columns: Iterable[tuple[str, str, bool]]) -> list[str]:
    return [text for value, spread, wanted in columns for text in ((value, spread) if wanted else (value,))]


def _latex_entry(entry: Entry) -> str:
    text = _bold(_escape_latex(entry.text), entry.best, r"\textbf{{{}}}")
    return rf"{text} {{\scriptsize$\pm$ {_escape_latex(entry.spread)}}}" if entry.spread else text


def _escape_latex(text: str) -> str:
    special = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", MISSING: "--"}
    special |= {c: rf"\{c}" for c in "&%$#_{}"}
    return "".join(special.get(c, c) for c in text)
