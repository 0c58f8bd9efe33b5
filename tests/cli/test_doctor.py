"""The doctor's findings and its verdict."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from trust_tta.cli import doctor
from trust_tta.cli.main import main
from trust_tta.ops import selfcheck
from trust_tta.ops.cpu import native


@pytest.fixture(autouse=True)
def compiled_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave Triton's interpreter out: tests/ops checks it, and it is slow."""
    monkeypatch.setattr(selfcheck, "is_interpreted", lambda: False)


def test_a_healthy_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    for words in ("torch ", "numba ", "GPU", "reference  ok", "cpu        ok", "triton", "verdict: ok"):
        assert words in text
    assert "FAILED" not in text


def test_a_backend_that_is_wrong_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(selfcheck, "TOLERANCE", 1e-12)  # no float32 result is that close
    assert main(["doctor"]) == 1
    output = capsys.readouterr()
    assert "cpu        FAILED" in output.out
    assert "verdict" not in output.out
    assert "does not agree with the reference" in output.err


def test_the_check_sees_every_gradient() -> None:
    """One wrong gradient is found and named; NaN never passes."""
    check = selfcheck.check_backend("cpu", "cpu")
    assert check.passed
    assert 0 < check.error < 1e-5
    assert not selfcheck.BackendCheck(float("nan"), "dA").passed


def test_extras_are_described(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "EXTRAS", (("figures", "no_such_package", "figures in reports"),))
    assert main(["doctor"]) == 0
    assert "missing (figures in reports); pip install 'trust-tta[figures]'" in capsys.readouterr().out


def test_broken_dependency_of_an_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fake_timm.py").write_text("import fake_torchvision\n")
    (tmp_path / "fake_torchvision.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(doctor, "_IMPORTED_FIRST", {"fake_timm": ("fake_torchvision",)})
    assert doctor.describe_extra("timm", "fake_timm", "networks of timm") == (
        "BROKEN: fake_torchvision, which fake_timm needs, cannot be imported: RuntimeError "
        "(operator torchvision::nms does not exist)"
    )


def test_every_extra_that_users_install_is_listed() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"].keys() - {"all", "docs", "dev"}
    assert {extra for extra, _, _ in doctor.EXTRAS} == extras


def test_it_names_the_data_sets_it_finds_and_says_how_to_get_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--data", str(tmp_path)]) == 0
    assert "trust-tta data get cifar10" in capsys.readouterr().out
    (tmp_path / "PACS" / "photo" / "dog").mkdir(parents=True)
    assert main(["doctor", "--data", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert f"pacs       {tmp_path / 'PACS'}" in printed
    assert "94.09 % clean accuracy" in printed


def test_compile_fills_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRUST_TTA_CACHE", str(tmp_path))
    monkeypatch.setattr(native, "KERNELS", {"gelu": native.KERNELS["gelu"]})
    native.load_kernel.cache_clear()
    lines = dict(doctor.compile_kernels())
    assert re.fullmatch(r"gelu \d+\.\d\d s", lines["CPU"])
    assert lines["kept in"] == str(tmp_path)
    assert sorted(path.name.split("_")[0] for path in (tmp_path / "kernels").iterdir()) == ["gelu", "writable"]


def test_compile_without_a_place_to_keep_kernels_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRUST_TTA_CACHE", str(tmp_path / "file"))
    assert main(["doctor", "--compile"]) == 1
    assert "set TRUST_TTA_CACHE to a folder that can be written" in capsys.readouterr().err
