from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias
from xml.etree import ElementTree

import pytest

from tests.report.browser import CHROMIUM, browse
from tests.report.samples import fill_store, make_cell, make_groups, plausible_cells
from tests.report.test_page import HOSTILE
from trust_tta.report.formats import to_csv
from trust_tta.report.model import read_report
from trust_tta.report.page import write_page
from trust_tta.report.tables import accuracy_table
from trust_tta.results import Cell, ResultStore, format_percent

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
        write_page(read_report(store), tmp_path / "page.html")
        return browse(tmp_path / "page.html", steps, tmp_path / "profile", width=width, dark=dark)

    return run


def test_what_is_shown_is_what_the_store_holds(visit: Open) -> None:
    shown = visit(f"return table('{TABLE}');")
    assert [line[0] for line in shown[1:]] == METHODS
    for line in shown[1:]:
        found = [[c.result.accuracy for c in CELLS if (c.key.method, c.key.domain) == (line[0], d)] for d in DOMAINS]
        means = [statistics.fmean(seeds) for seeds in found]
        by_seed = [statistics.fmean(pair) for pair in zip(*found, strict=True)]
        assert line[5:] == [format_percent(mean) for mean in means]
        assert line[2] == format_percent(min(means))
        assert line[1] == f"{format_percent(statistics.fmean(by_seed))} ± {format_percent(statistics.stdev(by_seed))}"


def test_sorting_by_a_column_and_back(visit: Open) -> None:
    steps = f"""
      const heads = all('{TABLE} thead button'), orders = [];
      for (let i = 0; i < 3; i += 1) {{ heads[1].click(); orders.push(table('{TABLE}').slice(1).map((r) => r[0])); }}
      heads[1].click();
      return {{ orders, sort: heads[1].closest("th").getAttribute("aria-sort") }};"""
    found = visit(steps)
    assert found["orders"][0] == ["trust", "tent", "bn", "source"]
    assert found["orders"][1] == found["orders"][0][::-1]
    assert found["orders"][2] == METHODS
    assert found["sort"] == "descending"


def test_missing_values_sort_last_both_ways(tmp_path: Path) -> None:
    store = fill_store(tmp_path / "store.db", [make_cell("tent", "fog"), make_cell("trust", "fog", accuracy=0.9)])
    with ResultStore(store) as opened:
        opened.plan([make_cell("bn", "fog").key])
    write_page(read_report(store), tmp_path / "page.html")
    steps = f"""
      const head = all('{TABLE} thead button')[1], orders = [];
      for (let i = 0; i < 2; i += 1) {{ head.click(); orders.push(table('{TABLE}').slice(1).map((r) => r[0])); }}
      return orders;"""
    assert browse(tmp_path / "page.html", steps, tmp_path / "profile") == [
        ["trust", "tent", "bn"],
        ["tent", "trust", "bn"],
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
    assert [line[0] for line in found["picked"]["table"]] == ["method", "bn", "tent", "trust"]
    assert found["picked"]["table"][0][5:] == ["gauss", "fog"]
    assert (found["picked"]["rows"], found["picked"]["dots"]) == (2, 6)
    assert (found["back"], found["rows"]) == (5, 3)
    assert found["picked"]["box"] != found["box"]


@pytest.mark.parametrize("hidden", [[1], [0, 2]], ids=["one of three", "two of three"])
def test_the_mean_is_of_the_domains_that_are_shown(visit: Open, hidden: list[int]) -> None:
    clicks = "".join(f"""all('.chip[data-md="{i}"]')[0].click();""" for i in hidden)
    steps = f"""
      const before = table('{TABLE}');
      {clicks}
      document.querySelector('{TABLE}').closest("figure").querySelector('[data-save="csv"]').click();
      const best = all('{TABLE} td.mean.best').map((cell) => cell.closest("tr").cells[0].innerText);
      const note = document.querySelector(".note.shown").innerText, shown = table('{TABLE}');
      all('.all[data-all="md"]')[0].click();
      const back = table('{TABLE}'), tip = document.querySelector('{TABLE} td.mean').dataset.tip;
      return {{ before, shown, back, best, note, tip, csv: (await saved())[0] }};"""
    found = visit(steps)
    kept = [domain for i, domain in enumerate(DOMAINS) if i not in hidden]
    (group,) = make_groups([cell for cell in CELLS if cell.key.domain in kept])
    ours = list(csv.reader(io.StringIO(to_csv(accuracy_table(group)))))
    page = list(csv.reader(io.StringIO(found["csv"])))
    columns = 6 if len(kept) > 1 else 0  # a table of one domain has no mean of its own
    assert [line[:columns] for line in page] == [line[:columns] for line in ours]
    means = [group.mean(method) for method in METHODS]
    assert [line[1] for line in page[1:]] == [format_percent(mean.mean) for mean in means]
    assert [line[2] for line in page[1:]] == [format_percent(mean.std) for mean in means]
    assert found["best"] == ["trust"]
    assert f"the {len(kept)} domain" in found["note"]
    assert found["back"] == found["before"] != found["shown"]
    assert "3 domains" in found["tip"]


@pytest.mark.parametrize("kind", ["mouse", "touch"])
def test_charts_show_the_tooltip_of_the_nearest_point(visit: Open, kind: str) -> None:
    event = "pointermove" if kind == "mouse" else "pointerdown"
    steps = f"""
      const tip = document.getElementById("tip"), told = [];
      const mark = document.querySelector("svg.dots g.row .m-trust[data-tip]"), box = mark.getBoundingClientRect();
      const at = (x, y, target) => {{
        const place = {{ clientX: x, clientY: y, bubbles: true, pointerType: "{kind}" }};
        target.dispatchEvent(new PointerEvent("{event}", place));
        told.push(tip.hidden ? "" : tip.textContent);
      }};
      at(box.right + 8, box.top + box.height / 2, mark.ownerSVGElement);
      at(box.left, box.top - 400, document.body);
      const curve = document.querySelector("path[data-at]"), end = curve.getPointAtLength(curve.getTotalLength());
      const place = new DOMPoint(end.x, end.y).matrixTransform(curve.getScreenCTM());
      at(place.x + 3, place.y, curve.ownerSVGElement);
      return [told, mark.dataset.tip, curve.dataset.tip, all("svg.chart title").length];"""
    (first, away, along), expected, name, titles = visit(steps)
    assert first == expected
    assert away == ""
    assert along.startswith(f"{name}: ")
    assert along.endswith(" at 2000")
    assert titles == 0  # the browser's own would come a second later, and never on touch


@pytest.mark.parametrize("width", [500, 1400])
def test_a_wide_table_keeps_its_mean_in_view(visit: Open, width: int) -> None:
    cells = plausible_cells(methods=METHODS, seeds=1)
    steps = f"""
      const scroll = document.querySelector('{TABLE}').closest(".scroll");
      scroll.scrollLeft = 2000;
      const place = (query) => document.querySelector(`{TABLE} tbody ${{query}}`).getBoundingClientRect();
      const box = place("td.mean"), head = place("th"), frame = scroll.getBoundingClientRect();
      return [box.left >= head.right - 1, box.right <= frame.right, box.left - frame.left < 260];"""
    assert visit(steps, cells=cells, width=width) == [True, True, True]


def test_shift_click_shows_one_method_alone(visit: Open) -> None:
    steps = f"""
      all('.chip[data-ms="3"]')[0].dispatchEvent(new MouseEvent("click", {{ shiftKey: true, bubbles: true }}));
      return table('{TABLE}').map((r) => r[0]);"""
    assert visit(steps) == ["method", "trust"]


def test_hovering_shows_tooltips_and_clicking_shows_the_runs(visit: Open) -> None:
    steps = f"""
      const cell = document.querySelector('{TABLE} tbody tr:last-child td[data-d]');
      cell.dispatchEvent(new PointerEvent("pointermove", {{ bubbles: true }}));
      const tip = document.getElementById("tip"), told = tip.hidden ? "" : tip.textContent;
      cell.click();
      const trace = document.getElementById("trace");
      const runs = Array.from(trace.querySelectorAll("code")).map((code) => code.textContent);
      const out = {{ told, open: trace.open, runs, text: trace.innerText }};
      trace.close();
      return out;"""
    found = visit(steps)
    mine = [cell for cell in CELLS if cell.key.method == "trust" and cell.key.domain == "gaussian_noise"]
    assert "over source" in found["told"]
    assert "2 seeds" in found["told"]
    assert found["open"]
    assert sorted(found["runs"]) == sorted(cell.key.digest for cell in mine)
    for word in ("2.13.0", "checkpoint", str(mine[0].result.accuracy), '"k":6'):
        assert word in found["text"]


def test_every_number_of_a_row_leads_to_its_runs(visit: Open) -> None:
    steps = """
      const trace = document.getElementById("trace"), found = [];
      for (const name of ["accuracy", "cost", "calibration", "equal cost", "paper Table 1"]) {
        const cells = Array.from(document.querySelectorAll(`figure[data-name^="${name}"] tbody tr:last-child td.num`));
        cells.at(name === "accuracy" ? 0 : -1).click();
        const runs = Array.from(trace.querySelectorAll("code")).map((code) => code.textContent);
        found.push([name, trace.open, document.getElementById("trace-title").textContent, runs]);
        if (trace.open) trace.close();
      }
      return found;"""
    mine = {cell.key.digest for cell in CELLS if cell.key.method == "trust"}
    for name, is_open, title, runs in visit(steps):
        assert is_open, name
        assert title.startswith("trust"), name
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
    (group,) = make_groups(CELLS)
    assert as_csv == to_csv(accuracy_table(group))
    assert as_latex.startswith("\\begin{tabular}{lrrrrrrr}\n\\toprule\nmethod & mean")
    assert as_latex.count("\\textbf{") == 5
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
      cell.dispatchEvent(new PointerEvent("pointermove", { bubbles: true }));
      cell.click();
      await new Promise((done) => setTimeout(done, 50));
      return { boom, images: all("img").length, heading: document.querySelector("h2").innerText.split("\\n")[0] };"""
    found = visit(steps, cells=cells)
    assert found == {"boom": False, "images": 0, "heading": HOSTILE}
