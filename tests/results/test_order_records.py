"""Records of analyses on disk."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.results.samples import ENTROPY
from trust_tta.errors import DataError
from trust_tta.results import from_json, to_json
from trust_tta.results.order_records import EntropyByOrder, read_records, write_record

RECORD = EntropyByOrder(title="fog", orders=("abcd", "badc"), entropy=(0.5, 1 / 3), k=1)


def test_a_record_is_written_whole_into_folders_that_are_made(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "orders-fog.json"
    write_record(RECORD, path)
    write_record(RECORD, path)
    assert [file.name for file in path.parent.iterdir()] == ["orders-fog.json"]
    assert read_records([path.parent]) == [RECORD]


def test_nan_entropies_are_read_back() -> None:
    record = EntropyByOrder(title="t", orders=("abcd",), entropy=(math.nan,))
    assert math.isnan(from_json(EntropyByOrder, to_json(record)).entropy[0])


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nothing.json"):
        read_records([tmp_path / "nothing.json"])


def test_records_are_read_back_from_files(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(to_json(ENTROPY))
    assert read_records([tmp_path / "a.json"]) == read_records([tmp_path]) == [ENTROPY]


@pytest.mark.parametrize(
    ("text", "why"),
    [("{", "is not JSON"), (to_json(ENTROPY).replace("EntropyByOrder", "Planet"), "is not a"), ("[1]", "is not a")],
    ids=["no json", "unknown kind", "a list"],
)
def test_other_files_are_refused(text: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(DataError, match=why):
        read_records([path])


def test_lengths_must_agree() -> None:
    with pytest.raises(DataError, match="1 orders and 2 entropies"):
        EntropyByOrder(title="t", orders=("abcd",), entropy=(1.0, 2.0))
