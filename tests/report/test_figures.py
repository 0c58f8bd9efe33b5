from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.report.samples import fill_store, make_cell
from tests.report.test_order_charts import ALL
from trust_tta.report.figures import write_figures
from trust_tta.report.model import read_report
from trust_tta.report.theme import STYLES

pytest.importorskip("matplotlib")


def test_only_what_has_data_is_drawn_in_both_formats_with_our_colours(tmp_path: Path) -> None:
    cells = [make_cell("trust", "fog", options=json.dumps({"k": k})) for k in (2, 6)]
    store = fill_store(tmp_path / "store.db", cells)
    files = write_figures(read_report(store), tmp_path / "figures")
    names = {file.name for file in files}
    assert names == {f"{n}_main_cifar10-c_online_100.{e}" for n in _STEMS for e in ("pdf", "svg")}
    assert names == {file.name for file in (tmp_path / "figures").iterdir()}
    for file in files:
        if file.suffix == ".pdf":
            assert file.read_bytes().startswith(b"%PDF")
        else:
            ElementTree.fromstring(file.read_text(encoding="utf-8"))
            assert STYLES["trust"].light in file.read_text(encoding="utf-8")


_STEMS = ("bars", "cost", "stream", "number_of_orders_trust")


def test_analyses_are_drawn_and_an_empty_store_gives_nothing_else(tmp_path: Path) -> None:
    store = fill_store(tmp_path / "store.db", [])
    names = {
        file.stem for file in write_figures(read_report(store, order_records=ALL[:1] + ALL[2:]), tmp_path / "figures")
    }
    assert names == {"entropy_by_order", "weight_norms", "memory_by_k"}


def test_a_domain_whose_name_is_no_text_is_drawn(tmp_path: Path) -> None:
    cell = make_cell("trust", "fog")
    store = fill_store(tmp_path / "store.db", [replace(cell, key=replace(cell.key, domain="ni\udcf1o"))])
    drawn = {
        file.name.partition("_")[0]: file for file in write_figures(read_report(store), tmp_path / "figures")
    }  # the SVG last
    assert "ni?o" in drawn["bars"].read_text(encoding="utf-8")
