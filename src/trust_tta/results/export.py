"""Finished cells as a flat CSV or Parquet file: one row per cell, always the same columns."""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

from trust_tta.atomic import replacing
from trust_tta.optional import require
from trust_tta.results.display import cell_sort_key
from trust_tta.results.record import VALUES, Cell, CellKey, CellResult, Provenance

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|[+-]?(inf|nan)")


def columns() -> dict[str, type]:
    """The flat columns and their types; optional columns have the type of their values."""
    hints = {kind: get_type_hints(kind) for kind in (CellKey, CellResult, Provenance)}
    types = {"digest": str, "label": str, **hints[CellKey]}
    types |= {name: hints[CellResult][name] for name in VALUES}
    types |= {f"run_{f.name}": hints[Provenance][f.name] for f in fields(Provenance)}
    return {name: (get_args(kind) or (kind,))[0] for name, kind in types.items()}  # `int` of `int | None`


def flat_row(cell: Cell) -> dict[str, Any]:
    """One cell as flat columns; characters that UTF-8 cannot hold become question marks."""
    row = {"digest": cell.key.digest, "label": cell.label}
    row |= {f.name: getattr(cell.key, f.name) for f in fields(CellKey)}
    row |= {name: getattr(cell.result, name) for name in VALUES}
    row |= {f"run_{f.name}": getattr(cell.provenance, f.name) for f in fields(Provenance)}
    texts = {name: value for name, value in row.items() if isinstance(value, str)}
    return row | {name: text.encode("utf-8", "replace").decode("utf-8") for name, text in texts.items()}


def csv_text(text: str) -> str:
    """A text cell that no spreadsheet takes for a formula: an apostrophe precedes = + - @, tab and return.

    Numbers such as "-0.2" and "+1.3" stay numbers.
    """
    formula = text.startswith(("=", "+", "-", "@", "\t", "\r")) and not _NUMBER.fullmatch(text)
    return ("'" * formula + text).replace("\r", " ")  # the csv module does not quote a return


def write_csv(cells: Iterable[Cell], path: str | os.PathLike[str]) -> None:
    """Write CSV in UTF-8; floats are exact, an empty field means None."""
    with replacing(Path(path)) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns(), lineterminator="\n")
        writer.writeheader()
        for cell in sorted(cells, key=lambda cell: cell_sort_key(cell.key)):
            row = flat_row(cell).items()
            writer.writerow({name: csv_text(value) if isinstance(value, str) else value for name, value in row})


def write_parquet(cells: Iterable[Cell], path: str | os.PathLike[str]) -> None:
    """Write Parquet with typed, nullable columns; needs the extra "parquet"."""
    arrow = require("pyarrow", extra="parquet")
    parquet = require("pyarrow.parquet", extra="parquet")
    types = {str: arrow.string(), int: arrow.int64(), float: arrow.float64()}
    schema = arrow.schema([(name, types[kind]) for name, kind in columns().items()])
    rows = [flat_row(cell) for cell in sorted(cells, key=lambda cell: cell_sort_key(cell.key))]
    with replacing(Path(path)) as temporary, temporary.open("wb") as file:  # opened here: errors name the user's file
        parquet.write_table(arrow.Table.from_pylist(rows, schema=schema), file)
