"""Finished cells as one flat file: one row per cell, the same columns in the same order always."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

from trust_tta.atomic import replacing
from trust_tta.optional import require
from trust_tta.results.display import key_rank
from trust_tta.results.record import Cell, CellKey, CellResult, Facts
from trust_tta.results.select import VALUES


def columns() -> dict[str, type]:
    """The names of the flat columns with their types, without regard to whether they may be empty."""
    key, result, facts = (get_type_hints(kind) for kind in (CellKey, CellResult, Facts))
    kinds = {"digest": str, "label": str, **key, **{name: result[name] for name in VALUES}}
    kinds |= {f"run_{name}": kind for name, kind in facts.items()}
    return {name: (get_args(kind) or (kind,))[0] for name, kind in kinds.items()}  # `int` of `int | None`


def flat_row(cell: Cell) -> dict[str, Any]:
    """One cell as flat columns; what is not text in a name becomes a question mark."""
    row = {"digest": cell.key.digest, "label": cell.label}
    row |= {f.name: getattr(cell.key, f.name) for f in fields(CellKey)}
    row |= {name: getattr(cell.result, name) for name in VALUES}
    row |= {f"run_{f.name}": getattr(cell.facts, f.name) for f in fields(Facts)}
    texts = {name: value for name, value in row.items() if isinstance(value, str)}
    return row | {name: text.encode("utf-8", "replace").decode("utf-8") for name, text in texts.items()}


def write_csv(cells: Iterable[Cell], path: str | os.PathLike[str]) -> None:
    """Write CSV in UTF-8; floats are exact, an empty field means None."""
    with replacing(Path(path)) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(flat_row(cell) for cell in _sorted(cells))


def write_parquet(cells: Iterable[Cell], path: str | os.PathLike[str]) -> None:
    """Write Parquet with typed, nullable columns; needs the extra "parquet"."""
    arrow = require("pyarrow", extra="parquet")
    parquet = require("pyarrow.parquet", extra="parquet")
    types = {str: arrow.string(), int: arrow.int64(), float: arrow.float64()}
    schema = arrow.schema([(name, types[kind]) for name, kind in columns().items()])
    with replacing(Path(path)) as temporary, temporary.open("wb") as file:  # opened here: errors name the user's file
        parquet.write_table(arrow.Table.from_pylist([flat_row(c) for c in _sorted(cells)], schema=schema), file)


def _sorted(cells: Iterable[Cell]) -> list[Cell]:
    return sorted(cells, key=lambda cell: key_rank(cell.key))
