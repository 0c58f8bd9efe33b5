from __future__ import annotations

import csv
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias
from xml.etree import ElementTree

import pytest

from tests.report.browser import CHROMIUM, browse
from tests.report.samples import fill_store, make_cell, plausible_cells
from tests.report.test_page import HOSTILE
from trust_tta.report.page import write_page
from trust_tta.report.tables import layout, to_csv
from trust_tta.results import Cell, ResultStore, format_percent, table

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM.exists(), reason="needs Debian's chromium in /usr/bin"),
]

METHODS = ["source", "bn", "tent", "trust"]
DOMAINS = ["gaussian_noise", "snow", "fog"]
CELLS = plausible_cells(methods=METHODS, domains=DOMAINS, seeds=2)
TABLE = 'figure[data-name^="accuracy cifar10-c"] table'

Open: TypeAlias = Callable[..., Any]


@pytest.fixture
def visit(tmp_path: Path) -> Open:
    def run(steps: str, *, cells: list[Cell] = CELLS, width: int = 1400, dark: bool = False) -> Any:
        store = fill_store(tmp_path / "store.db", cells)
        write_page(store, tmp_path / "page.html")
        return browse(tmp_path / "page.html", steps, tmp_path / "profile", width=width, dark=dark)

    return run


def test_what_is_shown_is_what_the_store_holds(visit: Open) -> None:
    shown = visit(f"return table('{TABLE}');")
    pivot = table(CELLS)
    assert [line[0] for line in shown[1:]] == ["Source", "BN statistics", "Tent", "TRUST"]
    for line, cells, mean in zip(shown[1:], pivot.cells, pivot.means, strict=True):
        assert line[1:4] == [format_percent(entry.mean) for entry in cells]
        assert line[4] == f"{format_percent(mean.mean)} ± {format_percent(mean.std)}"


def test_sorting_by_a_column_and_back(visit: Open) -> None:
    steps = f"""
      const heads = all('{TABLE} thead button'), orders = [];
      for (let i = 0; i < 3; i += 1) {{ heads[4].click(); orders.push(table('{TABLE}').slice(1).map((r) => r[0])); }}
      heads[4].click();
      return {{ orders, sort: heads[4].closest("th").getAttribute("aria-sort") }};"""
    found = visit(steps)
    assert found["orders"][0] == ["TRUST", "Tent", "BN statistics", "Source"]
    assert found["orders"][1] == found["orders"][0][::-1]
    assert found["orders"][2] == ["Source", "BN statistics", "Tent", "TRUST"]
    assert found["sort"] == "descending"


def test_missing_values_sort_last_both_ways(tmp_path: Path) -> None:
    store = fill_store(tmp_path / "store.db", [make_cell("tent", "fog"), make_cell("trust", "fog", accuracy=0.9)])
    with ResultStore(store) as opened:
        opened.plan([make_cell("bn", "fog").key])
    write_page(store, tmp_path / "page.html")
    steps = f"""
      const head = all('{TABLE} thead button')[1], orders = [];
      for (let i = 0; i < 2; i += 1) {{ head.click(); orders.push(table('{TABLE}').slice(1).map((r) => r[0])); }}
      return orders;"""
    assert browse(tmp_path / "page.html", steps, tmp_path / "profile") == [
        ["TRUST", "Tent", "BN statistics"],
        ["Tent", "TRUST", "BN statistics"],
    ]


def test_picking_methods_and_domains_changes_table_and_charts(visit: Open) -> None:
    steps = f"""
      all('.chip[data-ms="0"]')[0].click();
      all('.chip[data-md="1"]')[0].click();
      const dots = document.querySelector("svg.dots");
      const shown = (query) => Array.from(dots.querySelectorAll(query)).filter((g) => g.getClientRects().length).length;
      const box = () => dots.getAttribute("viewBox");
      const state = () => ({{ rows: shown("g.row"), dots: shown("g.row g[data-s]"), box: box() }});
      const picked = {{ table: table('{TABLE}'), ...state() }};
      all('.all[data-all="ms"]')[0].click();
      all('.all[data-all="md"]')[0].click();
      return {{ picked, back: table('{TABLE}').length, ...state() }};"""
    found = visit(steps)
    assert [line[0] for line in found["picked"]["table"]] == ["method", "BN statistics", "Tent", "TRUST"]
    assert found["picked"]["table"][0][1:3] == ["gauss", "fog"]
    assert (found["picked"]["rows"], found["picked"]["dots"]) == (2, 6)
    assert (found["back"], found["rows"]) == (5, 3)
    assert found["picked"]["box"] != found["box"]


def test_shift_click_shows_one_method_alone(visit: Open) -> None:
    steps = f"""
      all('.chip[data-ms="3"]')[0].dispatchEvent(new MouseEvent("click", {{ shiftKey: true, bubbles: true }}));
      return table('{TABLE}').map((r) => r[0]);"""
    assert visit(steps) == ["method", "TRUST"]


def test_hovering_tells_and_clicking_traces_to_the_runs(visit: Open) -> None:
    steps = f"""
      const cell = document.querySelector('{TABLE} tbody tr:last-child td');
      cell.dispatchEvent(new MouseEvent("mouseover", {{ bubbles: true }}));
      const tip = document.getElementById("tip"), told = tip.hidden ? "" : tip.textContent;
      cell.click();
      const trace = document.getElementById("trace");
      const runs = Array.from(trace.querySelectorAll("code")).map((code) => code.textContent);
      const out = {{ told, open: trace.open, runs, text: trace.innerText }};
      trace.close();
      return out;"""
    found = visit(steps)
    mine = [cell for cell in CELLS if cell.key.method == "trust" and cell.key.domain == "gaussian_noise"]
    assert "over Source" in found["told"]
    assert "2 seeds" in found["told"]
    assert found["open"]
    assert sorted(found["runs"]) == sorted(cell.key.digest for cell in mine)
    for word in ("2.13.0", "checkpoint", str(mine[0].result.accuracy), '"k":6'):
        assert word in found["text"]


def test_every_number_of_a_line_leads_to_its_runs(visit: Open) -> None:
    steps = """
      const trace = document.getElementById("trace"), found = [];
      for (const name of ["accuracy", "cost", "calibration", "equal cost", "beside Table 1"]) {
        const cells = Array.from(document.querySelectorAll(`figure[data-name^="${name}"] tbody tr:last-child td.num`));
        cells.at(-1).click();
        const runs = Array.from(trace.querySelectorAll("code")).map((code) => code.textContent);
        found.push([name, trace.open, document.getElementById("trace-title").textContent, runs]);
        if (trace.open) trace.close();
      }
      return found;"""
    mine = {cell.key.digest for cell in CELLS if cell.key.method == "trust"}
    for name, is_open, title, runs in visit(steps):
        assert is_open, name
        assert title.startswith("TRUST"), name
        assert mine <= set(runs), name


def test_the_keyboard_reaches_every_number(visit: Open) -> None:
    steps = f"""
      const first = document.querySelector('{TABLE} td[tabindex="0"]');
      first.focus();
      const event = (key) => new KeyboardEvent("keydown", {{ key, bubbles: true }});
      const press = (key) => document.activeElement.dispatchEvent(event(key));
      press("ArrowRight"); press("ArrowDown"); press("ArrowUp"); press("ArrowDown");
      const at = document.activeElement, tip = document.getElementById("tip");
      const out = {{ text: at.innerText, row: at.parentElement.rowIndex, column: at.cellIndex, tip: !tip.hidden }};
      press("Enter");
      out.open = document.getElementById("trace").open;
      return out;"""
    found = visit(steps)
    assert (found["row"], found["column"], found["tip"], found["open"]) == (2, 2, True, True)


def test_tables_are_saved_as_csv_and_latex(visit: Open) -> None:
    steps = f"""
      const figure = document.querySelector('{TABLE}').closest("figure");
      figure.querySelector('[data-save="csv"]').click();
      figure.querySelector('[data-save="tex"]').click();
      return saved();"""
    as_csv, as_latex = visit(steps)
    ours = list(csv.reader(io.StringIO(to_csv(layout(table(CELLS), spread=True)))))
    page = list(csv.reader(io.StringIO(as_csv)))
    assert [line[1:9] for line in page] == [line[1:9] for line in ours]
    assert as_latex.startswith("\\begin{tabular}{lrrrrrr}\n\\toprule\nmethod & gauss")
    assert as_latex.count("\\textbf{") == 4
    assert as_latex.endswith("\\end{tabular}\n")


def test_every_figure_is_saved_as_a_drawing_of_its_own(visit: Open) -> None:
    steps = """
      const buttons = all('[data-save="svg"]');
      for (const button of buttons) button.click();
      return { count: all("figure.drawing").length, files: await saved() };"""
    found = visit(steps)
    assert found["count"] == len(found["files"]) > 8
    for text in found["files"]:
        root = ElementTree.fromstring(text)
        assert float(root.get("width", "0")) > 100
        assert "var(" not in text
    assert "rgb(209, 68, 12)" in found["files"][0]  # TRUST's colour, resolved


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_themes_follow_the_system_and_the_button(visit: Open, dark: bool) -> None:
    steps = """
      const ground = () => getComputedStyle(document.body).backgroundColor;
      const mark = () => getComputedStyle(document.querySelector(".key .m-trust")).fill;
      const before = [ground(), mark()];
      document.getElementById("theme").click();
      const after = [ground(), mark()];
      document.getElementById("theme").click();
      return [before, after, [ground(), mark()]];"""
    light, night = ["rgb(251, 250, 248)", "rgb(209, 68, 12)"], ["rgb(20, 22, 26)", "rgb(255, 133, 82)"]
    one, other = (night, light) if dark else (light, night)
    assert visit(steps, dark=dark) == [one, other, one]


@pytest.mark.parametrize("width", [500, 820, 1400])
def test_nothing_sticks_out_of_the_window(visit: Open, width: int) -> None:
    steps = "return [document.documentElement.scrollWidth, innerWidth];"
    scroll, inner = visit(steps, width=width)
    assert scroll <= inner


def test_groups_panes_and_menus_show_one_thing_at_a_time(visit: Open) -> None:
    other = plausible_cells(methods=["bn", "tent"], domains=DOMAINS, seeds=1, setting="continual")
    steps = """
      const shown = () => all("section.group").map((group) => !group.hidden);
      const menu = document.getElementById("group"), first = shown();
      menu.selectedIndex = 1 - menu.selectedIndex;
      menu.dispatchEvent(new Event("change"));
      const second = shown(), group = all("section.group").find((item) => !item.hidden);
      const bar = Array.from(group.querySelectorAll(".segments")).find((item) => item.innerText.includes("passes"));
      bar.children[1].click();
      const panes = Array.from(bar.parentElement.querySelectorAll(".pane")).map((pane) => !pane.hidden);
      return { first, second, panes, pressed: bar.children[1].getAttribute("aria-pressed") };"""
    found = visit(steps, cells=[*CELLS, *other])
    assert sorted([found["first"], found["second"]]) == [[False, True], [True, False]]
    assert found["panes"] == [False, True, False]
    assert found["pressed"] == "true"


def test_hostile_names_do_nothing(visit: Open) -> None:
    cells = [make_cell(HOSTILE, d, experiment=HOSTILE, dataset=HOSTILE) for d in (HOSTILE, "fog")]
    steps = """
      let boom = false; window.boom = () => { boom = true; };
      const cell = document.querySelector("td[data-r]");
      cell.dispatchEvent(new MouseEvent("mouseover", { bubbles: true }));
      cell.click();
      await new Promise((done) => setTimeout(done, 50));
      return { boom, images: all("img").length, heading: document.querySelector("h2").innerText.split("\\n")[0] };"""
    found = visit(steps, cells=cells)
    assert found == {"boom": False, "images": 0, "heading": HOSTILE}
