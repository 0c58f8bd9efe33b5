"""The commit that is recorded with results."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from trust_tta.bench.environment import find_commit, now

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    done = subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def test_only_a_repository_that_tracks_the_package_counts(tmp_path: Path) -> None:
    git(tmp_path, "init")
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    assert find_commit(package) is None
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "x")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert find_commit(package) == commit
    (package / "__init__.py").write_text("changed = True\n")
    assert find_commit(package) == f"{commit}-dirty"


def test_times_are_in_utc() -> None:
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", now())
