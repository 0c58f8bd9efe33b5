from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.report.samples import fill_store, make_cell
from trust_tta.report.figures import write_figures
from trust_tta.report.model import read_report
from trust_tta.report.theme import STYLES

pytest.importorskip("matplotlib")


def test_charts_with_data_are_written_in_both_formats_and_our_colors(tmp_path: Path) -> None:
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


_STEMS = ("accuracy_by_domain", "accuracy_against_passes", "along_the_stream_fog", "trust_by_k")


def test_domain_names_that_are_not_utf8_are_drawn(tmp_path: Path) -> None:
    cell = make_cell("trust", "fog")
    store = fill_store(tmp_path / "store.db", [replace(cell, key=replace(cell.key, domain="ni\udcf1o"))])
    files = write_figures(read_report(store), tmp_path / "figures")
    (drawn,) = [file for file in files if file.name.startswith("accuracy_by_domain") and file.suffix == ".svg"]
    assert "ni?o" in drawn.read_text(encoding="utf-8")
