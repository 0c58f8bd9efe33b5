from __future__ import annotations

import csv
import io
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.results.samples import cell
from trust_tta.report.tables import Layout, layout, notes, to_csv, to_latex, to_markdown, to_text
from trust_tta.results import table

CELLS = [
    cell("source", "fog", 0.5004),
    cell("source", "gaussian_noise", 0.25),
    cell("trust_naive", "fog", 0.7),
    cell("trust", "fog", 0.7504, seed=0),
    cell("trust", "fog", 0.7604, seed=1),
    cell("trust", "gaussian_noise", 0.5, seed=0),
    cell("trust", "gaussian_noise", 0.5, seed=1),
]
TABLE = table(CELLS)


def test_text_is_aligned_and_marks_the_best() -> None:
    assert to_text(layout(TABLE, baseline="source")) == (
        "             gauss    fog   mean    gain\n"
        "-----------  ------  -----  -----  -----\n"
        "source        25.0   50.0   37.5     0.0\n"
        "trust_naive      –   70.0      –       –\n"
        "trust         50.0*  75.5*  62.8*  +25.2\n"
    )


def test_text_with_spread_over_seeds() -> None:
    assert to_text(layout(TABLE, spread=True)).splitlines()[-1] == "trust        50.0 ± 0.0*  75.5 ± 0.7*  62.8 ± 0.4*"


def test_markdown() -> None:
    assert to_markdown(layout(TABLE, baseline="source", labels={})) == (
        "|  | gaussian_noise | fog | mean | gain |\n"
        "| --- | ---: | ---: | ---: | ---: |\n"
        "| source | 25.0 | 50.0 | 37.5 | 0.0 |\n"
        "| trust_naive | – | 70.0 | – | – |\n"
        "| trust | **50.0** | **75.5** | **62.8** | +25.2 |\n"
    )


def test_csv_reads_back_as_shown_with_spread_in_columns_of_its_own() -> None:
    rows = list(csv.reader(io.StringIO(to_csv(layout(TABLE, baseline="source", spread=True)))))
    assert rows == [
        ["", "gauss", "gauss std", "fog", "fog std", "mean", "mean std", "gain"],
        ["source", "25.0", "", "50.0", "", "37.5", "", "0.0"],
        ["trust_naive", "", "", "70.0", "", "", "", ""],
        ["trust", "50.0", "0.0", "75.5", "0.7", "62.8", "0.4", "+25.2"],
    ]


def test_latex_escapes_and_emboldens() -> None:
    lines = to_latex(layout(TABLE, spread=True)).splitlines()
    assert lines[0] == r"\begin{tabular}{lrrr}"
    assert lines[2:4] == [r" & gauss & fog & mean \\", r"\midrule"]
    assert lines[5] == r"trust\_naive & -- & 70.0 & -- \\"
    assert lines[6].startswith(r"trust & \textbf{50.0} {\scriptsize$\pm$ 0.0} & ")
    assert lines[7:] == [r"\bottomrule", r"\end{tabular}"]


@pytest.mark.parametrize(
    ("name", "markdown", "latex"),
    [("a|b", r"a\|b", "a|b"), ("50%_{x}", "50%_{x}", r"50\%\_\{x\}"), ("a\\b~^", "a\\b~^", None)],
    ids=["pipe", "percent", "backslash"],
)
def test_awkward_labels_are_escaped(name: str, markdown: str, latex: str | None) -> None:
    drawn = layout(table([cell(name, "fog", 0.5)]))
    assert f"| {markdown} |" in to_markdown(drawn)
    expected = r"a\textbackslash{}b\textasciitilde{}\textasciicircum{}" if latex is None else latex
    assert f"{expected} & 50.0" in to_latex(drawn)
    assert list(csv.reader(io.StringIO(to_csv(drawn))))[1][0] == name


def test_equal_as_shown_is_equally_best_and_lower_wins_for_errors() -> None:
    tie = layout(table([cell("tent", "fog", 0.50001), cell("trust", "fog", 0.50002), cell("bn", "fog", 0.4)]))
    assert [line[1].best for line in tie.lines] == [False, True, True]
    worse = cell("trust", "fog", 0.5)
    cells = [cell("tent", "fog", 0.5), replace(worse, result=replace(worse.result, nll=0.1, updates=9))]
    assert [line[1].best for line in layout(table(cells, value="nll")).lines] == [False, True]
    assert [line[1].best for line in layout(table(cells, value="updates")).lines] == [False, False]


def test_a_single_column_needs_no_mean_and_a_single_row_no_best() -> None:
    drawn = layout(table([cell("trust", "fog", 0.5)]))
    assert drawn.header == ("", "fog")
    assert not drawn.lines[0][1].best


def test_notes_say_unit_seeds_and_gaps() -> None:
    assert notes(TABLE) == [
        "accuracy in percent, mean over 1 to 2 seeds",
        "missing: trust_naive on gaussian_noise",
    ]
    assert notes(table([cell("trust", "fog", 0.5)], value="nll")) == ["nll, mean over 1 seed"]
    assert notes(table([])) == ["accuracy in percent, no results"]


@pytest.mark.parametrize("render", [to_text, to_markdown, to_csv, to_latex], ids=["text", "markdown", "csv", "latex"])
def test_an_empty_table_is_drawn_empty(render: Callable[[Layout], str]) -> None:
    assert "50" not in render(layout(table([])))
