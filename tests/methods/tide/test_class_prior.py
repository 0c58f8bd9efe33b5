"""Class prior: bias of the network against runs of labels, with calibrated predictions of known labels."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.methods.networks import convnet, make
from trust_tta.methods.tide.class_prior import Corrected, PriorMemory, correct_prior, network_bias
from trust_tta.methods.tide.constants import TIDE
from trust_tta.methods.tide.method import Tide

CLASSES = 10


def predictions(labels: np.ndarray, *, bias: float = 0.0, margin: float = 2.0, seed: int = 0) -> Tensor:
    """Probabilities (n, classes) of a noisy classifier; `bias` is added to the logits of the first two classes."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(labels), CLASSES, generator=generator)
    logits[torch.arange(len(labels)), torch.from_numpy(labels)] += margin
    logits[:, :2] += bias
    return logits.softmax(1)


def shuffled(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).permutation(np.arange(n) % CLASSES)


def correct(p: Tensor, batch: int) -> tuple[Tensor, list[float]]:
    """Corrected probabilities of a stream, and the weight of the local prior after each batch."""
    memory, parts, weights = PriorMemory.empty(p), [], []
    for part in p.split(batch):
        found: Corrected = correct_prior(part, memory)
        memory = found.memory
        parts.append(found.p)
        weights.append(float(found.weight))
    return torch.cat(parts), weights


def accuracy(p: Tensor, labels: np.ndarray) -> float:
    return float((p.argmax(1).numpy() == labels).mean())


@pytest.mark.parametrize("batch", [1, 16, 128])
@pytest.mark.parametrize("bias", [0.0, 1.5])
def test_shuffled_labels_have_no_local_prior(batch: int, bias: float) -> None:
    labels = shuffled(512)
    _, weights = correct(predictions(labels, bias=bias), batch)
    assert np.mean(weights) < 0.05


@pytest.mark.parametrize("batch", [1, 16, 128])
def test_constant_bias_is_removed(batch: int) -> None:
    labels = shuffled(512)
    p = predictions(labels, bias=2.0)
    corrected, _ = correct(p, batch)
    assert accuracy(corrected, labels) > accuracy(p, labels) + 0.08


@pytest.mark.parametrize("batch", [1, 16, 128])
@pytest.mark.parametrize("bias", [0.0, 1.5])
def test_runs_of_one_class_are_followed(batch: int, bias: float) -> None:
    labels = np.repeat(np.random.default_rng(0).permutation(CLASSES), 50)
    p = predictions(labels, bias=bias)
    corrected, weights = correct(p, batch)
    assert weights[-1] > 0.6
    assert accuracy(corrected, labels) > accuracy(p, labels) + 0.1


def test_predictions_of_an_unbiased_network_hardly_change() -> None:
    p = predictions(shuffled(512))
    corrected, _ = correct(p, 128)
    assert (corrected - p).abs().mean() < 2e-3


def slow_bias(p: np.ndarray) -> np.ndarray:
    """The mean of centered log-probabilities, shrunk by what chance and clean images explain; from the definition."""
    logits = np.log(p) - np.log(p).mean(1, keepdims=True)
    bias = logits.mean(0)
    chance = logits.var(0).mean() / (len(p) - 1)
    distance = (bias**2).mean()
    return np.asarray(bias * distance / (distance + 4 * chance + TIDE.clean_bias * (logits**2).mean()))


def test_first_batch_is_corrected_by_its_shrunk_bias() -> None:
    p = predictions(shuffled(64), bias=2.0)
    bias = slow_bias(p.double().numpy())
    assert bias[:2].min() > 0.3
    expected = p.double().numpy() * np.exp(-bias)
    found = correct_prior(p, PriorMemory.empty(p))
    assert float(found.weight) == 0
    np.testing.assert_allclose(found.p.numpy(), expected / expected.sum(1, keepdims=True), atol=1e-5)
    np.testing.assert_allclose(network_bias(found.memory.scores, found.memory.spread)[0].numpy(), bias, atol=1e-5)


def test_bias_of_a_thousand_classes_is_found_in_few_images() -> None:
    """Far fewer than classes: every log-probability tells something of it."""
    generator = torch.Generator().manual_seed(0)
    bias = torch.randn(1000, generator=generator)
    p = (torch.randn(64, 1000, generator=generator) + bias).softmax(1)
    found = correct_prior(p, PriorMemory.empty(p)).memory
    assert float(torch.corrcoef(torch.stack([network_bias(found.scores, found.spread)[0], bias]))[0, 1]) > 0.98


def test_one_image_shows_no_bias() -> None:
    p = predictions(shuffled(1), bias=2.0)
    torch.testing.assert_close(correct_prior(p, PriorMemory.empty(p)).p, p)


def test_many_classes_in_small_batches_have_no_local_prior_by_chance() -> None:
    generator = torch.Generator().manual_seed(0)
    p = torch.nn.functional.one_hot(torch.randint(0, 1000, (256,), generator=generator), 1000).float()
    memory = PriorMemory.empty(p)
    for part in p.split(64):
        found = correct_prior(part, memory)
        memory = found.memory
        assert float(found.weight) < 0.2


def test_long_batches_are_corrected_in_chunks() -> None:
    labels = shuffled(1100)
    found = correct_prior(predictions(labels), PriorMemory.empty(predictions(labels)))
    assert found.p.shape == (1100, CLASSES)
    assert torch.allclose(found.p.sum(1), torch.ones(1100), atol=1e-5)


@pytest.mark.parametrize("unchanged", [0.0, 0.25])
def test_shift_fades_the_memory(unchanged: float) -> None:
    p = predictions(shuffled(64))
    method: Tide = make("tide", convnet())
    memory = correct_prior(p, PriorMemory.empty(p)).memory
    method.marginal, method.scores, method.spread, method.window, method.agreement = memory
    method.statistics.unchanged = torch.tensor(unchanged)
    found = method.correct_prior(p.log()[None]).memory
    faded = PriorMemory(*(value * unchanged for value in memory))
    expected = correct_prior(p.log().exp(), faded, shift=method.shift()).memory
    assert found is not None
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
