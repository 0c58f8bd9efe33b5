"""Names from outside the package."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from trust_tta.errors import ConfigError
from trust_tta.plugins import installed, resolve


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "her_package.py").write_text("class Mine:\n    class Inner: pass\n")
    (tmp_path / "her_broken.py").write_text("class Mine: pass\nMine.size = 1 / 0\n")
    info = tmp_path / "her_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: her-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[trust_tta.methods]\nmine = her_package:Mine\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "her_package", raising=False)


def test_ours_come_first() -> None:
    assert resolve("tent", {"tent": 1}, group="trust_tta.methods") == 1


@pytest.mark.usefixtures("package")
def test_an_object_of_a_module_and_an_entry_point() -> None:
    by_path = resolve("her_package:Mine", {}, group="trust_tta.methods")
    assert by_path.__name__ == "Mine"
    assert resolve("mine", {}, group="trust_tta.methods") is by_path
    assert resolve("her_package:Mine.Inner", {}, group="trust_tta.models") is by_path.Inner
    assert installed("trust_tta.methods") == ["mine"]


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("tnet", "unknown method 'tnet'; did you mean 'tent'?"),
        ("mnie", "did you mean 'mine'?"),
        ("no_such_package:Name", "cannot be imported"),
        ("her_broken:Mine", "'her_broken' raises ZeroDivisionError (division by zero)"),
        ("her_package:Mein", "did you mean 'Mine'?"),
        ("", "give a string"),
        (":", "is not 'package.module:Name'"),
        ("..her:Mine", "is not 'package.module:Name'"),
        ("her_package:", "is not 'package.module:Name'"),
    ],
)
def test_a_wrong_name_is_one_line(name: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(name, {"tent": 1}, group="trust_tta.methods")
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)
