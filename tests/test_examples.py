"""The examples run as they are, where the library that they show is installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from trust_tta.data.sample import load_sample

ROOT = Path(__file__).resolve().parents[1]
# torchvision's operators are declared where a build for GPUs does not find its own: see tests/libraries.py.
STARTER = "import runpy, sys; from tests.libraries import import_vision; import_vision(); sys.argv = sys.argv[1:]; "


def run(name: str, *arguments: str) -> str:
    """The output of an example."""
    code = STARTER + "runpy.run_path(sys.argv[0], run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", code, str(ROOT / "examples" / name), *arguments],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def accuracies(text: str) -> dict[str, float]:
    return {name: float(value) for name, value in re.findall(r"^(\w+) +(?:\w+ +)?([\d.]+)%$", text, re.MULTILINE)}


def test_plain_loop() -> None:
    found = accuracies(run("plain_loop.py"))
    assert found.keys() == {"source", "tide"}
    assert found["tide"] > found["source"]


def test_lightning() -> None:
    if find_spec("lightning") is None:
        pytest.skip("needs lightning")
    assert accuracies(run("lightning_loop.py")) == accuracies(run("plain_loop.py"))


def test_robustbench(tmp_path: Path) -> None:
    if find_spec("robustbench") is None:
        pytest.skip("needs robustbench")
    pixels, labels = load_sample()
    folder = tmp_path / "CIFAR-10-C"
    folder.mkdir()
    repeated = np.tile(np.resize(labels, 10_000), 5)
    np.save(folder / "labels.npy", repeated)
    for name in ("fog", "contrast"):
        np.save(folder / f"{name}.npy", np.tile(np.resize(pixels, (10_000, 32, 32, 3)), (5, 1, 1, 1)))
    found = run("robustbench_benchmark.py", "--data", str(tmp_path), "--images", "64")
    assert len(re.findall(r"^(source|tent|tide) +(fog|contrast) +[\d.]+%$", found, re.MULTILINE)) == 6
