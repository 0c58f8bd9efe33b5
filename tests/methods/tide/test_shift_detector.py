"""Shift detector: corruptions are shifts, runs of one class are not."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from trust_tta import corrupt
from trust_tta.data.sample import load_sample
from trust_tta.methods.tide.shift_detector import FEATURES, ShiftDetector, describe, haar

N = 16


def shipped() -> tuple[Tensor, np.ndarray]:
    """The shipped images, in units of a network's input, and their labels."""
    images, labels = load_sample()
    return as_input(images), labels


def as_input(images: np.ndarray) -> Tensor:
    return torch.from_numpy(images).permute(0, 3, 1, 2).float() / 64 - 2


def detector_of(stream: list[Tensor]) -> tuple[ShiftDetector, list[float]]:
    detector = ShiftDetector(stream[0])
    return detector, [float(detector.observe(describe(batch))) for batch in stream]


def test_haar_of_a_block_is_its_mean_and_its_differences() -> None:
    x = torch.tensor([[1.0, 2.0], [5.0, 10.0]])[None, None]
    expected = (18 / 4, (1 - 2 + 5 - 10) / 4, (1 + 2 - 5 - 10) / 4, (1 - 2 - 5 + 10) / 4)
    assert tuple(float(part) for part in haar(x)) == pytest.approx(expected)


def test_noise_has_the_contrast_that_it_was_given() -> None:
    """Each Haar detail of white noise of deviation 0.5 in the mean of the channels has half that deviation."""
    noise = 0.5 * torch.randn(8, 1, 64, 64, generator=torch.Generator().manual_seed(0))
    features = describe(noise)
    assert features.shape == (8, FEATURES)
    assert features[:, 1].tolist() == pytest.approx([math.log(0.5)] * 8, abs=0.05)
    assert features[:, 3:6].mean(0).tolist() == pytest.approx([math.log(0.25)] * 3, abs=0.02)


@pytest.mark.parametrize("size", [(1, 1), (2, 3), (5, 4), (33, 31)])
@pytest.mark.parametrize("channels", [1, 2, 3, 6])
def test_images_of_any_size_are_described(size: tuple[int, int], channels: int) -> None:
    features = describe(torch.randn(2, channels, *size))
    assert features.shape == (2, FEATURES)
    assert features.isfinite().all()


def test_descriptions_do_not_depend_on_the_units_of_pixels() -> None:
    images, _ = shipped()
    assert torch.equal(describe(64 * images[:N]), describe(images[:N]))


@pytest.mark.parametrize("batch", [4, N, 64])
def test_runs_of_one_class_are_no_shift(batch: int) -> None:
    images, labels = shipped()
    ordered = images[np.argsort(labels, kind="stable")]
    detector, changes = detector_of(list(ordered.split(batch)))
    halvings = -sum(math.log2(1 - change) for change in changes)
    assert halvings < 3  # of what a change of domain alone takes away
    assert float(detector.images) > len(images) / 8


@pytest.mark.parametrize("corruption", ["gaussian_noise", "defocus_blur", "fog", "contrast", "pixelate"])
def test_corruption_is_detected_within_two_batches(corruption: str) -> None:
    images, labels = load_sample()
    order = np.random.default_rng(0).permutation(len(labels))[: 20 * N]
    before, after = images[order[: 16 * N]], images[order[16 * N :]]
    corrupted = corrupt(after, corruption, severity=5, seed=0)
    stream = [as_input(x) for x in (*np.split(before, 16), *np.split(corrupted, 4))]
    _, changes = detector_of(stream)
    assert max(changes[:16]) < 0.05
    assert max(changes[16:18]) > 0.5


def test_single_images_show_a_shift_together() -> None:
    """None is a domain of its own, and another domain shows within some of them."""
    images, labels = load_sample()
    order = np.random.default_rng(1).permutation(len(labels))[:264]
    noisy = corrupt(images[order[200:]], "contrast", severity=5, seed=0)
    _, changes = detector_of([as_input(x[None]) for x in (*images[order[:200]], *noisy)])
    assert max(changes[:200]) < 0.1
    assert -sum(math.log2(1 - change) for change in changes[200:]) > 1


def state_of(detector: ShiftDetector) -> dict[str, Tensor]:
    return {name: getattr(detector, name) for name in detector.STATE}


def test_loaded_state_continues_and_reset_restores_source() -> None:
    images, _ = shipped()
    stream = list(images[:128].split(N))
    detector, _ = detector_of(stream[:4])
    other = ShiftDetector(stream[0])
    other.load(state_of(detector))
    assert [float(detector.observe(describe(x))) for x in stream[4:]] == [
        float(other.observe(describe(x))) for x in stream[4:]
    ]
    detector.restore_source()
    fresh = state_of(ShiftDetector(stream[0]))
    assert all(torch.equal(value, fresh[name]) for name, value in state_of(detector).items())
