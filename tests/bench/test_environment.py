"""The device of a run, and the commit that is recorded with results."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from trust_tta.bench.environment import choose_device, find_commit, now
from trust_tta.errors import ConfigError


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    done = subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
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


@pytest.mark.parametrize("name", ["mps", "xpu:0", "meta"])
def test_only_a_cpu_and_cuda_will_do(name: str) -> None:
    with pytest.raises(ConfigError, match=f"device '{name}' is unknown; give auto, cpu, cuda or cuda:1"):
        choose_device(name)


def test_a_gpu_beyond_the_last_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [choose_device(name).index for name in ("cuda", "cuda:0", "cuda:1")] == [None, 0, 1]
    with pytest.raises(ConfigError, match="device 'cuda:2' does not exist; the last one is cuda:1"):
        choose_device("cuda:2")
