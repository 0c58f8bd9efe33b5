"""Samples and equal cost in headless Chromium."""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.report.browser import CHROMIUM, browse
from tests.report.samples import fill_store, make_cell
from trust_tta.report.model import read_report
from trust_tta.report.page import write_page
from trust_tta.results import Cell, ResultStore, SamplePrediction

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM.exists(), reason="needs Debian's chromium in /usr/bin"),
]


def visit(tmp_path: Path, steps: str, *, cells: list[Cell], width: int = 1400) -> Any:
    store = fill_store(tmp_path / "store.db", cells)
    write_page(read_report(store), tmp_path / "page.html")
    return browse(tmp_path / "page.html", steps, tmp_path / "profile", width=width)


def with_pictures(tmp_path: Path) -> Path:
    """Two methods on two domains with one kept image each: red in fog, blue in snow."""
    cells = []
    for method, after in (("tent", 3), ("trust", 5)):
        for domain in ("fog", "snow"):
            fate = SamplePrediction(index=4, label=5, before=3, after=after, confidence=0.8, confidence_before=0.6)
            made = make_cell(method, domain, predictions=(fate,), fingerprint=domain)
            cells.append(made)
    store = fill_store(tmp_path / "store.db", cells)
    with ResultStore(store) as opened:
        for cell, colour in zip(cells, ("red", "blue"), strict=False):
            with io.BytesIO() as file:
                Image.new("RGB", (32, 24), colour).save(file, "WEBP", lossless=True)
                opened.keep_pictures(cell.key, {4: file.getvalue()}, class_names=[f"kind {i}" for i in range(10)])
    write_page(read_report(store), tmp_path / "page.html")
    return tmp_path / "page.html"


def test_sample_images_are_drawn_and_follow_domain_and_method(tmp_path: Path) -> None:
    steps = """
      const pictures = all(".sample img");
      await Promise.all(pictures.map((image) => image.decode()));
      const pixel = (image) => {
        const ground = document.createElement("canvas").getContext("2d");
        ground.drawImage(image, 0, 0);
        return Array.from(ground.getImageData(0, 0, 1, 1).data).slice(0, 3);
      };
      const seen = () => all(".sample").filter((card) => card.getClientRects().length)
        .map((card) => [pixel(card.querySelector("img")), card.innerText.replace(/\\s+/g, " ").trim()]);
      const first = seen(), menu = document.querySelector(".samples").closest(".choices").querySelector("select");
      menu.selectedIndex = 1;
      menu.dispatchEvent(new Event("change"));
      all('.chip[data-ms="0"]')[0].click();
      return { size: [pictures[0].naturalWidth, pictures[0].naturalHeight], first, second: seen() };"""
    found = browse(with_pictures(tmp_path), steps, tmp_path / "profile")
    snow, fog = [0, 0, 255], [255, 0, 0]
    assert found["size"] == [32, 24]
    told = "kind 5 {}, severity 5 image 4 {}trust kind 3 60% → kind 5 80% ✓"
    assert found["first"] == [[snow, told.format("snow", "tent 60% → kind 3 80% ✗ ")]]
    assert found["second"] == [[fog, told.format("fog", "")]]


def test_equal_cost_is_a_table_and_a_picture(tmp_path: Path) -> None:
    cells = []
    for n, ours, naive in ((1, 0.70, 0.71), (3, 0.74, 0.73), (6, 0.76, 0.75)):
        cells.append(make_cell("trust", "fog", accuracy=ours, work=(n, 2 * n + 1, 5.0 * n), options=f'{{"k": {n}}}'))
        steps = f'{{"steps": {n}}}'
        cells.append(make_cell("trust_naive", "fog", accuracy=naive, work=(n, 2 * n + 1, 4.0 * n), options=steps))
    cells.append(make_cell("tent", "fog", accuracy=0.69, work=(1, 3, 4.0)))
    steps = """
      const part = all("h3").find((h) => h.innerText === "At equal cost").parentElement;
      const figures = Array.from(part.querySelectorAll("figure"));
      figures[0].querySelector('[data-save="csv"]').click();
      const trails = all('[data-name="accuracy against updates"] .trail').length;
      const times = table('[data-name^="cost "] table').map((row) => row[row.length - 1]);
      return { times, trails, csv: (await saved())[0] };"""
    found = visit(tmp_path, steps, cells=cells)
    assert found["trails"] == 2
    assert found["times"] == ["time, Tent = 1", "1.00", "1.00", "3.00", "6.00", "1.25", "3.75", "7.50"]
    rows = list(csv.reader(io.StringIO(found["csv"])))
    assert [row[1] for row in rows[1:4]] == ["1 update per batch", "3 updates per batch", "6 updates per batch"]
    assert [row[5] for row in rows[1:4]] == ["-1.0", "+1.0", "+1.0"]
    assert [row[6] for row in rows[1:4]] == ["trust_naive (steps=1)", "trust (k=3)", "trust (k=6)"]


def test_wide_tables_and_long_names_stay_inside_a_phone(tmp_path: Path) -> None:
    options = '{{"evaluate_order": "{}", "merge": "entropy"}}'
    cells = [make_cell("trust", d, options=options.format(o)) for o in ("abcd", "badc") for d in ("snow", "fog")]
    cells = [replace(c, result=replace(c.result, clean_accuracy=0.9)) for c in cells]
    inside = """
      const sticking = all("main *").filter((item) => !item.closest(".scroll") && item.getClientRects().length
        && item.getBoundingClientRect().right > innerWidth + 1);
      return sticking.map((item) => item.tagName + "." + item.className);"""
    assert visit(tmp_path, inside, cells=cells, width=500) == []
