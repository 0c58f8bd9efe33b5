from __future__ import annotations

import json
import os
import unicodedata
from pathlib import Path

import pytest

from tests.report.samples import fill_store, make_cell, plausible_cells
from tests.results.samples import ENTROPY
from trust_tta.cli.main import main
from trust_tta.results import to_json


def test_report_prints_tables_and_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = fill_store(
        tmp_path / "store.db", plausible_cells(methods=["bn", "trust"], domains=["fog", "snow"], seeds=3)
    )
    analysis = tmp_path / "rank.json"
    analysis.write_text(to_json(ENTROPY))
    tables = tmp_path / "tables"
    assert main(["report", str(store), "--title", "Mine", "--tables", str(tables), "--analyses", str(analysis)]) == 0
    out = capsys.readouterr().out
    assert "trust leads with" in out
    assert "snow" in out
    assert out.rstrip().endswith(f"report: {tmp_path / 'store.html'}")
    page = (tmp_path / "store.html").read_text(encoding="utf-8")
    assert "<title>Mine</title>" in page
    assert "Mean prediction entropy of each scan order" in page
    assert sorted(path.suffix for path in tables.iterdir()) == [".csv", ".md", ".tex"]


def test_filters_of_the_page_are_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cells = plausible_cells(methods=["bn", "tent", "trust"], domains=["fog", "snow", "frost"], seeds=1)
    other = plausible_cells(methods=["bn"], domains=["fog"], seeds=1, setting="continual", experiment="second")
    store = fill_store(tmp_path / "store.db", [*cells, *other])
    flags = ["--methods", "bn,trust", "--domains", "fog,snow", "--settings", "online"]
    assert main(["report", str(store), *flags]) == 0
    out = capsys.readouterr().out
    assert "averaged over 2 domains" in out
    assert not {"tent", "frost", "second"} & set(out.replace(",", " ").split())
    page = (tmp_path / "store.html").read_text(encoding="utf-8")
    assert "4 runs finished" in page
    assert "frost" not in page.split("<script")[0].split("</style>")[1]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--methods", "tnet"], "the store has no method 'tnet'; did you mean 'tent'?"),
        (["--batch-sizes", "7"], "the store has no batch_size '7'; choose one of 100"),
        (["--methods", "tent", "--domains", "snow"], "the store has no run with method tent; domain snow"),
    ],
)
def test_filters_that_select_nothing_are_refused(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = fill_store(tmp_path / "store.db", [make_cell("tent", "fog"), make_cell("bn", "snow")])
    assert main(["report", str(store), *flags]) == 2
    assert message in capsys.readouterr().err


def test_figures_are_written_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = fill_store(tmp_path / "store.db", [make_cell("trust", "fog")])
    arguments = [
        "report",
        str(store),
        "--out",
        str(tmp_path / "new" / "p.html"),
        "--figures",
        str(tmp_path / "f"),
        "--quiet",
    ]
    assert main(arguments) == 0
    assert "figures: 6 files" in capsys.readouterr().out
    assert (tmp_path / "new" / "p.html").exists()


def test_a_store_that_is_not_there_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path / "none.db")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "no results store" in error


def test_a_pipe_or_a_device_is_one_line_and_nothing_waits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (str(tmp_path / "pipe"), "/dev/null", str(tmp_path)):
        assert main(["report", path]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert "it is a folder, a pipe or a device" in error


def test_escape_sequences_in_labels_do_not_reach_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    attack = "\x1b]0;owned\x07\x1b[2J\x9b1m\r"
    cells = [
        make_cell("trust", d, dataset=attack, options=json.dumps({"a": a}))
        for d in ("fog", attack)
        for a in (1, attack)
    ]
    store = fill_store(tmp_path / "store.db", cells)
    assert main(["report", str(store), "--tables", str(tmp_path / "tables")]) == 0
    texts = [capsys.readouterr().out, *(path.read_text() for path in (tmp_path / "tables").iterdir())]
    assert len(texts) == 4
    for text in texts:
        assert {c for c in text if unicodedata.category(c) == "Cc"} == {"\n"}
        assert "owned" in text
