from __future__ import annotations

import csv
import math
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import pytest

from tests.results.samples import RESULT, cell
from trust_tta.results import Cell, CellKey, Provenance, write_csv, write_parquet
from trust_tta.results.export import columns, flat_row

CELLS = [
    cell("trust", "fog", 0.1 + 0.2, options='{"k":6,"x":"a,\\"b"}'),
    replace(cell("source", "fog", 1 / 3), result=replace(RESULT, accuracy_before=None, nll=math.nan, peak_memory=None)),
    cell("tent", "contrast", 5e-324, seed=2**40),
]
ORDERED = [CELLS[1], CELLS[0], CELLS[2]]


def test_columns_are_stable() -> None:
    names = list(columns())
    assert names[:4] == ["digest", "label", "experiment", "dataset"]
    assert len(names) == len(set(names)) == 2 + len(fields(CellKey)) + 18 + len(fields(Provenance))
    assert list(flat_row(CELLS[0])) == names


def test_csv_holds_every_number_exactly(tmp_path: Path) -> None:
    write_csv(iter(CELLS), tmp_path / "out.csv")
    with (tmp_path / "out.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["digest"] for row in rows] == [c.key.digest for c in ORDERED]
    for row, expected in zip(rows, map(flat_row, ORDERED), strict=True):
        for name, kind in columns().items():
            same = row[name] == "" if expected[name] is None else repr(kind(row[name])) == repr(expected[name])
            assert same, name


def test_csv_text_is_never_a_formula(tmp_path: Path) -> None:
    path = tmp_path / "cells.csv"
    names = ["=1+1", "+1+1", "-cmd", "@SUM(A1)", "\t=1", "\r=1", "-0.5"]
    write_csv([replace(CELLS[0], label=name) for name in names], path)
    with path.open(encoding="utf-8", newline="") as file:
        assert {row["label"] for row in csv.DictReader(file)} == {
            "'=1+1", "'+1+1", "'-cmd", "'@SUM(A1)", "'\t=1", "' =1", "-0.5",
        }  # fmt: skip


def test_parquet_holds_typed_columns_and_nulls(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    write_parquet(CELLS, tmp_path / "out.parquet")
    found = parquet.read_table(tmp_path / "out.parquet")
    assert found.column_names == list(columns())
    assert [repr(row) for row in found.to_pylist()] == [repr(flat_row(c)) for c in ORDERED]
    assert {str(found.schema.field(name).type) for name in ("seed", "peak_memory")} == {"int64"}
    assert str(found.schema.field("run_triton").type) == "string"


@pytest.mark.parametrize("write", [write_csv, write_parquet], ids=["csv", "parquet"])
def test_no_cells_give_a_file_with_columns(tmp_path: Path, write: Callable[[list[Cell], Path], None]) -> None:
    write([], tmp_path / "empty")
    assert b"digest" in (tmp_path / "empty").read_bytes()


def test_a_failed_export_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "out.csv"
    path.write_text("old")

    with pytest.raises(AttributeError):
        write_csv([CELLS[0], replace(CELLS[1], provenance=None)], path)  # type: ignore[arg-type]
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_names_that_are_not_utf8_are_exported_with_question_marks(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    odd = cell("tent", "fog", 0.5)
    odd = replace(odd, key=replace(odd.key, experiment="mi\udcf1"))
    write_csv([odd], tmp_path / "cells.csv")
    write_parquet([odd], tmp_path / "cells.parquet")
    with (tmp_path / "cells.csv").open(encoding="utf-8") as file:
        assert [row["experiment"] for row in csv.DictReader(file)] == ["mi?"]
    assert parquet.read_table(tmp_path / "cells.parquet").column("experiment").to_pylist() == ["mi?"]
