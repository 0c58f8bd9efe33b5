from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.training.samples import SHORT, TASK, colored_images, flat, noisy_images, tiny_network
from trust_tta.errors import CheckpointError, ConfigError, DataError, StateError
from trust_tta.models.vmamba import VMamba
from trust_tta.ops import cuda_graphs
from trust_tta.progress import Progress
from trust_tta.training.loop import FitResult, _seed_epoch, fit
from trust_tta.training.recipe import TrainRecipe
from trust_tta.training.tasks import Samples, Task, accuracy, evaluate, normalize, recalibrate

ROOT = Path(__file__).parents[2]


def learn(model: VMamba, images: Any, labels: Any, recipe: TrainRecipe, **options: Any) -> FitResult[VMamba]:
    return fit(model, images, labels, recipe, task=TASK, **options)


def run(path: Path | None = None, *, device: str = "cpu", **options: Any) -> tuple[VMamba, FitResult[VMamba]]:
    model = tiny_network().to(device)
    return model, learn(model, *colored_images(21), SHORT, state_path=path, **options)


class Told(Progress):
    """Remembers what it was told; stops after so many notes."""

    def __init__(self, stop: int | None = None) -> None:
        self.steps, self.notes, self.stop = 0, list[str](), stop
        self.total: int | None = None

    def start(self, total: int | None, what: str) -> None:
        self.total = total

    def advance(self, n: int = 1) -> None:
        self.steps += n

    def note(self, text: str) -> None:
        self.notes.append(text)
        if len(self.notes) == self.stop:
            raise KeyboardInterrupt


def assert_same(path: Path, other: Path) -> None:
    first, second = (flat(torch.load(p, weights_only=True)) for p in (path, other))
    assert len(first) > 100  # weights, averages and both moments
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def losses(result: FitResult[VMamba]) -> list[float]:
    return [record.loss for record in result.history]


@pytest.mark.skipif(os.name != "posix", reason="SIGKILL")
def test_killed_and_resumed_equals_undisturbed_bit_for_bit(tmp_path: Path) -> None:
    killed, whole = tmp_path / "killed.pt", tmp_path / "whole.pt"
    worker = subprocess.run([sys.executable, "-m", "tests.training.worker", str(killed), "2"], cwd=ROOT, timeout=120)
    assert worker.returncode == -signal.SIGKILL
    _, resumed = run(killed)
    _, undisturbed = run(whole)
    assert (resumed.first_epoch, undisturbed.first_epoch) == (2, 0)
    assert losses(resumed) == losses(undisturbed)
    assert_same(killed, whole)


@pytest.mark.gpu
def test_on_a_gpu_stopped_and_resumed_equals_undisturbed_and_unrecorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "stopped.pt", device="cuda", progress=Told(stop=2))
    resumed, result = run(tmp_path / "stopped.pt", device="cuda")
    assert result.first_epoch == 2
    undisturbed, _ = run(device="cuda")
    monkeypatch.setattr(cuda_graphs, "MAX_GRAPHS", 0)
    plain, _ = run(device="cuda")
    for name, value in plain.state_dict().items():
        for other in (resumed, undisturbed):
            found, wanted = other.state_dict()[name].float(), value.float()
            torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4 * float(wanted.abs().max()), msg=name)


def test_a_finished_run_is_read_back_without_training(tmp_path: Path) -> None:
    model, result = run(tmp_path / "a.pt")
    again, repeated = run(tmp_path / "a.pt")
    assert repeated.first_epoch == SHORT.epochs
    assert repeated.history == result.history
    for name, value in model.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name


def test_the_seed_determines_the_result_and_the_callers_random_state_is_kept() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    model = tiny_network()
    torch.manual_seed(5)
    result = learn(model, *colored_images(21), SHORT)
    assert torch.equal(torch.rand(3), expected)
    other = learn(tiny_network(), *colored_images(21), SHORT.changed(seed=1))
    assert losses(run()[1]) == losses(result)
    assert losses(other) != losses(result)


def test_every_epoch_of_every_seed_draws_its_own_numbers() -> None:
    device = torch.device("cpu")
    with torch.random.fork_rng(devices=[]):
        draws = {
            (torch.rand(1, generator=_seed_epoch(seed, epoch, device)).item(), torch.rand(1).item())
            for seed in range(4)
            for epoch in range(4)
        }
    assert len({a for a, _ in draws} | {b for _, b in draws}) == 32


def test_another_recipe_or_other_data_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    run(path)
    with pytest.raises(
        StateError, match=r"another run: lr was 0.003, is 0.1; give another folder, or delete this file"
    ):
        learn(tiny_network(), *colored_images(21), SHORT.changed(lr=0.1), state_path=path)
    with pytest.raises(StateError, match="images was"):
        learn(tiny_network(), *colored_images(21, seed=1), SHORT, state_path=path)
    with pytest.raises(StateError, match="init was None, is abc"):
        learn(tiny_network(), *colored_images(21), SHORT, init="abc", state_path=path)


@pytest.mark.parametrize("content", [b"", b"no state at all"], ids=["empty", "text"])
def test_a_broken_checkpoint_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.pt"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"a\.pt' cannot be read as a training state"):
        run(path)


def test_overfits_noise() -> None:
    images, labels = noisy_images(64), np.random.default_rng(1).integers(0, 3, 64)
    recipe = SHORT.changed(
        epochs=60, batch_size=32, lr=1e-2, crop_padding=0, flip=False, cutout=0, cutmix=0.0,
        label_smoothing=0.0, drop_path=0.0, ema_decay=0.9, weight_decay=0.0, warmup_epochs=3,
    )  # fmt: skip
    model = tiny_network()
    result = learn(model, images, labels, recipe)
    assert result.history[-1].loss < 0.1
    recalibrate(result.average, images, mean=recipe.mean, std=recipe.std, batch_size=32)
    assert evaluate(result.average, images, labels, mean=recipe.mean, std=recipe.std) == 1.0


def test_training_with_all_augmentations_generalizes() -> None:
    recipe = SHORT.changed(epochs=12, batch_size=16, lr=1e-2, precision="bf16", ema_decay=0.9)
    test, told = colored_images(60, seed=9), Told()
    result = learn(
        tiny_network(),
        *colored_images(96),
        recipe,
        evaluate=lambda model: evaluate(model, *test, mean=recipe.mean, std=recipe.std, batch_size=25),
        progress=told,
    )
    assert [record.epoch for record in result.history] == list(range(12))
    assert (result.history[-1].accuracy or 0) > 0.9
    assert (told.total, told.steps) == (72, 72)  # progress within epochs: six steps in each of twelve
    assert [note.split("  loss")[0] for note in told.notes] == [f"epoch {i:2d}/12" for i in range(1, 13)]


def test_a_task_brings_its_own_loss_metric_and_augmentation() -> None:
    """Dense labels through the same loop: each pixel of a constant image is one class."""

    class PerPixel(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Conv2d(3, 3, 1)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.layer(inputs)
            return logits

    def sample(samples: Samples, chosen: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return normalize(samples.images[chosen], samples.scale, samples.shift), samples.labels[chosen]

    def loss(logits: torch.Tensor, targets: torch.Tensor, _: TrainRecipe) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(logits, targets)

    images, labels = colored_images(24)
    maps = np.broadcast_to(labels[:, None, None], (24, 8, 8))
    dense = Task(lambda images, labels, recipe: None, sample, loss, accuracy)
    recipe = SHORT.changed(epochs=40, lr=0.1, ema_decay=0.0)
    torch.manual_seed(0)
    result = fit(PerPixel(), images, maps, recipe, task=dense)
    score = evaluate(result.average, images, maps, mean=recipe.mean, std=recipe.std, metric=dense.metric)
    assert score > 0.8


def test_a_loss_that_is_not_finite_raises_and_keeps_the_last_state(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    model = tiny_network()

    def poison(_: VMamba) -> float:
        if path.is_file():  # the first epoch is saved, the second just ended
            with torch.no_grad():
                model.classifier.head.bias[0] = torch.inf
        return 0.0

    with pytest.raises(ConfigError, match=r"the loss is nan at step 4 \(epoch 2\) with lr 0.003") as caught:
        learn(model, *colored_images(21), SHORT, evaluate=poison, state_path=path)
    assert "\n" not in str(caught.value)
    assert len(torch.load(path, weights_only=True)["history"]) == 2


def test_a_batch_size_above_the_data_takes_all_images() -> None:
    result = learn(tiny_network(), *colored_images(5), SHORT.changed(batch_size=64))
    assert len(result.history) == SHORT.epochs


@pytest.mark.parametrize(
    ("images", "labels", "words"),
    [
        (np.zeros((4, 8, 8, 3), np.float32), np.zeros(4, np.int64), "images are float32"),
        (np.zeros((4, 8, 8, 3), np.uint8), np.zeros(3, np.int64), r"labels are int64 \(3,\)"),
        (np.zeros((4, 8, 8, 3), np.uint8), np.full(4, 3), "create it with num_classes=4"),
        (np.zeros((0, 8, 8, 3), np.uint8), np.zeros(0, np.int64), "there are no images"),
    ],
    ids=["float images", "too few labels", "label beyond the classes", "nothing"],
)
def test_arrays_that_do_not_fit_are_named(images: Any, labels: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        learn(tiny_network(), images, labels, SHORT)


def test_padding_as_large_as_the_image_is_refused() -> None:
    with pytest.raises(ConfigError, match="crop_padding 8"):
        learn(tiny_network(), *colored_images(4), SHORT.changed(crop_padding=8))


def test_recalibrated_statistics_are_those_of_the_inputs() -> None:
    images, model = noisy_images(20, seed=3), tiny_network()
    recalibrate(model, images, mean=(0.5,) * 3, std=(0.5,) * 3, batch_size=8)
    drawn = np.random.default_rng(0).permutation(20)[:16]
    inputs = torch.from_numpy(images[drawn]).permute(0, 3, 1, 2) / 127.5 - 1
    maps = model.patch_embed[0](inputs).detach()
    norm = model.patch_embed[2]
    assert isinstance(norm, torch.nn.BatchNorm2d)
    assert norm.momentum == 0.1
    assert not norm.training
    torch.testing.assert_close(norm.running_mean, maps.mean((0, 2, 3)), rtol=0, atol=1e-5)
    variances = torch.stack([half.var((0, 2, 3)) for half in maps.split(8)]).mean(0)
    torch.testing.assert_close(norm.running_var, variances, rtol=1e-4, atol=1e-6)


def test_accuracy_counts() -> None:
    class FirstChannel(torch.nn.Module):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return inputs.mean((2, 3))

    images, labels = colored_images(30)
    wrong = labels.copy()
    wrong[:7] = (wrong[:7] + 1) % 3
    found = evaluate(FirstChannel(), images, wrong, mean=(0.5,) * 3, std=(0.5,) * 3, batch_size=8)
    assert found == pytest.approx(23 / 30)


def test_recalibrated_statistics_do_not_depend_on_how_files_are_sorted() -> None:
    """Dark images of one class first, bright ones of another after: no batch may be of one class alone."""
    draw = np.random.default_rng(0)
    dark, bright = (draw.integers(low, low + 60, (64, 4, 4, 3)).astype(np.uint8) for low in (0, 190))
    images = np.concatenate([dark, bright])
    torch.manual_seed(0)
    first, second = torch.nn.BatchNorm2d(3), torch.nn.BatchNorm2d(3)
    model = torch.nn.Sequential(first, torch.nn.ReLU(), second)
    recalibrate(model, images, mean=(0.5,) * 3, std=(0.5,) * 3, batch_size=16)
    assert first.running_mean is not None
    assert second.running_mean is not None
    pixels = torch.from_numpy(images).permute(0, 3, 1, 2).double() / 255 * 2 - 1
    whole = torch.nn.functional.batch_norm(pixels, None, None, training=True)
    torch.testing.assert_close(first.running_mean.double(), pixels.mean((0, 2, 3)), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(second.running_mean.double(), whole.relu().mean((0, 2, 3)), rtol=0.05, atol=0)
