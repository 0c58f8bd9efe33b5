"""Wrong names and values on the command line: exit code 2 and one line with the nearest right name."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from trust_tta.cli.main import main

SAMPLE = ["--dataset", "sample", "--checkpoint", "vmamba_nano_cifar10", "--methods", "bn"]
FINETUNE = ["--checkpoint", "vmamba_nano_cifar10", "--data", "cifar10", "--out", "x"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["bench", "--methods", "trsut"], "--methods: unknown method 'trsut'; did you mean 'trust'?"),
        (["bench", "--methods", "tent", "--option", "tnet.lr=1"], "--option tnet.lr: the method 'tnet' is not run"),
        (
            ["bench", "--methods", "tent", "--option", "tent.lrr=1"],
            "--methods: method 'tent': lrr: there is no such option; did you mean 'lr'?",
        ),
        (["bench", "--model", "vmamba_nan"], "--model: unknown network 'vmamba_nan'; did you mean 'vmamba_nano'?"),
        (["bench", "--dataset", "cifar10c1"], "--dataset: unknown data set 'cifar10c1'; did you mean 'cifar10-c'?"),
        (["bench", *SAMPLE, "--domains", "fgo"], "--domains: 'fgo' is not a corruption; did you mean 'fog'?"),
        (["bench", *SAMPLE, "--severity", "6"], "--severity is 6; give a value <= 5"),
        (["bench", *SAMPLE, "--batch-size", "8,0"], "--batch-size is 0; give a value >= 1"),
        (["bench", *SAMPLE, "--device", "cuad"], "--device: 'cuad' is unknown; give auto, cpu, cuda or cuda:1"),
        (["bench", "--checkpoint", "x.pth"], "--dataset is missing, and it has no default; --methods is missing"),
        (["rank", "--dataset", "pacs", "--domains", "foto"], "has no domain 'foto'; did you mean 'photo'?"),
        (
            ["bench", *SAMPLE, "--setting", "onlin"],
            "--setting: the setting 'onlin' is not known; did you mean 'online'?",
        ),
        (
            ["bench", *SAMPLE[:2], "--checkpoint", "vmamba_nano_cifar", "--methods", "bn", "--list"],
            "did you mean 'vmamba_nano_cifar10'?",
        ),
        (["bench", *SAMPLE, "--images", "x.npy"], "--images: only the data set 'array' takes images and labels"),
        (["speed", "--model", "vmamba_tiny"], "unknown network 'vmamba_tiny'; did you mean"),
        (["train", "--data", "cifar", "--out", "x"], "unknown data set 'cifar'; did you mean"),
        (
            ["train", "--data", "cifar10", "--out", "x", "--precision", "bf17"],
            "precision is 'bf17'; did you mean 'bf16'?",
        ),
        (["train", "--data", "pacs", "--out", "x", "--target", "foto"], "has no domain 'foto'; did you mean 'photo'?"),
        (["finetune", "--checkpoint", "x.pth", "--data", "pac", "--out", "x"], "unknown data set 'pac'"),
        (["finetune", *FINETUNE, "--preprocessing", "imagnet"], "unknown preprocessing 'imagnet'; did you mean"),
        (["finetune", *FINETUNE, "--lr", "-1"], "lr is -1; give a value > 0"),
        (["speed", "--device", "cuad"], "device 'cuad' is unknown; give auto, cpu, cuda or cuda:1"),
        (["serve", "--method", "tid", "--port", "0"], "unknown method 'tid'; did you mean 'tide'?"),
        (["export", "vmamba_nano_cifar"], "did you mean 'vmamba_nano_cifar10'?"),
        (["data", "check", ".", "--checkpoint", "vmamba_nano_cifar"], "did you mean 'vmamba_nano_cifar10'?"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_mistake_is_one_line(
    argv: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_wrong_corruption_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import numpy as np

    np.save(tmp_path / "images.npy", np.zeros((1, 32, 32, 3), np.uint8))
    assert main(["corrupt", str(tmp_path / "images.npy"), str(tmp_path / "out"), "--corruptions", "snw"]) == 2
    assert "did you mean 'snow'?" in capsys.readouterr().err


def test_wrong_names_are_refused_without_torch() -> None:
    code = """
import sys
sys.modules["torch"] = None  # importing it fails
from trust_tta.cli.main import main
for argv in (["bench", "--methods", "trsut"], ["bench", "--model", "x"], ["bench", "--dataset", "x"],
             ["bench", "--dataset", "sample", "--domains", "x"], ["bench", "--setting", "x"],
             ["train", "--data", "x", "--out", "o"]):
    assert main(argv) == 2, argv
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


def test_file_is_parsed_once_and_all_its_mistakes_are_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        'methods = [{name = "tent", lrr = 1}]\nstream.setting = "onlin"\n[[parts]]\nmodel.name = "vmamb"\n'
        'data.dataset = "sample"\n'
    )
    parsed: list[str] = []
    loads = tomllib.loads

    def count(text: str) -> dict[str, Any]:
        parsed.append(text)
        return loads(text)

    monkeypatch.setattr(tomllib, "loads", count)
    assert main(["bench", str(file)]) == 2
    assert parsed.count(file.read_text()) == 1
    error = capsys.readouterr().err
    for words in ("lrr: there is no such option; did you mean 'lr'?", "did you mean 'online'?", "network 'vmamb'"):
        assert words in error
    assert main(["bench", str(tmp_path / "mime.toml")]) == 2
    assert f"did you mean '{file}'?" in capsys.readouterr().err
