"""Files that appear whole or not at all, and errors that name what the caller named."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trust_tta.atomic import replacing, temporary_name, write_whole


def test_a_block_that_fails_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")

    def write(text: str) -> int:
        with replacing(path) as temporary:
            temporary.write_text(text)
            return 1 // len(text.removeprefix("half of the n"))

    with pytest.raises(ZeroDivisionError):
        write("half of the n")
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("a.txt", "old")]
    write("new")
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("a.txt", "new")]


def test_an_error_names_the_file_and_not_its_temporary_name(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "a.txt"
    with pytest.raises(FileNotFoundError) as error, replacing(path) as temporary:
        temporary.write_text("x")
    assert error.value.filename == str(path)


def test_a_link_stays_and_leads_to_the_new_file(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    target, link = tmp_path / "real" / "a.txt", tmp_path / "link.txt"
    target.write_text("old")
    link.symlink_to(target)
    with replacing(link) as temporary:
        temporary.write_text("new")
    assert link.is_symlink()
    assert target.read_text() == "new"


@pytest.mark.skipif(os.name != "posix", reason="named pipes")
def test_what_is_no_file_is_refused_and_left_alone(tmp_path: Path) -> None:
    pipe, folder = tmp_path / "pipe", tmp_path / "folder"
    os.mkfifo(pipe)
    folder.mkdir()
    for path in (pipe, folder):
        with pytest.raises(FileExistsError, match="give the name of a file"), replacing(path) as temporary:
            temporary.write_text("x")
    assert pipe.is_fifo()
    assert folder.is_dir()
    assert len(list(tmp_path.iterdir())) == 2


def test_what_killed_runs_left_is_removed_and_what_others_write_is_not(tmp_path: Path) -> None:
    path = tmp_path / "a[1].txt"
    old, new, other = temporary_name(path), temporary_name(path), temporary_name(tmp_path / "b.txt")
    for file in (old, new, other):
        file.write_text("half")
    for file in (old, other):
        os.utime(file, (0, 0))
    with replacing(path) as temporary:
        temporary.write_text("whole")
    assert {file.name for file in tmp_path.iterdir()} == {path.name, new.name, other.name}


def test_a_whole_file_is_written_into_folders_that_are_made(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "file"
    write_whole(path, "é\n")
    assert path.read_bytes() == "é\n".encode()
    write_whole(path, memoryview(b"bytes"))
    assert path.read_bytes() == b"bytes"
    assert [file.name for file in path.parent.iterdir()] == ["file"]
