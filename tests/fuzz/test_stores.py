"""Stores and records whose bytes or contents were changed."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import zlib
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from tests.fuzz.harness import Drawn, Edit, damaged, edited, edits, fuzz, nothing_written, refusal, values
from tests.results.samples import KEY, PROVENANCE, RESULT, cell
from trust_tta.errors import TrustError
from trust_tta.report.formats import tables_text
from trust_tta.report.model import read_report
from trust_tta.report.page import render_page
from trust_tta.results import CellKey, ResultStore, from_json, to_json
from trust_tta.results.order_records import EntropyByOrder, read_records

COLUMNS = {
    "cells": (
        "digest",
        "key",
        "status",
        "message",
        "result",
        "course",
        "facts",
        "label",
        "token",
        "claimant",
        "expires",
    ),
    "pictures": ("fingerprint", "place", "content"),
    "classes": ("dataset", "names"),
    "store": ("schema_version",),
}
RECORDS = [EntropyByOrder(title="fog", orders=("abcd", "badc"), entropy=(0.5, 1 / 3), k=1)]
odd_cells = st.sampled_from((
    None, 0, -1, 2**62, 0.5, 1e300, float("inf"), "", "x", "{}", "[]", "null", "[" * 2000, "\udcff", "x" * 5000, b"",
    b"\xff\xfe", b"\x00" * 100, zlib.compress(bytes(200_000_000)), zlib.compress(b"\x01" * 8), '"', '{"schema": 3}',
    "\x1b[31m", "done", "failed",
))  # fmt: skip


@cache
def store(folder: Path) -> bytes:
    """A small store with every kind of content."""
    path = folder / "good.sqlite"
    with ResultStore(path) as opened:
        opened.plan([KEY, replace(KEY, seed=1), replace(KEY, seed=2)], labels={KEY: "TRUST"})
        opened.claim([replace(KEY, seed=2)])
        opened.fail(replace(KEY, seed=2), "no such file")
        opened.finish(KEY, RESULT, PROVENANCE, label="TRUST")
        for method in ("source", "tent"):
            for domain in ("fog", "snow"):
                made = cell(method, domain, 0.5)
                opened.finish(made.key, made.result, made.provenance)
        opened.keep_pictures(KEY, {0: b"\x89PNG", 1: b"\xff\xd8"}, class_names=["cat", "dog"])
    content = path.read_bytes()
    path.unlink()
    return content


def look(path: Path) -> None:
    """Read all that a store holds."""
    with ResultStore(path, create=False) as opened:
        opened.keys()
        opened.results()
        opened.failures()
        opened.planned()
        opened.states()
        opened.counts()
        opened.pictures()
        opened.class_names()


def show_all(path: Path) -> None:
    """Make the report of a store."""
    report = read_report(path)
    for group in report.groups:
        tables_text(group)
    render_page(report)


def put(path: Path, table: str, column: str, value: Any, *, digest: str = "") -> None:
    """Change a column of a store behind its back, of one cell or of all, as far as SQLite lets anyone."""
    where = f"WHERE digest = '{digest}'" if digest else ""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA ignore_check_constraints = ON")
        with contextlib.suppress(sqlite3.Error, OverflowError, ValueError):
            connection.execute(f"UPDATE {table} SET {column} = ? {where}", [value])
        with contextlib.suppress(sqlite3.Error, UnicodeError):  # text that is no UTF-8
            connection.execute(f"UPDATE {table} SET {column} = CAST(? AS TEXT) {where}", [value])
        connection.execute("PRAGMA journal_mode = DELETE")


@fuzz(400, damage=damaged(st.just(b"\x00" * 16)), places=st.lists(st.integers(0, 1 << 20), min_size=1, max_size=4))
def test_damaged_stores(folder: Path, damage: bytes, places: list[int]) -> None:
    content = store(folder)
    for place in places:
        at = place % (len(content) + 1)
        content = content[:at] + damage + content[at + len(damage) :]
    (folder / "r.sqlite").write_bytes(content)
    with nothing_written(folder), refusal():
        look(folder / "r.sqlite")


@fuzz(
    300,
    place=st.sampled_from([(table, column) for table, columns in COLUMNS.items() for column in columns]),
    value=odd_cells.map(Drawn),
)
def test_odd_contents_of_stores(folder: Path, place: tuple[str, str], value: Drawn) -> None:
    (folder / "r.sqlite").write_bytes(store(folder))
    put(folder / "r.sqlite", *place, value.value)
    with nothing_written(folder), refusal():
        look(folder / "r.sqlite")
    with nothing_written(folder), refusal():
        show_all(folder / "r.sqlite")


@fuzz(250, column=st.sampled_from(("key", "result", "facts")), changes=edits())
def test_odd_values_in_records(folder: Path, column: str, changes: list[Edit]) -> None:
    whole = {"key": KEY, "result": RESULT, "facts": PROVENANCE}[column]
    try:
        text = json.dumps(edited(json.loads(to_json(whole)), changes))
    except (TypeError, ValueError, RecursionError):
        return
    (folder / "r.sqlite").write_bytes(store(folder))
    put(folder / "r.sqlite", "cells", column, text, digest=KEY.digest)
    if column == "key":  # a cell that is odd, but whole
        with contextlib.suppress(TrustError):
            put(folder / "r.sqlite", "cells", "digest", from_json(CellKey, text).digest, digest=KEY.digest)
    with nothing_written(folder), refusal():
        look(folder / "r.sqlite")
    with nothing_written(folder), refusal():
        show_all(folder / "r.sqlite")


@fuzz(250, content=damaged(st.sampled_from([to_json(record).encode() for record in RECORDS])), other=values)
def test_damaged_analyses(folder: Path, content: bytes, other: Drawn) -> None:
    (folder / "orders.json").write_bytes(content)
    with nothing_written(folder), refusal():
        read_records([folder / "orders.json"])
    with contextlib.suppress(TypeError, ValueError, RecursionError):
        (folder / "orders.json").write_text(json.dumps(edited(json.loads(to_json(RECORDS[0])), [([2, 1], other)])))
        with nothing_written(folder), refusal():
            read_records([folder / "orders.json"])
