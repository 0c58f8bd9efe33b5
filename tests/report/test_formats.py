from __future__ import annotations

import csv
import io
from collections.abc import Callable

import pytest

from tests.report.samples import make_cell, make_groups
from tests.results.samples import cell
from trust_tta.report.formats import plain_table, to_csv, to_latex, to_markdown, to_text
from trust_tta.report.model import Report, ResultGroup
from trust_tta.report.page import render_page
from trust_tta.report.tables import DataTable, accuracy_table, calibration_table, notes
from trust_tta.results import Cell, Counts

CELLS = [
    cell("source", "fog", 0.5004),
    cell("source", "gaussian_noise", 0.25),
    cell("trust_naive", "fog", 0.7),
    cell("trust", "fog", 0.7504, seed=0),
    cell("trust", "fog", 0.7604, seed=1),
    cell("trust", "gaussian_noise", 0.5, seed=0),
    cell("trust", "gaussian_noise", 0.5, seed=1),
]


def group_of(*cells: Cell) -> ResultGroup:
    (group,) = make_groups(cells)
    return group


TABLE = accuracy_table(group_of(*CELLS))


def test_text_is_aligned_and_marks_the_best() -> None:
    assert to_text(TABLE) == (
        "                   mean   worst   over source       gauss          fog\n"
        "-----------  -----------  ------  -----------  -----------  -----------\n"
        "source             37.5    25.0           0.0        25.0         50.0\n"
        "trust_naive           –       –             –           –         70.0\n"
        "trust        62.8 ± 0.4*   50.0*        +25.2  50.0 ± 0.0*  75.5 ± 0.7*\n"
    )


def test_markdown_shows_the_mean_first() -> None:
    assert to_markdown(TABLE) == (
        "|  | mean | worst | over source | gauss | fog |\n"
        "| --- | ---: | ---: | ---: | ---: | ---: |\n"
        "| source | 37.5 | 25.0 | 0.0 | 25.0 | 50.0 |\n"
        "| trust_naive | – | – | – | – | 70.0 |\n"
        "| trust | **62.8 ± 0.4** | **50.0** | +25.2 | **50.0 ± 0.0** | **75.5 ± 0.7** |\n"
    )


def test_csv_reads_back_as_shown_with_spread_in_columns_of_its_own() -> None:
    rows = list(csv.reader(io.StringIO(to_csv(TABLE))))
    assert rows == [
        ["method", "mean", "mean std", "worst", "over source", "gauss", "gauss std", "fog", "fog std"],
        ["source", "37.5", "", "25.0", "0.0", "25.0", "", "50.0", ""],
        ["trust_naive", "", "", "", "", "", "", "70.0", ""],
        ["trust", "62.8", "0.4", "50.0", "+25.2", "50.0", "0.0", "75.5", "0.7"],
    ]


def test_latex_escapes_and_emboldens() -> None:
    lines = to_latex(TABLE).splitlines()
    assert lines[0] == r"\begin{tabular}{lrrrrr}"
    assert lines[2:4] == [r" & mean & worst & over source & gauss & fog \\", r"\midrule"]
    assert lines[5] == r"trust\_naive & -- & -- & -- & -- & 70.0 \\"
    assert lines[6].startswith(r"trust & \textbf{62.8} {\scriptsize$\pm$ 0.4} & \textbf{50.0} & ")
    assert lines[7:] == [r"\bottomrule", r"\end{tabular}"]


@pytest.mark.parametrize(
    ("name", "markdown", "latex"),
    [("a|b", r"a\|b", "a|b"), ("50%_{x}", "50%_{x}", r"50\%\_\{x\}"), ("a\\b~^", "a\\b~^", None)],
    ids=["pipe", "percent", "backslash"],
)
def test_awkward_labels_are_escaped(name: str, markdown: str, latex: str | None) -> None:
    drawn = accuracy_table(group_of(cell(name, "fog", 0.5)))
    assert f"| {markdown} |" in to_markdown(drawn)
    expected = r"a\textbackslash{}b\textasciitilde{}\textasciicircum{}" if latex is None else latex
    assert f"{expected} & 50.0" in to_latex(drawn)
    assert next(iter(csv.reader(io.StringIO(to_csv(drawn)).readlines()[1:])))[0] == name


@pytest.mark.parametrize("name", ["=1+1", "+SUM(A1)", "-2+3", "@cmd"])
def test_csv_cells_are_never_formulas(name: str) -> None:
    """Names that users give are text for a spreadsheet; gains stay numbers."""
    table = accuracy_table(group_of(cell("source", "fog", 0.5), cell(name, "fog", 0.4)))
    rows = list(csv.reader(io.StringIO(to_csv(table))))
    assert rows[2] == ["'" + name, "40.0", "-10.0"]
    titles = next(csv.reader(io.StringIO(to_csv(plain_table(["method", name], [])))))
    assert titles == ["method", "'" + name]


def test_html_in_markdown_is_shown_as_text() -> None:
    table = accuracy_table(group_of(cell("<img src=x onerror=alert(1)>", "fog", 0.5)))
    assert "| &lt;img src=x onerror=alert(1)&gt; |" in to_markdown(table)


def test_numbers_equal_as_shown_are_all_best_and_errors_are_best_if_lowest() -> None:
    tie = [cell("tent", "fog", 0.50001), cell("trust", "fog", 0.50002), cell("sar", "fog", 0.4)]
    assert [line.cells[0].best for line in accuracy_table(group_of(*tie)).rows] == [True, False, True]
    table = calibration_table(group_of(*tie))
    assert table is not None
    assert all(entry.best for line in table.rows for entry in line.cells[:3])
    assert not any(line.cells[3].best for line in table.rows)


def test_a_single_domain_needs_no_mean_and_a_single_line_no_best() -> None:
    drawn = accuracy_table(group_of(cell("trust", "fog", 0.5)))
    assert [column.title for column in drawn.columns] == ["method", "fog"]
    assert not drawn.rows[0].cells[0].best


def test_notes_say_unit_seeds_and_gaps() -> None:
    assert notes(group_of(*CELLS)) == [
        "accuracy in percent, mean over 1 to 2 seeds",
        "missing: trust_naive on gaussian_noise",
    ]
    assert notes(group_of(cell("trust", "fog", 0.5))) == ["accuracy in percent, mean over 1 seed"]


@pytest.mark.parametrize(("batches", "noted"), [(4, True), (20, False)])
def test_streams_too_short_to_learn_from_are_noted(batches: int, noted: bool) -> None:
    """Tent and SAR equal bn as shown; with four batches the reason is the short stream."""
    accuracies = {"source": 0.4, "bn": 0.5, "tent": 0.50001, "sar": 0.5, "trust": 0.6}
    work = {"source": (0, 1, 1.0), "bn": (0, 1, 1.0)}
    cells = [
        make_cell(m, "fog", accuracy=a, batches=batches, work=work.get(m, (1, 3, 4.0))) for m, a in accuracies.items()
    ]
    said = "tent and sar = bn: a stream of 4 batches is too short to learn from"
    assert notes(group_of(*cells))[1:] == ([said] if noted else [])


def test_calibration_says_that_roid_confidences_are_no_probabilities() -> None:
    for method, expected in (("roid", True), ("tent", False)):
        groups = make_groups([make_cell(method, "fog"), make_cell("bn", "fog")])
        page = render_page(Report(tuple(groups), Counts(done=2)))
        assert "Calibration" in page
        assert ("The confidence of roid is not a probability" in page) is expected


@pytest.mark.parametrize("render", [to_text, to_markdown, to_csv, to_latex], ids=["text", "markdown", "csv", "latex"])
def test_an_empty_table_is_drawn_empty(render: Callable[[DataTable], str]) -> None:
    assert "50" not in render(plain_table(["a", "b"], []))
