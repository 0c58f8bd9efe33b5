from __future__ import annotations

import os
from pathlib import Path

import pytest

from trust_tta.config_io import MAX_BYTES, parse_json, read_json, read_text, read_toml
from trust_tta.errors import ConfigError, DataError


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"seed = " + b"9" * 5000, r"is not TOML: it has an integer of thousands of digits"),
        (b"x = " + b"[" * 3000 + b"]" * 3000, "nested deeper than 64 levels"),
        (b"x = " + b"[" * 100 + b"]" * 100, "nested deeper than 64 levels"),
        (b"x = \xff", "is not UTF-8 text: .*save it as UTF-8"),
        (b"x = ", "is not TOML: Invalid value"),
        (b"#" * (MAX_BYTES + 1), "is larger than"),
    ],
    ids=["digits", "deep", "rather deep", "bytes", "cut off", "large"],
)
def test_odd_toml_ends_in_one_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "a.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        read_toml(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "text", ["9" * 5000, "[" * 100_000, "[" * 100 + "]" * 100, '{"size": Infinity}', "NaN", "{", ""]
)
def test_odd_json_ends_in_one_line(text: str) -> None:
    with pytest.raises(DataError, match="^the note is n") as caught:
        parse_json(text, where="the note", error=DataError)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, message in (("nothing", "there is no file"), (".", "is not a file"), ("pipe", "is not a file")):
        with pytest.raises(ConfigError, match=message) as caught:
            read_text(tmp_path / name)
        assert "cannot be read" not in str(caught.value)  # said once
    with pytest.raises(ConfigError, match="cannot be read"):
        read_text("a\0b")


def test_what_is_fine(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b'\xef\xbb\xbf{"a": [1, {"b": null}]}')
    assert read_json(tmp_path / "a.json") == {"a": [1, {"b": None}]}
