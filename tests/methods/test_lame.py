"""LAME: the affinities, the iteration, the invariants."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.methods.networks import CLASSES, batches, convnet, make, run, same, vmamba, weights
from trust_tta.errors import ConfigError, ShapeError
from trust_tta.methods.lame import linear, nearest, propagate, rbf
from trust_tta.methods.registry import create_method


def features(count: int = 11, seed: int = 0) -> Tensor:
    x = torch.randn(count, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.normalize(x, dim=1)


def log_predictions(count: int = 11, seed: int = 1) -> Tensor:
    z = torch.randn(count, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return (2 * z).log_softmax(1)


@pytest.mark.parametrize("affinity", ["rbf", "knn", "linear"])
@pytest.mark.parametrize("network", [vmamba, convnet])
def test_zero_affinity_returns_the_softmax(affinity: str, network: type) -> None:
    lame, bn = make("lame", network(), affinity=affinity, strength=0.0), make("bn", network())
    for images in batches(2):
        torch.testing.assert_close(lame(images), bn(images).softmax(1))


@pytest.mark.parametrize("affinity", ["rbf", "knn", "linear"])
def test_the_result_is_marked_and_is_a_distribution(affinity: str) -> None:
    model = vmamba()
    before = weights(model)
    lame = make("lame", model, affinity=affinity)
    assert lame.probabilities
    assert not make("bn", vmamba()).probabilities
    for probabilities in run(lame, batches(2)):
        assert probabilities.shape == (9, CLASSES)
        assert (probabilities >= 0).all()
        torch.testing.assert_close(probabilities.sum(1), torch.ones(9))
    assert same(weights(model), before)


def energy(log_p: Tensor, assignments: Tensor, pairwise: Tensor) -> Tensor:
    """KL divergence from the predictions less half the agreement of neighbors, a scalar."""
    divergence = torch.xlogy(assignments, assignments) - assignments * log_p
    return (divergence - assignments * pairwise / 2).sum()


@pytest.mark.parametrize("kernel", [rbf, linear])
@pytest.mark.parametrize("seed", range(4))
def test_energy_falls_in_every_round_of_a_positive_kernel(kernel: type, seed: int) -> None:
    log_p, affinity = log_predictions(seed=seed), kernel(features(seed=seed + 9), 5)
    energies = []
    for rounds in range(12):
        y = propagate(log_p, affinity, iterations=rounds, tolerance=0.0)
        divergence = float((y * (y.log() - log_p)).sum())
        agreement = sum(float(affinity[i, j] * (y[i] @ y[j])) for i in range(len(y)) for j in range(len(y)))
        energies.append(divergence - agreement / 2)
        assert float(energy(log_p, y, affinity @ y)) == pytest.approx(energies[-1])
    assert all(b <= a + 1e-12 for a, b in zip(energies, energies[1:], strict=False))
    assert energies[-1] < energies[0] - 0.1


def test_the_rounds_end_at_a_fixed_point() -> None:
    log_p, affinity = log_predictions(), rbf(features(), 5)
    y = propagate(log_p, affinity, iterations=2000, tolerance=1e-14)
    torch.testing.assert_close(y, (log_p + affinity @ y).softmax(1), rtol=1e-5, atol=1e-6)


def test_iteration_against_a_slow_loop() -> None:
    log_p, affinity = log_predictions(), nearest(features(), 3)
    y = np.exp(log_p.numpy())
    for _ in range(7):
        new = np.zeros_like(y)
        for i in range(len(y)):
            score = log_p[i].numpy() + sum(float(affinity[i, j]) * y[j] for j in range(len(y)))
            new[i] = np.exp(score) / np.exp(score).sum()
        y = new
    np.testing.assert_allclose(propagate(log_p, affinity, iterations=7, tolerance=0.0), y, rtol=1e-12)


def test_affinities_against_slow_loops() -> None:
    x = features()
    d = np.array([[np.linalg.norm(a - b) for b in x.numpy()] for a in x.numpy()])
    width = np.mean([sorted(row)[4] for row in d])  # the fifth smallest, the image itself being the first
    np.testing.assert_allclose(rbf(x, 5), np.exp(-(d**2) / (2 * width**2)), rtol=1e-10)
    expected = np.zeros_like(d)
    for i, row in enumerate(d):
        expected[i, [j for j in np.argsort(row) if j != i][:5]] = 1
    np.testing.assert_array_equal(nearest(x, 5), expected)
    np.testing.assert_allclose(linear(x, 5), [[a @ b for b in x.numpy()] for a in x.numpy()], atol=1e-12)


@pytest.mark.parametrize("affinity", ["rbf", "knn", "linear"])
@pytest.mark.parametrize("symmetric", [False, True])
def test_the_result_is_the_fixed_point(affinity: str, symmetric: bool) -> None:
    model = convnet()
    lame = make("lame", model.double(), affinity=affinity, force_symmetry=symmetric)
    images = batches(1, images=40)[0].double()
    y = lame(images)
    judge = make("bn", convnet().double())
    with torch.no_grad():
        x = torch.nn.functional.normalize(judge.model.forward_features(images), dim=1)
        log_p = judge(images).log_softmax(1)
    kernel = {"rbf": rbf, "knn": nearest, "linear": linear}[affinity](x, 5)
    kernel = (kernel + kernel.T) / 2 if symmetric else kernel
    again = (log_p + kernel @ y).softmax(1)
    assert float((again - y).abs().max()) < 1e-7
    far = y
    for _ in range(3000):
        far = (log_p + kernel @ far).softmax(1)
    assert float(((far - y).abs() / far.abs().max()).max()) < 2e-5


class Tokens(torch.nn.Module):
    """Features as timm's networks give them: tokens, which the head pools."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = convnet()

    def forward_features(self, images: Tensor) -> Tensor:
        maps: Tensor = self.inner.body(images)
        return maps.flatten(2).transpose(1, 2)

    def forward_head(self, features: Tensor, pre_logits: bool = False) -> Tensor:
        pooled = features.mean(1)
        return pooled if pre_logits else self.inner.forward_head(pooled)

    def forward(self, images: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(images))


def test_features_are_read_as_timm_gives_them() -> None:
    tokens, pooled = make("lame", Tokens()), make("lame", convnet())
    for images in batches(2):
        torch.testing.assert_close(tokens(images), pooled(images))


def test_few_or_equal_images_are_no_trouble() -> None:
    for x in (features(1), features(2), features(1).expand(4, 4)):
        for affinity in (rbf, nearest, linear):
            kernel = affinity(x, 5)
            assert kernel.shape == (len(x), len(x))
            assert kernel.isfinite().all()


def test_neighbors_pull_an_unsure_image_over() -> None:
    log_p = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.45, 0.55]], dtype=torch.float64).log()
    y = propagate(log_p, torch.ones(3, 3, dtype=torch.float64))
    assert y[2, 0] > 0.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"affinity": "cosine"}, "choose one of rbf, knn, linear"),
        ({"k": 0}, "k is 0; give a value >= 1"),
        ({"strength": -1}, "strength is -1; give a value >= 0"),
        ({"iterations": -1}, "iterations is -1; give a value >= 0"),
        ({"lr": 1}, "lr: there is no such option"),
    ],
    ids=str,
)
def test_wrong_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        create_method("lame", vmamba(), **options)


class Unpooled(torch.nn.Module):
    def forward_features(self, images: Tensor) -> Tensor:
        return images

    def forward_head(self, features: Tensor) -> Tensor:
        return features.mean((2, 3))


def test_features_must_be_pooled() -> None:
    with pytest.raises(ShapeError, match=r"give pooled features \(n, d\)"):
        create_method("lame", Unpooled())(batches(1)[0])
