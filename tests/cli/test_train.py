"""`trust-tta train`: real pictures in, a described network out, resumed after an interruption."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from tests.conftest import SetThreads
from tests.data.trees import PACS_ROOT, class_tree, thumbnails
from trust_tta.bench.config import ModelConfig
from trust_tta.bench.experiment import find_checkpoint, load_network
from trust_tta.cli.main import main
from trust_tta.cli.output import ProgressDisplay
from trust_tta.data.class_names import PACS_CLASSES
from trust_tta.data.dataset import Dataset
from trust_tta.errors import DataError
from trust_tta.models.weights import read_weights
from trust_tta.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Preprocessing
from trust_tta.progress import Progress
from trust_tta.training import TrainRecipe, open_training_data, train
from trust_tta.training.data import read_arrays


class Counter(Progress):
    steps = 0

    def advance(self, n: int = 1) -> None:
        self.steps += n


DOMAINS = ("art_painting", "cartoon", "photo", "sketch")
TINY = ["--set", "depths=[1,1]", "--set", "dims=[8,16]", "--size", "16", "--epochs", "2", "--device", "cpu"]
OVERRIDES = {"depths": [1, 1], "dims": [8, 16]}


@pytest.fixture(autouse=True)
def one_thread(threads: SetThreads) -> None:
    threads(1)


@pytest.fixture(scope="module")
def pacs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few real pictures of every domain and class, or generated ones where PACS is not at hand."""
    root = tmp_path_factory.mktemp("data")
    for domain in DOMAINS:
        for name in PACS_CLASSES:
            files = sorted((PACS_ROOT / domain / name).glob("*"))[:4] if PACS_ROOT.is_dir() else []
            folder = root / "pacs" / domain / name
            folder.mkdir(parents=True)
            for file in files:
                Image.open(file).convert("RGB").resize((40, 40)).save(folder / f"{file.stem}.jpg")
        if not PACS_ROOT.is_dir():
            class_tree(root / "pacs" / domain, PACS_CLASSES, per_class=4)
    return root


def pacs_flags(root: Path, out: Path) -> list[str]:
    return ["train", "--data", "pacs", "--root", str(root), "--target", "photo", "--out", str(out), *TINY]


def test_training_several_targets_equals_one_command_for_each(
    pacs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["train", "--data", "pacs", "--root", str(pacs), "--target", "photo,sketch", *TINY]
    assert main([*flags, "--out", str(tmp_path / "without_{domain}"), "--processes", "2"]) == 0
    text = capsys.readouterr().out
    assert text.count("photo: epoch ") == text.count("sketch: epoch ") == 2
    assert main(pacs_flags(pacs, tmp_path / "alone")) == 0
    both = [load_file(tmp_path / name / "model.safetensors") for name in ("without_photo", "alone")]
    assert all(torch.equal(both[0][name], both[1][name]) for name in both[0])


@pytest.mark.parametrize(
    ("target", "out", "words"),
    [
        ("photo,sketch", "run", "need a folder each"),
        ("photo,photo", "run_{domain}", "each once"),
        ("photo,", "run_{domain}", "each once"),
        ("photo,skech", "run_{domain}", "skech"),
    ],
)
def test_several_targets_that_cannot_be_trained(
    pacs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], target: str, out: str, words: str
) -> None:
    flags = ["train", "--data", "pacs", "--root", str(pacs), "--target", target, "--out", str(tmp_path / out), *TINY]
    assert main(flags) in (1, 2)
    *progress, last = capsys.readouterr().err.strip().splitlines()
    assert words in last
    assert all(line.startswith("networks: ") for line in progress)


def test_leave_one_domain_out(pacs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The target is never seen; the file says how to feed it, and `bench` goes by that."""
    out = tmp_path / "run"
    assert main(pacs_flags(pacs, out)) == 0
    text = capsys.readouterr().out
    assert "76 images of pacs (all domains but photo) to train on, 8 validation images" in text
    assert text.count("epoch ") == 2
    assert {path.name for path in out.iterdir()} == {"model.safetensors", "train.json", "card.md", "checkpoint.pt"}
    record = json.loads((out / "train.json").read_text())
    assert len(record["history"]) == 2
    assert record["sha256"] in (out / "card.md").read_text()
    assert "## Clean validation accuracy" in (out / "card.md").read_text()
    config = ModelConfig(checkpoint=str(out / "model.safetensors"))  # the file says how it differs from the variant
    checkpoint = find_checkpoint(config, domain="photo")
    assert (checkpoint.variant, checkpoint.num_classes) == ("vmamba_nano", 7)
    assert checkpoint.preprocessing == Preprocessing(size=16, resize=None, crop=False)
    # one of the eight pictures may lie so close to a border that rounding to fp16 moves it
    stated = record["accuracy"]["averaged weights, new statistics"]
    assert accuracy_of(config, open_held_out(pacs)) == pytest.approx(stated, abs=0.126)


def open_held_out(root: Path) -> Dataset:
    return open_training_data("pacs", root, target="photo").held_out


def accuracy_of(config: ModelConfig, dataset: Dataset) -> float:
    """The accuracy of the written file, loaded and fed as `bench` does."""
    checkpoint = find_checkpoint(config, domain="photo")
    model = load_network(checkpoint, dataset=dataset, device=torch.device("cpu"))
    with torch.no_grad():
        logits = model(checkpoint.preprocessing([dataset.image(i) for i in range(len(dataset))]))
    return float((logits.argmax(1).numpy() == dataset.labels).mean())


def test_the_file_runs_in_bench(pacs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "photo"
    assert main(pacs_flags(pacs, out)) == 0
    config = tmp_path / "run.toml"
    config.write_text(
        f'[model]\ncheckpoint = "{tmp_path}/{{domain}}/model.safetensors"\n'
        "overrides = {depths = [1, 1], dims = [8, 16]}\n"
        f'[data]\ndataset = "pacs"\nroot = "{pacs}"\ndomains = ["photo"]\n'
    )
    flags = [
        "--methods",
        "source,trust",
        "--batch-size",
        "14",
        "--device",
        "cpu",
        "--store",
        str(tmp_path / "s.sqlite"),
    ]
    assert main(["bench", str(config), *flags]) == 0
    assert "photo" in capsys.readouterr().out


def test_the_next_command_works(
    pacs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(pacs_flags(pacs, Path("my run"))) == 0
    command = capsys.readouterr().out.strip().splitlines()[-1].partition("next: trust-tta ")[2]
    assert main([*shlex.split(command), "--device", "cpu"]) == 0
    assert "trust" in capsys.readouterr().out


def test_training_from_python(pacs: Path, tmp_path: Path) -> None:
    """The same numbers as from the command."""
    data = open_training_data("pacs", pacs, target="photo")
    recipe = TrainRecipe(epochs=2, warmup_epochs=0.5, crop_padding=2, cutout=4, mean=IMAGENET_MEAN, std=IMAGENET_STD)
    trained = train(data, recipe, out=tmp_path / "python", overrides=OVERRIDES, size=16)
    assert main(pacs_flags(pacs, tmp_path / "command")) == 0
    record = json.loads((tmp_path / "command" / "train.json").read_text())
    assert trained.accuracy == list(record["accuracy"].values())[-1]
    assert [epoch["loss"] for epoch in trained.record["history"]] == [epoch["loss"] for epoch in record["history"]]
    assert json.loads(json.dumps(trained.record["recipe"])) == record["recipe"]


def test_training_starts_from_a_checkpoint_of_another_norm(
    pacs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With steps too small to move a weight, those of the same names are the checkpoint's."""
    start, out = tmp_path / "start", tmp_path / "out"
    assert main(pacs_flags(pacs, start)) == 0
    file = start / "model.safetensors"
    flags = ["--init", str(file), "--set", "norm=layer", "--lr", "1e-12"]
    assert main(pacs_flags(pacs, out) + flags) == 0
    assert f"of the weights start from '{file}', the others at random" in capsys.readouterr().out
    old, new = (read_weights(folder / "model.safetensors").state for folder in (start, out))
    assert set(old) - set(new) == {name for name in old if "running" in name or "num_batches" in name}
    assert new.keys() <= old.keys()
    for name, value in new.items():
        assert torch.allclose(value, old[name], atol=2e-3), name
    record = json.loads((out / "train.json").read_text())
    assert record["recipe"]["init"] == "model.safetensors"
    assert record["recipe"]["init_sha256"] == json.loads((start / "train.json").read_text())["sha256"]
    wider = ["--set", "dims=[12,24]", "--init", str(file)]
    assert main(pacs_flags(pacs, tmp_path / "other") + wider) == 2
    assert (
        "% of the network's weights, by name and shape; start from a checkpoint of the same variant"
        in capsys.readouterr().err
    )


def test_out_is_tried_before_the_work(pacs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "taken").write_text("a file")
    assert main(pacs_flags(pacs, tmp_path / "taken" / "run")) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith(f"trust-tta: --out {tmp_path}/taken/run: '{tmp_path}/taken' is not a folder")
    assert captured.out == ""


def test_an_interrupted_run_goes_on(
    pacs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert main(pacs_flags(pacs, whole)) == 0
    note = ProgressDisplay.note

    def interrupt(drawer: ProgressDisplay, text: str) -> None:
        if text.startswith("epoch"):
            raise KeyboardInterrupt
        note(drawer, text)

    monkeypatch.setattr(ProgressDisplay, "note", interrupt)
    assert main(pacs_flags(pacs, broken)) == 130
    assert not (broken / "model.safetensors").exists()
    said = capsys.readouterr().err
    assert said.startswith("trust-tta: interrupted; the epochs before this one are kept; to continue: trust-tta train")
    monkeypatch.setattr(ProgressDisplay, "note", note)
    assert main(shlex.split(said.split("to continue: trust-tta ")[1])) == 0
    assert "continued after epoch 1 of an earlier run" in capsys.readouterr().out
    one, other = (read_weights(folder / "model.safetensors").state for folder in (whole, broken))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_cifar_is_tested_on_its_test_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "cifar10"
    folder.mkdir()
    for part, count in (("train", 40), ("test", 12)):
        np.save(folder / f"{part}_images.npy", thumbnails(count))
        np.save(folder / f"{part}_labels.npy", np.arange(count) % 10)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("batch_size = 16\ncutmix = 0.0\n")
    flags = ["--set", "depths=[1]", "--set", "dims=[8]", "--epochs", "1", "--recipe", str(recipe), "--device", "cpu"]
    out = tmp_path / "out"
    assert main(["train", "--data", "cifar10", "--root", str(tmp_path), "--out", str(out), *flags]) == 0
    assert "40 images of cifar10 (train) to train on, 12 test images" in capsys.readouterr().out
    record = json.loads((out / "train.json").read_text())
    assert (record["recipe"]["batch_size"], record["recipe"]["cutmix"], record["recipe"]["cutout"]) == (16, 0.0, 8)
    assert record["measured_on"] == "test"


def test_every_mistake_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('learning_rate = 1.0\nlabel_smoothing = 2.0\nflip = "yes"\n')
    flags = ["--recipe", str(recipe), "--lr", "-1", "--set", "depth=[1]"]
    assert main(["train", "--data", "pacs", "--root", str(tmp_path), "--out", str(tmp_path / "out"), *flags]) == 2
    error = capsys.readouterr().err
    for words in (
        "learning_rate: there is no such option",
        "flip is 'yes'",
        "lr is -1",
        "depth: there is no such option; did you mean 'depths'",
    ):
        assert words in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--data", "imagenet-c"], "cannot be trained on"),
        (["--data", "pacs", "--target", "clipart"], "pacs has no domain 'clipart'"),
        (["--data", "pacs", "--share", "1.5"], "held-out fraction is 1.5"),
        (["--data", "pacs", "--size", "4"], "at least 8 pixels"),
        (["--data", "pacs", "--size", "0"], "--size 0: give at least 8 pixels"),
        (["--data", "pacs", "--set", "drop_path=0.3"], "use --drop-path"),
        (["--data", "pacs", "--recipe", "missing.toml"], "there is no file 'missing.toml'"),
        (
            ["--data", "pacs", "--model", "vmamba_nanno"],
            "unknown network 'vmamba_nanno'; did you mean 'vmamba_nano'?",
        ),
        (["--data", "pasc"], "unknown data set 'pasc'; did you mean 'pacs'?"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_misuse(pacs: Path, tmp_path: Path, flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--root", str(pacs), "--out", str(tmp_path / "out"), *flags]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("command", ["train", "finetune --checkpoint vmamba_nano_cifar10"], ids=["train", "finetune"])
def test_the_number_of_classes_is_that_of_the_data(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        main([*command.split(), "--data", "pacs", "--out", "out", "--set", "num_classes=10"])
    assert leaving.value.code == 2
    assert "num_classes is the number of classes of the data; omit it" in capsys.readouterr().err


def test_what_is_held_out_depends_on_the_seed_alone(pacs: Path) -> None:
    one, two, other = (open_training_data("pacs", pacs, target="photo", seed=s) for s in (0, 0, 1))
    assert one.held_out.fingerprint == two.held_out.fingerprint != other.held_out.fingerprint
    whole = [part.image(i).tobytes() for part in (one.train, one.held_out) for i in range(len(part))]
    assert len(whole) == 84
    assert sorted(whole) == sorted(
        part.image(i).tobytes() for part in (other.train, other.held_out) for i in range(len(part))
    )


def test_an_image_folder_without_domains(tmp_path: Path) -> None:
    class_tree(tmp_path / "mine", ("cat", "dog", "owl"), per_class=3)
    data = open_training_data("folder", tmp_path / "mine", share=0.3)
    assert (data.train.class_names, len(data.train), len(data.held_out)) == (("cat", "dog", "owl"), 6, 3)
    fit = Preprocessing(size=20, resize=None, crop=False)
    counter = Counter()
    images, labels = read_arrays(data.train, fit, counter)
    assert labels.tolist() == data.train.labels.tolist()
    direct = data.train.image(4)
    resized = Image.fromarray(direct).resize((20, 20), Image.Resampling.BICUBIC)
    assert np.array_equal(images[4], np.asarray(resized))
    assert counter.steps == 6


def test_too_few_images_are_refused(tmp_path: Path) -> None:
    class_tree(tmp_path / "mine", ("cat", "dog"), per_class=1)
    with pytest.raises(DataError, match="2 images to train on"):
        open_training_data("folder", tmp_path / "mine")
