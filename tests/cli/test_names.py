"""A wrong name is answered before PyTorch is loaded, with the nearest right one, in the words of the flag."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from trust_tta import list_methods, list_models
from trust_tta.cli import names
from trust_tta.cli.main import main
from trust_tta.methods.registry import method_options

SAMPLE = ["--dataset", "sample"]
FINETUNE = ["--checkpoint", "vmamba_nano_cifar10", "--data", "cifar10", "--out", "x"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["bench", "--methods", "trsut"], "--methods 'trsut' is unknown; did you mean 'trust'?"),
        (["bench", "--option", "tnet.lr=1"], "--option 'tnet' is unknown; did you mean 'tent'?"),
        (["bench", "--option", "tent.lrr=1"], "--option tent: 'lrr' is unknown; did you mean 'lr'?"),
        (["bench", "--model", "vmamba_nan"], "--model 'vmamba_nan' is unknown; did you mean 'vmamba_nano'?"),
        (["bench", "--dataset", "cifar10c"], "--dataset 'cifar10c' is unknown; did you mean 'cifar10-c'?"),
        (["bench", *SAMPLE, "--domains", "fgo"], "--domains 'fgo' is unknown; did you mean 'fog'?"),
        (["rank", "--dataset", "pacs", "--domains", "foto"], "--domains 'foto' is unknown; did you mean 'photo'?"),
        (
            ["bench", *SAMPLE, "--setting", "onlin"],
            "--setting: the setting 'onlin' is not known; did you mean 'online'?",
        ),
        (["bench", "--checkpoint", "vmamba_nano_cifar"], "did you mean 'vmamba_nano_cifar10'?"),
        (["bench", *SAMPLE, "--images", "x.npy"], "--images and --labels go with --dataset array, not with"),
        (["corrupt", "in", "out", "--corruptions", "snw"], "--corruptions 'snw' is unknown; did you mean 'snow'?"),
        (["speed", "--model", "vmamba_tiny"], "--model 'vmamba_tiny' is unknown; did you mean"),
        (["train", "--data", "cifar", "--out", "x"], "--data 'cifar' is unknown; did you mean"),
        (
            ["train", "--data", "cifar10", "--out", "x", "--precision", "bf17"],
            "--precision is 'bf17'; did you mean 'bf16'?",
        ),
        (
            ["train", "--data", "pacs", "--out", "x", "--target", "foto"],
            "--target 'foto' is unknown; did you mean 'photo'?",
        ),
        (["finetune", "--checkpoint", "x.pth", "--data", "pac", "--out", "x"], "--data 'pac' is unknown"),
        (["finetune", *FINETUNE, "--preprocessing", "imagnet"], "--preprocessing 'imagnet' is unknown; did you mean"),
        (["finetune", *FINETUNE, "--lr", "-1"], "--lr is -1; give a value > 0"),
        (["speed", "--device", "cuad"], "--device 'cuad' is unknown; give auto, cpu, cuda or cuda:1"),
        (["serve", "--method", "tid"], "--method 'tid' is unknown; did you mean 'tide'?"),
        (["serve", "--variant", "vmamba_nan"], "--variant 'vmamba_nan' is unknown; did you mean 'vmamba_nano'?"),
        (["export", "vmamba_nano_cifar"], "SOURCE vmamba_nano_cifar: there is no such checkpoint; did you mean"),
        (["data", "check", ".", "--checkpoint", "vmamba_nano_cifar"], "did you mean 'vmamba_nano_cifar10'?"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_wrong_names(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_no_wrong_name_waits_for_torch() -> None:
    code = """
import sys
sys.modules["torch"] = None  # importing it fails
from trust_tta.cli.main import main
from trust_tta.methods.registry import method_options
for argv in (["bench", "--methods", "trsut"], ["bench", "--option", "tent.lrr=1"],
             ["bench", "--model", "x"], ["bench", "--dataset", "x"],
             ["bench", "--dataset", "sample", "--domains", "x"], ["corrupt", "a", "b", "--corruptions", "x"],
             ["bench", "--setting", "x"], ["train", "--data", "x", "--out", "o"], ["rank", "--checkpoint", "x"],
             ["serve", "--method", "x"], ["export", "x"], ["speed", "--device", "x"],
             ["data", "check", ".", "--checkpoint", "x"]):
    assert main(argv) == 2, argv
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


def test_names_in_a_file_are_checked_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('methods = ["source", {name = "trsut"}]\n[data]\ndataset = "sample"\n')
    assert main(["bench", str(file)]) == 2
    assert f"{file}: method 'trsut' is unknown; did you mean 'trust'?" in capsys.readouterr().err
    file.write_text('methods = [{name = "tent", lrr = 1}]\nstream.setting = "onlin"\n[[parts]]\nmodel.name = "vmamb"\n')
    assert main(["bench", str(file)]) == 2
    told = capsys.readouterr().err
    for words in ("tent: 'lrr' is unknown; did you mean 'lr'?", "did you mean 'online'?", "model 'vmamb' is unknown"):
        assert words in told
    assert main(["bench", str(tmp_path / "mime.toml")]) == 2
    assert f"did you mean '{file}'?" in capsys.readouterr().err


def test_the_names_are_those_of_the_package() -> None:
    assert names.methods() == list_methods()
    for method in list_methods():
        assert set(names.options(method)) == set(method_options(method)), method
    assert set(list_models()) <= set(names.models())
    for name in ("fog", "clean"):
        assert name in names.domains("sample")
        assert (name in names.domains("CIFAR10_C")) == (name == "fog")


def test_a_name_from_outside_the_package_is_let_through() -> None:
    names.check("--methods", "my_package.methods:Mine", names.methods())
