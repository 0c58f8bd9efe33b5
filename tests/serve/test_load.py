"""The script that tries the service under load, at a small size: its parts find nothing wrong."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from benchmarks.serve_load import main

pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs kill -9")


def test_many_requests_and_many_streams(tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    main([str(record), "--requests", "200", "--clients", "8", "--streams", "20"])
    found = json.loads(record.read_text())
    assert found["requests"]["statuses"] == {"200": 200}
    assert [turn["statuses"] for turn in found["streams"]["rounds"]] == [{"200": 20}, {"200": 20}]
    assert found["streams"]["loaded"] == 16


def test_acknowledged_data_survives_kills(tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    main([str(record), "--kills", "3"])
    found = json.loads(record.read_text())["kills"]
    assert found["lost"] == 0
    assert found["acknowledged_labels"] + found["acknowledged_events"] >= 3
