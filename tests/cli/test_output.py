"""Where commands write is tried before the work; what killed runs left behind is removed."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from trust_tta.atomic import remove_stale, replacing, temporary_name
from trust_tta.cli.main import main
from trust_tta.cli.output import writable_file, writable_folder
from trust_tta.errors import TrustError

READ_ONLY = Path("/proc/sys")  # a file system that even root cannot write


def test_a_folder_that_can_be_made_is_not_made(tmp_path: Path) -> None:
    assert writable_folder("--out", tmp_path / "a" / "b") == tmp_path / "a" / "b"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not READ_ONLY.is_dir(), reason="no read-only folder at hand")
@pytest.mark.parametrize(
    "argv",
    [
        ["demo", "--out", f"{READ_ONLY}/demo"],
        ["train", "--data", "cifar10", "--out", f"{READ_ONLY}/run"],
        ["speed", "--out", f"{READ_ONLY}/speed.json"],
        ["rank", "--json", f"{READ_ONLY}/records"],
        ["rank", "--json", f"{READ_ONLY}/rank.json"],
        ["bench", "--export", f"{READ_ONLY}/cells.csv"],
        ["data", "get", "cifar10", "--root", f"{READ_ONLY}/data"],
    ],
    ids=lambda argv: argv[0],
)
def test_a_folder_that_cannot_be_written_is_refused_at_once(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 1
    out, error = capsys.readouterr()
    assert out == ""
    assert f"trust-tta: {argv[-2]} {argv[-1]}: '{READ_ONLY}' cannot be written" in error
    assert ".tmp" not in error
    assert error.count("\n") == 1


def test_a_folder_in_the_place_of_a_file(tmp_path: Path) -> None:
    with pytest.raises(TrustError, match="is a folder or a device"):
        writable_file("--export", tmp_path)


def test_an_error_of_the_disk_names_the_users_file(tmp_path: Path) -> None:
    target = tmp_path / "mine.json"
    with pytest.raises(OSError, match="Failed to open") as caught, replacing(target) as temporary:
        raise OSError(errno.EROFS, f"Failed to open local file '{temporary}'")  # as pyarrow puts it
    assert (caught.value.filename, caught.value.strerror) == (str(target), f"Failed to open local file '{target}'")
    (tmp_path / "file").write_text("no folder: removing what is not there fails too")
    with pytest.raises(NotADirectoryError) as other, replacing(tmp_path / "file" / "mine.json") as temporary:
        temporary.write_text("x")
    assert other.value.filename == str(tmp_path / "file" / "mine.json")


@pytest.mark.skipif(os.name != "posix", reason="SIGKILL")
def test_files_of_a_killed_run_are_removed_at_the_next_start(tmp_path: Path) -> None:
    code = f"""
import os, signal
from pathlib import Path
from trust_tta.atomic import replacing
with replacing(Path({str(tmp_path)!r}) / "model.safetensors") as temporary:
    temporary.write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 1
    mine = temporary_name(tmp_path / "mine")  # of a process that lives
    mine.write_text("being written")
    strange = tmp_path / ".notes.tmp"  # not ours
    strange.write_text("precious")
    elsewhere = tmp_path / f".x.{0:08x}-1-{'0' * 16}.tmp"  # of another machine, perhaps still written
    elsewhere.write_text("being written")
    writable_folder("--out", tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([mine, strange, elsewhere])
    os.utime(elsewhere, (0, 0))
    remove_stale(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([mine, strange])


def test_every_command_prints_through_one_function() -> None:
    """So that no name or label of a user's file controls the terminal."""
    folder = Path(__file__).parents[2] / "src" / "trust_tta" / "cli"
    own = {"output.py", "main.py"}
    assert [file.name for file in folder.glob("*.py") if "print(" in file.read_text() and file.name not in own] == []
