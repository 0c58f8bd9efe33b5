from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import unicodedata
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.report.samples import fill_store, make_cell, make_groups, plausible_cells
from tests.results.samples import ORDER_RECORDS
from trust_tta.errors import DataError
from trust_tta.report.model import Report, read_report
from trust_tta.report.page import embedded_json, render_page, write_page
from trust_tta.results import Cell, Counts, ResultStore, format_percent
from trust_tta.results.order_records import EntropyByOrder

HOSTILE = '</script><img src=x onerror="boom()">&<!--body-->'
VOID = {"meta", "img"}


class Reader(HTMLParser):
    """Collects tags, table rows and embedded data, and checks that elements close in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[str]] = []
        self.data = ""
        self._open: list[str] = []
        self._cell: list[str] | None = None
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self._cell = []

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag
        if tag in ("td", "th") and self._cell is not None:
            self.rows[-1].append("".join(self._cell))
            self._cell = None

    def handle_data(self, data: str) -> None:
        if self._cell is not None and "small" not in self._open:
            self._cell.append(data)
        if self._open and self._open[-1] == "script" and data.startswith("{"):
            self.data = data


def page_of(
    tmp_path: Path, cells: list[Cell], *, title: str | None = None, records: Sequence[EntropyByOrder] = ()
) -> Reader:
    store = fill_store(tmp_path / "store.db", cells)
    out = tmp_path / "page.html"
    write_page(read_report(store, order_records=records), out, title=title)
    return Reader(out.read_text(encoding="utf-8"))


def test_the_table_shows_what_the_store_holds(tmp_path: Path) -> None:
    cells = plausible_cells(methods=["source", "bn", "trust"], domains=["fog", "snow"], seeds=2)
    page = page_of(tmp_path, cells)
    trust = next(row for row in page.rows if row[0] == "trust")
    mean = {
        d: sum(c.result.accuracy for c in cells if c.key.method == "trust" and c.key.domain == d) / 2
        for d in ("snow", "fog")
    }
    assert page.rows[0] == ["method", "mean", "worst", "over source", "over bn", "snow", "fog"]
    assert [trust[k] for k in (1, 2, 5, 6)] == [
        format_percent(sum(mean.values()) / 2),
        format_percent(min(mean.values())),
        format_percent(mean["snow"]),
        format_percent(mean["fog"]),
    ]


def test_each_number_leads_to_its_runs(tmp_path: Path) -> None:
    cells = plausible_cells(methods=["bn", "trust"], domains=["fog"], seeds=3)
    page = page_of(tmp_path, cells)
    data = json.loads(page.data)
    traced = [attributes for tag, attributes in page.tags if tag == "td" and attributes.get("data-r")]
    digest, method = data["header"].index("digest"), data["header"].index("method")
    found = {data["runs"][int(i)][digest] for attributes in traced for i in str(attributes["data-r"]).split(",")}
    assert found == {cell.key.digest for cell in cells}
    assert {data["runs"][int(i)][method] for i in str(traced[0]["data-r"]).split(",")} == {"bn"}
    run = dict(zip(data["header"], data["runs"][0], strict=True))
    assert run["accuracy"] == next(c.result.accuracy for c in cells if c.key.digest == run["digest"])
    assert data["environments"][run["environment"]]["torch"] == cells[0].provenance.torch


def test_one_cell(tmp_path: Path) -> None:
    page = page_of(tmp_path, [make_cell("tent", "fog", accuracy=0.5)])
    assert ["tent", "50.0"] in [row[:2] for row in page.rows]


def test_an_empty_store_says_so(tmp_path: Path) -> None:
    page_of(tmp_path, [])
    assert "The store is empty" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_failed_and_missing_cells_are_marked_and_listed(tmp_path: Path) -> None:
    store = fill_store(tmp_path / "store.db", [make_cell("tent", "fog"), make_cell("tent", "snow")])
    with ResultStore(store) as opened:
        failed, absent = make_cell("trust", "fog").key, make_cell("trust", "snow").key
        opened.claim([failed])
        opened.fail(failed, "out of <memory>")
        opened.plan([absent])
    write_page(read_report(store), tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    page = Reader(text)
    assert ["trust", "–", "–", "–", "failed"] in [row[:5] for row in page.rows]
    assert "out of &lt;memory&gt;" in text
    assert "1 failed, 1 missing" in text
    assert "2 runs finished, 1 failed, 1 missing; methods took " in text


def test_only_failures(tmp_path: Path) -> None:
    store = fill_store(tmp_path / "store.db", [])
    with ResultStore(store) as opened:
        key = make_cell("trust", "fog").key
        opened.claim([key])
        opened.fail(key, "no such file")
    write_page(read_report(store), tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    Reader(text)
    assert "Nothing has finished" in text
    assert "no such file" in text


def test_nan_results_are_shown(tmp_path: Path) -> None:
    nan = math.nan
    cell = make_cell("trust", "fog", accuracy=nan)
    result = replace(cell.result, entropy=nan, nll=math.inf, ece=nan, brier=nan, seconds_median=nan, seconds_total=nan)
    page = page_of(tmp_path, [replace(cell, result=result), make_cell("tent", "fog")])
    assert ["trust", "NaN"] in [row[:2] for row in page.rows]
    assert json.loads(page.data)["runs"]
    charts = (tmp_path / "page.html").read_text(encoding="utf-8").split("<script")[0]
    assert not re.search(r'="[^"]*\b(nan|inf)\b[^"]*"', re.sub(r'(data-tip|aria-label)="[^"]*"', "", charts))


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    cell = make_cell(
        HOSTILE, HOSTILE, dataset=HOSTILE, experiment=HOSTILE, setting=HOSTILE, options=json.dumps({HOSTILE: HOSTILE})
    )
    second = make_cell(HOSTILE, "fog", dataset=HOSTILE, experiment=HOSTILE, setting=HOSTILE)
    cells = [replace(c, provenance=replace(c.provenance, config=HOSTILE, device=HOSTILE)) for c in (cell, second)]
    page = page_of(tmp_path, cells, title=HOSTILE, records=ORDER_RECORDS)
    assert [tag for tag, _ in page.tags if tag == "img"] == []
    assert len([tag for tag, _ in page.tags if tag == "script"]) == 2
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert json.loads(page.data)["environments"][0]["config"] == HOSTILE


@pytest.mark.parametrize("text", ["</script>", "<!--", "&lt;", '"\\', "é"])
def test_embedded_json_is_exact_and_inert(text: str) -> None:
    encoded = embedded_json({text: [text, 1.5, None, math.nan]})
    assert not set("<>&") & set(encoded)
    assert json.loads(encoded) == {text: [text, 1.5, None, None]}


def test_control_characters_do_not_reach_the_page(tmp_path: Path) -> None:
    attack = "\x1b]0;owned\x07\x1b[2J\u202ereversed\x9b1m\r"
    cell = make_cell(attack, attack, dataset=attack, experiment=attack, options=json.dumps({"a": attack}))
    other = make_cell(attack, attack, dataset=attack, experiment=attack, options=json.dumps({"a": 1}))
    store = fill_store(
        tmp_path / "store.db", [replace(cell, provenance=replace(cell.provenance, config=attack)), other]
    )
    with ResultStore(store) as opened:
        key = make_cell("tent", "fog", dataset=attack, experiment=attack).key
        opened.claim([key])
        opened.fail(key, attack)
    write_page(read_report(store), tmp_path / "page.html", title=attack)
    text = (tmp_path / "page.html").read_bytes().decode("utf-8")
    shown = text + json.dumps(json.loads(Reader(text).data), ensure_ascii=False)
    assert {c for c in shown if unicodedata.category(c) in ("Cc", "Cf", "Zl", "Zp")} <= {"\n"}
    assert "?]0;owned?" in text


def test_the_page_needs_no_network(tmp_path: Path) -> None:
    page_of(tmp_path, plausible_cells(methods=["bn", "trust"], domains=["fog", "snow"], seeds=1))
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert set(re.findall(r"https?://[^\"'\s<)]+", text)) <= {"http://www.w3.org/2000/svg"}
    assert "@import" not in text
    assert not re.search(r"url\((?!data:)", text)


def test_continual_runs_have_stability_and_forgetting(tmp_path: Path) -> None:
    cells = [make_cell("tent", d, setting="continual", clean=0.9) for d in ("fog", "snow")]
    page = page_of(tmp_path, cells)
    names = {attributes.get("data-name") for tag, attributes in page.tags if tag == "figure"}
    assert {"stability", "forgetting"} <= names
    assert "stability gain" not in names  # there is no baseline
    online = page_of(tmp_path / "b", [make_cell("tent", d) for d in ("fog", "snow")])
    names = {attributes.get("data-name") for tag, attributes in online.tags if tag == "figure"}
    assert not {"stability", "forgetting"} & names


def test_the_page_says_when_it_was_run_and_how_long_that_took(tmp_path: Path) -> None:
    page_of(tmp_path, [make_cell("tent", d, batches=20, batch_size=100, work=(1, 3, 4.0)) for d in ("fog", "snow")])
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "; methods took 16 s. Run on 2026-01-02, 03:04 to 03:04 UTC." in text


def test_a_method_has_one_ece(tmp_path: Path) -> None:
    """The mean over domains of what the runs recorded, in the table and at the diagram."""
    cells = [make_cell("tent", "fog", batches=5), make_cell("tent", "snow", batches=50, accuracy=0.5)]
    cells = [replace(c, result=replace(c.result, ece=e)) for c, e in zip(cells, (0.02, 0.1), strict=True)]
    page = page_of(tmp_path, cells)
    assert ["tent", "6.0"] in [row[:2] for row in page.rows]
    assert "tent, ECE 6.0 %" in (tmp_path / "page.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_three_thousand_cells() -> None:
    cells = [
        make_cell(m, f"d{i}", seed=s, batch_size=b, batches=2, experiment=f"e{b}")
        for m in ("source", "bn", "tent", "trust")
        for i in range(50)
        for s in range(3)
        for b in (8, 16, 32, 64, 128)
    ]
    text = render_page(Report(tuple(make_groups(cells)), Counts(done=3000)))
    assert len(text) < 5_000_000
    page = Reader(text)
    assert len(json.loads(page.data)["runs"]) == 3000
    assert len([1 for tag, a in page.tags if tag == "section" and a.get("class") == "group"]) == 5


def test_the_same_store_gives_the_same_page(tmp_path: Path) -> None:
    cells = plausible_cells(methods=["bn", "trust"], domains=["fog"], seeds=2)
    page_of(tmp_path / "a", cells)
    page_of(tmp_path / "b", cells[::-1])
    assert (tmp_path / "a" / "page.html").read_bytes() == (tmp_path / "b" / "page.html").read_bytes()


def test_a_page_that_cannot_be_made_leaves_the_old_one(tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    out.write_text("old")
    with pytest.raises(DataError, match="no results store"):
        write_page(read_report(tmp_path / "none.db"), out)
    assert out.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"]


def test_the_report_works_without_torch(tmp_path: Path) -> None:
    store = fill_store(tmp_path / "store.db", [make_cell("trust", "fog")])
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from trust_tta.report.model import read_report\n"
        "from trust_tta.report.page import write_page\n"
        "import trust_tta.report.figures, trust_tta.report.formats\n"
        "write_page(read_report(sys.argv[1]), sys.argv[2])\n"
    )
    subprocess.run([sys.executable, "-c", code, store, tmp_path / "page.html"], check=True)
    assert (tmp_path / "page.html").stat().st_size > 10_000
