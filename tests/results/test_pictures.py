"""Pictures beside the cells, and stores that were written before there were any."""

from __future__ import annotations

import json
import sqlite3
import zlib
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from tests.results.samples import FACTS, KEY, RESULT
from trust_tta.errors import DataError
from trust_tta.results import Course, ResultStore, SamplePrediction, to_json

# The schema as version 1 wrote it.
VERSION_1 = """
PRAGMA application_id = 1416786772;
CREATE TABLE store (schema_version INTEGER NOT NULL);
INSERT INTO store VALUES (1);
CREATE TABLE cells (
    digest TEXT PRIMARY KEY, key TEXT NOT NULL, status TEXT NOT NULL, token TEXT, claimant TEXT, expires REAL,
    message TEXT, result TEXT, course BLOB, facts TEXT
) WITHOUT ROWID;
"""
FATE = SamplePrediction(index=3, label=1, before=0, after=1, confidence=0.5)


def write_old_store(path: Path) -> None:
    """One finished cell, in the words of version 1."""

    def old(record: object) -> str:
        envelope = json.loads(to_json(record)) | {"schema": 1}
        envelope["data"].pop("correct", None)
        for fate in envelope["data"].get("predictions", []):
            del fate["confidence_before"]
        return json.dumps(envelope)

    result = replace(RESULT, course=Course(), predictions=(FATE,))
    row = (KEY.digest, old(KEY), old(result), zlib.compress(bytes(9)), old(FACTS))
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.executescript(VERSION_1)
        connection.execute(
            "INSERT INTO cells (digest, key, status, result, course, facts) VALUES (?, ?, 'done', ?, ?, ?)", row
        )


def test_pictures_come_back_once_for_all_cells_of_a_stream(tmp_path: Path) -> None:
    path = tmp_path / "results.db"
    with ResultStore(path) as store:
        for method in ("tent", "trust"):
            key = replace(KEY, method=method)
            store.keep_pictures(key, {5: b"five", 0: b"\x00zero"}, class_names=("cat", "dög"))
        store.keep_pictures(replace(KEY, fingerprint="other", dataset="pacs"), {5: b"another"})
    with ResultStore(path, create=False) as store:
        assert store.pictures() == {
            (KEY.fingerprint, 0): b"\x00zero",
            (KEY.fingerprint, 5): b"five",
            ("other", 5): b"another",
        }
        assert store.class_names() == {KEY.dataset: ("cat", "dög")}


def test_what_was_kept_first_stays(tmp_path: Path) -> None:
    with ResultStore(tmp_path / "results.db") as store:
        store.keep_pictures(KEY, {1: b"first"}, class_names=("a",))
        store.keep_pictures(KEY, {1: b"second", 2: b"new"}, class_names=("b",))
        assert sorted(store.pictures().values()) == [b"first", b"new"]
        assert store.class_names() == {KEY.dataset: ("a",)}


def test_an_old_store_opens_without_pictures_and_takes_new_ones(tmp_path: Path) -> None:
    path = tmp_path / "results.db"
    write_old_store(path)
    with ResultStore(path) as one, ResultStore(path) as other:
        (cell,) = one.results()
        assert (cell.key, cell.facts) == (KEY, FACTS)
        assert cell.result.predictions == (FATE,)
        assert not one.pictures()
        assert not one.class_names()
        other.keep_pictures(KEY, {3: b"three"})
        assert one.pictures() == {(KEY.fingerprint, 3): b"three"}
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT schema_version FROM store").fetchall() == [(3,)]


def test_an_old_store_is_read_as_it_lies_with_labels_worked_out(tmp_path: Path) -> None:
    """Reading changes nothing, so a store on a disk that cannot be written is read as well."""
    path = tmp_path / "results.db"
    write_old_store(path)
    before = path.read_bytes()
    with ResultStore(path, create=False) as store:
        (cell,) = store.results()
        assert (cell.label, cell.result.correct, store.pictures()) == ("trust", b"", {})
    assert path.read_bytes() == before


def test_an_old_store_that_is_damaged_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "results.db"
    write_old_store(path)
    data = bytearray(path.read_bytes())
    data[-4096:] = b"\xa5" * 4096
    path.write_bytes(data)
    with pytest.raises(DataError, match="damaged"):
        ResultStore(path)
    assert path.read_bytes() == data
