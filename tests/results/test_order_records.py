"""Records of analyses on disk."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.results.samples import ORDER_RECORDS, SURFACE
from trust_tta.errors import DataError
from trust_tta.results import from_json, to_json
from trust_tta.results.order_records import (
    EntropyByOrder,
    LossSurface,
    OrderRecord,
    SurfacePoint,
    read_records,
    write_record,
)

RECORD = EntropyByOrder(title="fog", orders=("abcd", "badc"), entropy=(0.5, 1 / 3), k=1)


def test_a_record_is_written_whole_into_folders_that_are_made(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "orders-fog.json"
    write_record(RECORD, path)
    write_record(RECORD, path)
    assert [file.name for file in path.parent.iterdir()] == ["orders-fog.json"]
    assert read_records([path.parent]) == [RECORD]


def test_nan_losses_are_read_back() -> None:
    points = tuple(SurfacePoint(name=name, x=0.0, y=1.0) for name in ("abcd", "mean"))
    record = LossSurface(title="t", x=(0.0,), y=(1.0,), loss=((2.0,),), adapted=points[:1], mean=points[1])
    found = from_json(LossSurface, to_json(record))
    assert math.isnan(found.mean.loss)
    assert found.adapted[0].name == "abcd"


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nothing.json"):
        read_records([tmp_path / "nothing.json"])


@pytest.mark.parametrize("record", ORDER_RECORDS, ids=lambda record: type(record).__name__)
def test_records_are_read_back_from_files(record: OrderRecord, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(to_json(record))
    (read,) = read_records([path])
    assert to_json(read) == to_json(record)
    assert [to_json(r) for r in read_records([tmp_path])] == [to_json(record)]


@pytest.mark.parametrize(
    ("text", "why"),
    [("{", "is not JSON"), ('{"kind": "Planet"}', "kind 'Planet'"), ("[1]", "kind None")],
    ids=["no json", "unknown kind", "a list"],
)
def test_other_files_are_refused(text: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(DataError, match=why):
        read_records([path])


def test_lengths_must_agree() -> None:
    with pytest.raises(DataError, match="lengths"):
        EntropyByOrder(title="t", orders=("abcd",), entropy=(1.0, 2.0))
    with pytest.raises(DataError, match="2 by 3"):
        LossSurface(title="t", x=(0.0, 1.0, 2.0), y=(0.0, 1.0), loss=((1.0,),), adapted=(), mean=SURFACE.mean)
