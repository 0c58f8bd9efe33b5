"""`trust-tta speed`: a smoke run, its record, and a backend that may not be timed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.conftest import SetThreads
from trust_tta.cli.main import main
from trust_tta.ops import selfcheck


@pytest.fixture(autouse=True)
def one_thread(threads: SetThreads) -> None:
    """Threads that wait for each other's turn would make small work slow."""
    threads(1)


def test_a_quick_run_measures_every_part_and_leaves_a_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["speed", "--quick", "--device", "cpu"]) == 0
    (out,) = (tmp_path / "runs").iterdir()
    record = json.loads(out.read_text())
    assert record["schema_version"] == 1
    assert record["facts"]["started"] < record["facts"]["finished"]
    rows = record["rows"]
    assert [row["failed"] for row in rows] == [""] * len(rows)
    assert {row["part"] for row in rows} == {"network", "scan"}
    assert {row["backend"] for row in rows} == {"cpu", "reference"}
    assert all(row["first_ms"] > 0 for row in rows)
    assert any("TRUST K=6 sequential" in place for place in record["over_reference"])
    text = capsys.readouterr().out
    assert f"the record is in runs/{out.name}" in text
    assert re.fullmatch(r"speed-\d{8}-\d{6}\.json", out.name)
    for words in (
        "TRUST K=6 parallel split",
        "first call",
        "2,570,314 parameters",
        "x as fast as with the reference scan",
    ):
        assert words in text


def test_a_backend_that_fails_its_check_is_not_timed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(selfcheck, "TOLERANCE", 1e-12)  # no float32 result is that close
    assert main(["speed", "--quick", "--device", "cpu", "--out", str(tmp_path / "new" / "speed.json")]) == 1
    record = json.loads((tmp_path / "new" / "speed.json").read_text())
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["speed.json"]
    assert all(row["failed"].startswith("refused") and row["median_ms"] is None for row in record["rows"])
    assert not record["parity"]["cpu"]["passed"]
    output = capsys.readouterr()
    assert "was not timed" in output.err
    assert "failed: forward" in output.out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--dtype", "float8"], "--dtype"),
        (["--batch", "0"], "--batch"),
        (["--model", "vmamba_nan"], "did you mean 'vmamba_nano'"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_misuse(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["speed", "--device", "cpu", *flags]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
