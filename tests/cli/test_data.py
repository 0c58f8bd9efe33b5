"""`trust-tta data`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from trust_tta.cli.main import main
from trust_tta.data.registry import DATASETS


def test_the_list_names_every_data_set(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "list"]) == 0
    printed = capsys.readouterr().out
    for spec in DATASETS:
        assert f"\n{spec.name}: " in f"\n{printed}"
        assert spec.homepage in printed


def write_corrupted(root: Path, images: int) -> None:
    folder = root / "CIFAR-10-C"
    folder.mkdir()
    np.save(folder / "labels.npy", np.arange(50_000) % 10)
    np.save(folder / "fog.npy", np.zeros((images, 32, 32, 3), dtype=np.uint8))


def test_a_check_that_finds_errors_ends_in_exit_code_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_corrupted(tmp_path, 50_000)
    with (tmp_path / "CIFAR-10-C" / "fog.npy").open("rb+") as file:
        file.truncate(1000)
    assert main(["data", "check", str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    assert "error: " in out
    assert "fog.npy" in out
    assert "1 error, listed above" in err


def test_a_folder_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "check", str(tmp_path / "nothing")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.endswith("is not a folder; give the folder of your data sets, or of one of them\n")
    assert err.count("\n") == 1


def test_a_healthy_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.ppm").write_bytes(b"P6 2 2 255\n" + bytes(12))
    assert main(["data", "check", str(tmp_path), "--thorough"]) == 0
    assert "0 errors" in capsys.readouterr().out
