"""Pictures kept in a store beside the cells."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.results.samples import KEY
from trust_tta.results import ResultStore


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


def test_first_kept_pictures_are_not_replaced(tmp_path: Path) -> None:
    with ResultStore(tmp_path / "results.db") as store:
        store.keep_pictures(KEY, {1: b"first"}, class_names=("a",))
        store.keep_pictures(KEY, {1: b"second", 2: b"new"}, class_names=("b",))
        assert sorted(store.pictures().values()) == [b"first", b"new"]
        assert store.class_names() == {KEY.dataset: ("a",)}
