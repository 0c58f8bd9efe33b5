"""Records of analyses on disk."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from trust_tta.errors import DataError
from trust_tta.results import from_json, to_json
from trust_tta.results.order_records import EntropyByOrder, LossSurface, SurfacePoint, read_records, write_record

RECORD = EntropyByOrder(title="fog", orders=("abcd", "badc"), entropy=(0.5, 1 / 3), k=1)


def test_a_record_is_written_whole_into_folders_that_are_made(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "orders-fog.json"
    write_record(RECORD, path)
    write_record(RECORD, path)
    assert [file.name for file in path.parent.iterdir()] == ["orders-fog.json"]
    assert read_records([path.parent]) == [RECORD]


def test_a_point_without_a_loss_goes_through_json() -> None:
    points = tuple(SurfacePoint(name=name, x=0.0, y=1.0) for name in ("abcd", "mean"))
    record = LossSurface(title="t", x=(0.0,), y=(1.0,), loss=((2.0,),), adapted=points[:1], mean=points[1])
    found = from_json(LossSurface, to_json(record))
    assert math.isnan(found.mean.loss)
    assert found.adapted[0].name == "abcd"


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nothing.json"):
        read_records([tmp_path / "nothing.json"])
