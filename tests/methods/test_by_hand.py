"""Methods against numpy on a network of two weights, where every gradient has a closed form.

z = weight * xhat + bias with xhat the normalized pixel; the logits are (z, -z), so p = 1 / (1 + exp(-2z)).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trust_tta.methods.registry import create_method

Array = NDArray[np.float64]
LR, EPSILON = 0.05, 1e-5
STREAM = [np.array(x) for x in ([0.3, -1.2, 2.0, 0.1, 4.0], [1.0, -2.5, 0.4, 0.9, -0.2], [0.0, 3.0, 3.5, -1.0, 1.5])]


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(1, eps=EPSILON, dtype=torch.float64)
        self.norm.weight.data.fill_(1.4)
        self.norm.bias.data.fill_(0.3)

    def forward(self, images: Tensor) -> Tensor:
        z = self.norm(images).flatten(1)
        return torch.cat([z, -z], 1)


class Adam:
    """Adam as its paper writes it."""

    def __init__(self, decay: float = 0.9) -> None:
        self.m, self.v, self.t, self.decay = np.zeros(2), np.zeros(2), 0, decay

    def __call__(self, gradient: Array) -> Array:
        self.t += 1
        self.m = self.decay * self.m + (1 - self.decay) * gradient
        self.v = 0.999 * self.v + 0.001 * gradient**2
        m, v = self.m / (1 - self.decay**self.t), self.v / (1 - 0.999**self.t)
        step: Array = -LR * m / (np.sqrt(v) + 1e-8)
        return step


class Momentum:
    """Gradient descent with momentum."""

    def __init__(self, decay: float = 0.9) -> None:
        self.velocity, self.decay = np.zeros(2), decay

    def __call__(self, gradient: Array) -> Array:
        self.velocity = self.decay * self.velocity + gradient
        step: Array = -LR * self.velocity
        return step


def normalized(x: Array) -> Array:
    result: Array = (x - x.mean()) / np.sqrt(x.var() + EPSILON)
    return result


def prediction(theta: Array, x: Array) -> tuple[Array, Array]:
    """z and p, one value for each sample."""
    z = theta[0] * normalized(x) + theta[1]
    return z, 1 / (1 + np.exp(-2 * z))


def entropies(p: Array) -> Array:
    result: Array = -p * np.log(p) - (1 - p) * np.log(1 - p)
    return result


def entropy_slopes(z: Array, p: Array) -> Array:
    """d entropy / dz, one value for each sample."""
    result: Array = -4 * z * p * (1 - p)
    return result


def chain(slopes: Array, x: Array) -> Array:
    """The gradient of the mean over the batch of something with these d/dz."""
    return np.array([(slopes * normalized(x)).mean(), slopes.mean()])


def compare(name: str, expected: Callable[[Array], Array], **options: Any) -> None:
    """The logits of the method after each batch are those of the weights computed by hand."""
    method = create_method(name, Toy(), lr=LR, **options)
    for x in STREAM:
        logits = method(torch.from_numpy(x).view(-1, 1, 1, 1))
        z, _ = prediction(expected(x), x)
        np.testing.assert_allclose(logits[:, 0].numpy(), z, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("momentum", [0.9, 0.6, 0.0])
@pytest.mark.parametrize(("optimizer", "rule"), [("adam", Adam), ("sgd", Momentum)])
def test_tent(optimizer: str, rule: type[Adam] | type[Momentum], momentum: float) -> None:
    theta, step = np.array([1.4, 0.3]), rule(momentum)

    def expected(x: Array) -> Array:
        nonlocal theta
        theta = theta + step(chain(entropy_slopes(*prediction(theta, x)), x))
        return theta

    compare("tent", expected, optimizer=optimizer, momentum=momentum)


def test_eta() -> None:
    margin, d_margin = 0.85, 0.9
    theta, step = np.array([1.4, 0.3]), Adam()
    mean: Array | None = None
    chosen_counts = []

    def expected(x: Array) -> Array:
        nonlocal theta, mean
        z, p = prediction(theta, x)
        h, both = entropies(p), np.stack([p, 1 - p], 1)
        chosen = h < margin * math.log(2)
        if mean is not None:
            cosine = both @ mean / np.linalg.norm(both, axis=1) / np.linalg.norm(mean)
            chosen &= np.abs(cosine) < d_margin
        chosen_counts.append(int(chosen.sum()))
        if chosen.any():
            weight = np.exp(margin * math.log(2) - h) * chosen * len(x) / chosen.sum()
            theta = theta + step(chain(weight * entropy_slopes(z, p), x))
            now = both[chosen].mean(0)
            mean = now if mean is None else 0.9 * mean + 0.1 * now
        return theta

    compare("eta", expected, margin=margin, d_margin=d_margin)
    assert all(0 < count < 5 for count in chosen_counts)  # both filters had something to do


def test_sar() -> None:
    margin, rho = 0.85, 0.5
    theta, step = np.array([1.4, 0.3]), Momentum()
    dropped = []

    def expected(x: Array) -> Array:
        nonlocal theta
        z, p = prediction(theta, x)
        first = entropies(p) < margin * math.log(2)
        gradient = chain(entropy_slopes(z, p) * first * len(x) / first.sum(), x)
        z, p = prediction(theta + rho * gradient / np.linalg.norm(gradient), x)
        second = first & (entropies(p) < margin * math.log(2))
        dropped.append(int(first.sum() - second.sum()))
        theta = theta + step(chain(entropy_slopes(z, p) * second * len(x) / second.sum(), x))
        return theta

    options = {"margin": margin, "rho": rho, "reset_threshold": 0, "skip_last": False, "optimizer": "sgd"}
    compare("sar", expected, **options)
    assert any(dropped)  # the second filter had something to do


def test_shot() -> None:
    beta, confidence = 0.3, 0.9
    theta, step = np.array([1.4, 0.3]), Adam()
    sure_counts = []

    def expected(x: Array) -> Array:
        nonlocal theta
        z, p = prediction(theta, x)
        mean = p.mean()
        slopes = entropy_slopes(z, p) - np.log((1 - mean) / mean) * 2 * p * (1 - p)
        sure = np.maximum(p, 1 - p) > confidence
        sure_counts.append(int(sure.sum()))
        cross = np.where(p > 0.5, -2 * (1 - p), 2 * p)
        theta = theta + step(chain(slopes + beta * cross * sure * len(x) / max(1, sure.sum()), x))
        return theta

    compare("shot", expected, beta=beta, confidence=confidence, parameters="bn")
    assert all(0 < count < 5 for count in sure_counts)
