"""`trust-tta finetune`: a new classifier, the old backbone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.conftest import SetThreads
from tests.data.trees import save
from trust_tta.cli.main import main
from trust_tta.models.checkpoint import Checkpoint
from trust_tta.models.pretrained import PRETRAINED, locate
from trust_tta.models.weights import read_weights

NANO = "vmamba_nano_cifar10"


@pytest.fixture(autouse=True)
def one_thread(threads: SetThreads) -> None:
    threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three classes that differ in colour, in two sizes."""
    root = tmp_path_factory.mktemp("pictures")
    generator = np.random.default_rng(0)
    for label, name in enumerate(("blue", "green", "red")):
        for i in range(10):
            picture = generator.integers(0, 100, (36 + i, 40, 3), dtype=np.uint8)
            picture[..., 2 - label] += 150
            save(root / name / f"{i}.png", picture)
    return root


def test_a_new_classifier_on_the_shipped_backbone(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three classes instead of ten; every weight but the classifier's is that of the checkpoint."""
    out = tmp_path / "out"
    flags = ["--checkpoint", NANO, "--data", "folder", "--root", str(folder), "--share", "0.2", "--out", str(out)]
    assert main(["finetune", *flags, "--epochs", "60", "--lr", "0.01", "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert "24 images of folder (all domains) to train on, 6 validation images" in text
    assert "the accuracy on the validation images is 100.00 %" in text
    before, after = read_weights(locate(PRETRAINED[NANO])).state, read_weights(out / "model.safetensors").state
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"classifier.head.weight", "classifier.head.bias"}
    assert after["classifier.head.bias"].shape == (3,)
    found = Checkpoint.open(out / "model.safetensors")
    known = Checkpoint.open(NANO)
    assert (found.variant, found.num_classes, found.preprocessing) == ("vmamba_nano", 3, known.preprocessing)
    record = json.loads((out / "train.json").read_text())
    assert record["recipe"]["backbone_sha256"] == known.sha256
    assert record["history"][0]["loss"] > record["history"][-1]["loss"]
    assert "Only the classifier was trained" in (out / "card.md").read_text()


def test_a_backbone_that_differs_from_its_variant(folder: Path, tmp_path: Path) -> None:
    """The file that `train --set` wrote says how, and so does the new one."""
    where = ["--data", "folder", "--root", str(folder), "--device", "cpu", "--epochs", "1"]
    changes = ["--set", "depths=[1,1]", "--set", "dims=[8,16]", "--size", "16"]
    assert main(["train", *where, *changes, "--out", str(tmp_path / "one")]) == 0
    old, new = (tmp_path / name / "model.safetensors" for name in ("one", "two"))
    assert main(["finetune", *where, "--checkpoint", str(old), "--out", str(tmp_path / "two")]) == 0
    overrides = [dict(Checkpoint.open(file).fields) for file in (old, new)]
    assert overrides == [{"depths": [1, 1], "dims": [8, 16]}] * 2
    before, after = read_weights(old).state, read_weights(new).state
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before if "classifier.head" not in name)


def test_the_papers_settings_are_the_defaults(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    flags = ["--checkpoint", NANO, "--data", "folder", "--root", str(folder), "--out", str(out), "--device", "cpu"]
    assert main(["finetune", *flags]) == 0
    recipe = json.loads((out / "train.json").read_text())["recipe"]
    assert (recipe["epochs"], recipe["lr"]) == (300, 5e-4)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--checkpoint", "missing.pth"], "no checkpoint at 'missing.pth'"),
        (["--checkpoint", NANO, "--set", "depths=[1,1,1]"], "does not fit the network"),
        (["--checkpoint", NANO, "--preprocessing", "imagenet"], "was trained with mean"),
        (["--checkpoint", NANO, "--preprocessing", "square"], "unknown preprocessing 'square'"),
        (["--checkpoint", NANO, "--seed", "-1"], "seed is -1; give a value >= 0"),
        (["--checkpoint", NANO, "--seed", str(2**63)], "give a value <= 9223372036854775807"),
        (["--checkpoint", NANO, "--epochs", "0", "--lr", "-1"], "epochs is 0; give a value >= 1; lr is -1; give"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_misuse(folder: Path, tmp_path: Path, flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["finetune", "--data", "folder", "--root", str(folder), "--out", str(out), *flags]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
    assert not out.exists()


def test_an_existing_network_is_not_replaced(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"precious")
    flags = ["--checkpoint", NANO, "--data", "folder", "--root", str(folder), "--epochs", "1", "--device", "cpu"]
    assert main(["finetune", *flags, "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "model.safetensors' exists and would be lost" in error
    assert "give another folder (--out)" in error
    assert error.count("\n") == 1
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("model.safetensors", b"precious")]
