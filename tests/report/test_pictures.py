from __future__ import annotations

import math
import re
from dataclasses import replace
from html import unescape
from pathlib import Path

from tests.report.samples import fill_store, make_cell
from tests.report.test_page import HOSTILE, Reader
from trust_tta.cli.main import main
from trust_tta.report.model import read_report
from trust_tta.report.page import write_page
from trust_tta.results import Cell, ResultStore, SamplePrediction

PNG = b"\x89PNG\r\n\x1a\nrest"
FATES = (
    SamplePrediction(index=7, label=0, before=1, after=0, confidence=0.91, confidence_before=0.4),
    SamplePrediction(index=9, label=1, before=0, after=0, confidence=0.66, confidence_before=0.5),
    SamplePrediction(index=11, label=1, before=None, after=-1, confidence=math.nan),
)


def page_text(tmp_path: Path, cells: list[Cell], pictures: dict[int, bytes], names: tuple[str, ...] = ()) -> str:
    store = fill_store(tmp_path / "store.db", cells)
    with ResultStore(store) as opened:
        opened.keep_pictures(cells[0].key, pictures, class_names=names)
    write_page(read_report(store), tmp_path / "page.html")
    return (tmp_path / "page.html").read_text(encoding="utf-8")


def fates(text: str) -> list[str]:
    """The lines of the cards as a reader sees them."""
    lines = re.findall(r'<li data-s="\d+" class="(?:right|wrong)">(.*?)</li>', text)
    return [" ".join(unescape(re.sub(r"<[^>]*>", " ", line)).split()) for line in lines]


def test_sample_images_show_the_predictions_of_every_method(tmp_path: Path) -> None:
    cells = [make_cell("source", "fog", predictions=FATES[:1]), make_cell("trust", "fog", predictions=FATES)]
    text = page_text(tmp_path, cells, {7: PNG}, ("cat", "dog"))
    assert fates(text) == [
        "source dog 40% → cat 91% ✓",
        "trust dog 40% → cat 91% ✓",
        "trust 50% → cat 66% ✗",
        "trust no number ✗",
    ]
    images = [a["alt"] for tag, a in Reader(text).tags if tag == "img"]
    assert images == ["image 7, fog, severity 5"]
    assert text.count("no picture kept") == 2
    assert text.count("data:image/png;base64,") == 1


def test_predictions_are_shown_without_pictures(tmp_path: Path) -> None:
    text = page_text(tmp_path, [make_cell("trust", "fog", predictions=FATES)], {})
    assert fates(text)[0] == "trust class 1 40% → class 0 91% ✓"
    assert "no picture kept" not in text
    assert "<img" not in text


def test_methods_are_compared_on_one_stream_only(tmp_path: Path) -> None:
    """Image 7 of another seed is another picture."""
    first = make_cell("trust", "fog", seed=0, predictions=FATES[:1], fingerprint="a" * 64)
    other = make_cell("tent", "fog", seed=1, predictions=FATES[:1], fingerprint="b" * 64)
    assert fates(page_text(tmp_path, [first, other], {7: PNG})) == ["trust class 1 40% → class 0 91% ✓"]


def test_hostile_class_names_stay_text(tmp_path: Path) -> None:
    cell = make_cell(HOSTILE, HOSTILE, dataset=HOSTILE, predictions=FATES)
    text = page_text(tmp_path, [cell], {7: HOSTILE.encode()}, (HOSTILE, HOSTILE))
    page = Reader(text)
    assert [set(a) for tag, a in page.tags if tag == "img"] == [{"data-p", "alt"}]
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)


def test_no_more_than_eight_images_of_a_domain(tmp_path: Path) -> None:
    many = tuple(replace(FATES[0], index=i) for i in range(20))
    text = page_text(tmp_path, [make_cell("trust", d, predictions=many) for d in ("fog", "snow")], {})
    assert len(fates(text)) == 16


def test_names_that_are_not_utf8_are_shown_with_question_marks(tmp_path: Path) -> None:
    """As the names of folders and flags come from the system where they are not UTF-8."""
    store = fill_store(tmp_path / "store.db", [make_cell("trust", "fog", experiment="mi\udcf1", predictions=FATES)])
    with ResultStore(store) as opened:
        opened.keep_pictures(make_cell("trust", "fog").key, {7: PNG}, class_names=("ni\udcf1o", "dog"))
    assert main(["report", str(store), "--title", "a\udcffo", "--tables", str(tmp_path / "tables")]) == 0
    text = (tmp_path / "store.html").read_text(encoding="utf-8")
    assert "<title>a?o</title>" in text
    assert "<h2>mi? " in text
    assert fates(text)[0] == "trust dog 40% → ni?o 91% ✓"
