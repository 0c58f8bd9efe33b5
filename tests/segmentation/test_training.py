"""Training for segmentation: crops, weights, schedule, resuming, and `trust-tta train` from end to end."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from tests.conftest import SetThreads
from tests.segmentation.learning import CLASSES, SHORT, learn, stripes
from tests.segmentation.test_datasets import open_segmentation
from tests.segmentation.trees import write_pair
from tests.training.samples import flat
from trust_tta.cli.main import main
from trust_tta.data.segmentation import SegmentationDataset
from trust_tta.data.segmentation_metrics import IGNORED
from trust_tta.errors import ConfigError
from trust_tta.models.checkpoint import Checkpoint
from trust_tta.preprocessing import Preprocessing
from trust_tta.training import open_training_data
from trust_tta.training.data import read_arrays
from trust_tta.training.loop import learning_rate
from trust_tta.training.recipe import SegmentationRecipe, segmentation_recipe
from trust_tta.training.segmentation import (
    class_weights,
    scale_and_crop,
    segmentation,
    segmentation_loss,
)
from trust_tta.training.tasks import Samples, channel_constants, evaluate, normalize

ROOT = Path(__file__).parents[2]
SMALL = ["--set", "depths=[1,1]", "--set", "dims=[8,16]", "--set", "channels=8", "--set", "auxiliary_channels=4"]


@pytest.fixture(autouse=True)
def one_thread(threads: SetThreads) -> None:
    threads(1)


@pytest.mark.skipif(os.name != "posix", reason="SIGKILL")
def test_killed_and_resumed_equals_undisturbed_bit_for_bit(tmp_path: Path) -> None:
    killed, whole = tmp_path / "killed.pt", tmp_path / "whole.pt"
    worker = subprocess.run(
        [sys.executable, "-m", "tests.segmentation.learning", str(killed), "1"], cwd=ROOT, timeout=120
    )
    assert worker.returncode == -signal.SIGKILL
    resumed, undisturbed = learn(killed), learn(whole)
    assert (resumed.first_epoch, undisturbed.first_epoch) == (1, 0)
    first, second = (flat(torch.load(path, weights_only=True)) for path in (killed, whole))
    assert first.keys() == second.keys()
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def test_the_network_learns_to_label_pixels() -> None:
    recipe = segmentation_recipe({"epochs": 25, "batch_size": 8, "lr": 1e-2, "ema_decay": 0.9, "scales": [0.8, 1.25]})
    images, masks = stripes(16)
    metric = segmentation(CLASSES, masks, recipe).metric
    result = learn(recipe=recipe, images=16)
    score = evaluate(result.average, images, masks, mean=recipe.mean, std=recipe.std, metric=metric, batch_size=4)
    assert score > 0.8


def test_the_learning_rate_falls_by_a_polynomial() -> None:
    recipe = SegmentationRecipe(epochs=10, warmup_epochs=2, lr=0.5, power=0.9)
    rates = [learning_rate(step, 5, recipe) for step in range(50)]
    np.testing.assert_allclose(rates[:10], 0.5 * np.arange(1, 11) / 10)
    np.testing.assert_allclose(rates[10:], 0.5 * (1 - np.arange(40) / 40) ** 0.9)


# windows


def samples(n: int = 3) -> Samples:
    images, masks = stripes(n)
    constants = channel_constants((0.5,) * 3, (0.25,) * 3, torch.device("cpu"))
    return Samples(torch.from_numpy(images), torch.from_numpy(masks), *constants)


def test_plain_windows_are_the_images_themselves_or_mirrored() -> None:
    given, recipe = samples(), SHORT
    inputs, labels = scale_and_crop(given, torch.tensor([2, 0, 1]), recipe, torch.Generator().manual_seed(1), True)
    whole = normalize(given.images[[2, 0, 1]], given.scale, given.shift)
    mirrored = [not torch.equal(labels[i], given.labels[[2, 0, 1]][i]) for i in range(3)]
    assert any(mirrored)
    for i, flipped in enumerate(mirrored):
        dims = (-1,) if flipped else ()
        torch.testing.assert_close(inputs[i], whole[i].flip(dims), rtol=0, atol=1e-5)
        assert torch.equal(labels[i], given.labels[[2, 0, 1]][i].flip(dims))


@pytest.mark.parametrize("scale", [0.5, 1.7])
def test_a_window_is_a_crop_of_the_resized_image(scale: float) -> None:
    """The window of the whole scaled image: as PyTorch resizes, and the label of the nearest pixel."""
    given = samples(1)
    height, width = given.labels.shape[1:]
    recipe = SHORT.changed(scales=(scale, scale), flip=False)
    inputs, labels = scale_and_crop(given, torch.tensor([0]), recipe, torch.Generator().manual_seed(0), False)
    assert inputs.shape == (1, 3, height, width)
    draws = torch.rand(4, 1, 1, generator=torch.Generator().manual_seed(0))
    tops = [float(draws[k]) * (scale * size - size) for k, size in ((1, height), (2, width))]
    whole = normalize(given.images, given.scale, given.shift)[0]
    for i in range(height):
        for j in range(width):
            y, x = (tops[0] + i + 0.5) / scale, (tops[1] + j + 0.5) / scale
            inside = 0 <= y < height and 0 <= x < width
            assert labels[0, i, j] == (given.labels[0, int(y), int(x)] if inside else IGNORED)
            expected = torch.zeros(3)
            for r in (int(np.floor(y - 0.5)), int(np.floor(y - 0.5)) + 1):
                for c in (int(np.floor(x - 0.5)), int(np.floor(x - 0.5)) + 1):
                    if 0 <= r < height and 0 <= c < width:
                        expected += (1 - abs(y - 0.5 - r)) * (1 - abs(x - 0.5 - c)) * whole[:, r, c]
            torch.testing.assert_close(inputs[0, :, i, j], expected, rtol=0, atol=1e-3)


# weights and losses


def test_rare_classes_weigh_more_and_pixels_weigh_one_in_the_mean() -> None:
    labels = np.array([[[0] * 90 + [1] * 10 + [IGNORED] * 50]], dtype=np.uint8)
    weights = class_weights(labels, 3, 1.0)
    torch.testing.assert_close(weights, torch.tensor([1 / 1.8, 5.0, 0.0]))
    torch.testing.assert_close(class_weights(labels, 2, 0.5)[1] / class_weights(labels, 2, 0.5)[0], torch.tensor(3.0))


def test_weighed_losses_are_those_of_pytorch() -> None:
    draw = torch.Generator().manual_seed(0)
    logits, weights = torch.randn(2, 3, 4, 5, generator=draw), torch.tensor([0.5, 2.0, 1.0])
    labels = torch.randint(0, 3, (2, 4, 5), generator=draw)
    labels[0, 0] = IGNORED
    total = F.cross_entropy(logits, labels, weight=weights, ignore_index=IGNORED, reduction="sum")
    torch.testing.assert_close(segmentation_loss(logits, labels, weights=weights), total / labels.numel())


# from end to end


@pytest.fixture
def camvid(tmp_path: Path) -> Path:
    for split, count in (("train", 5), ("val", 2), ("test", 2)):
        for i in range(count):
            write_pair(tmp_path / f"CamVid/{split}/a{i}.png", tmp_path / f"CamVid/{split}annot/a{i}.png", seed=i)
    return tmp_path


def test_train_writes_a_network_that_says_what_it_is(
    camvid: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    flags = ["--model", "upernet_vmamba_nano", "--epochs", "2", "--batch-size", "2", "--device", "cpu", *SMALL]
    assert main(["train", "--data", "camvid", "--root", str(camvid), "--out", str(out), *flags]) == 0
    text = capsys.readouterr().out
    assert "5 images of camvid (train) to train on, 2 validation images" in text
    assert "the mean IoU on validation images is" in text
    assert text.count("mean IoU") == 3
    record = json.loads((out / "train.json").read_text())
    assert record["recipe"]["auxiliary_weight"] == 0.4
    assert all(0 <= epoch["accuracy"] <= 1 for epoch in record["history"])
    assert "| weights | mean IoU |" in (out / "card.md").read_text()
    checkpoint = Checkpoint.open(out / "model.safetensors")
    assert (checkpoint.variant, checkpoint.num_classes) == ("upernet_vmamba_nano", 11)
    assert checkpoint.classes is not None
    assert checkpoint.classes[:2] == ("sky", "building")
    assert (checkpoint.preprocessing.size, checkpoint.preprocessing.keep_ratio) == (180, True)
    picture = Image.open(camvid / "CamVid/test/a0.png")
    with torch.no_grad():
        assert checkpoint.load()(picture).shape == (1, 11, 180, 240)
    command = text.strip().splitlines()[-1].partition("next: trust-tta ")[2]
    assert main([*shlex.split(command), "--device", "cpu", "--domains", "clean", "--store", str(tmp_path / "s")]) == 0


def test_a_share_of_a_folder_of_ones_own_is_held_out(tmp_path: Path) -> None:
    for i in range(6):
        write_pair(tmp_path / f"images/a{i}.jpg", tmp_path / f"masks/a{i}.png", seed=i)
    (tmp_path / "classes.txt").write_text("".join(f"class {k}\n" for k in range(12)))
    one, same, other = (open_training_data("masks", tmp_path, share=0.3, seed=seed) for seed in (0, 0, 1))
    assert (len(one.train), len(one.held_out)) == (4, 2)
    assert isinstance(one.train, SegmentationDataset)
    assert isinstance(one.held_out, SegmentationDataset)
    assert isinstance(same.held_out, SegmentationDataset)
    assert isinstance(other.held_out, SegmentationDataset)
    assert one.held_out.masks.names == same.held_out.masks.names != other.held_out.masks.names
    assert not {*one.train.masks.names} & {*one.held_out.masks.names}
    images, masks = read_arrays(one.train, Preprocessing(size=16, resize=None, crop=False))
    assert (images.shape, masks.shape) == ((4, 16, 16, 3), (4, 16, 16))


def test_pictures_of_several_sizes_want_a_size(tmp_path: Path) -> None:
    for i in range(4):
        write_pair(tmp_path / f"images/a{i}.png", tmp_path / f"masks/a{i}.png", seed=i)
    Image.new("RGB", (10, 20)).save(tmp_path / "images/a0.png")
    Image.new("L", (10, 20)).save(tmp_path / "masks/a0.png")
    (tmp_path / "classes.txt").write_text("".join(f"class {k}\n" for k in range(12)))
    fed = Preprocessing(size=20, resize=None, crop=False, keep_ratio=True)
    with pytest.raises(ConfigError, match=r"the images of masks have several sizes, as .* give a size for all"):
        read_arrays(open_segmentation("masks", tmp_path, protocol="native"), fed)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model", "vmamba_nano"], "has segmentation masks, but the network is a VMamba; give one whose name starts"),
        (["--model", "upernet_vmamba_nano", "--target", "test"], "target is 'test', but camvid has no domains"),
        (["--model", "upernet_vmamba_nano", "--cutmix", "0.5"], "cutmix: there is no such option"),
        (["--model", "upernet_vmamba_nano", "--scales", "2,1"], "must be two numbers, the second at least the first"),
    ],
)
def test_misuse(camvid: Path, tmp_path: Path, flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--data", "camvid", "--root", str(camvid), "--out", str(tmp_path / "out"), *flags]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
