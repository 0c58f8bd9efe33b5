"""DPCore against a slow reference in numpy, written from its description: gradients by differences, AdamW by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tests.methods.networks import batches, make, run, vmamba
from trust_tta.errors import ConfigError
from trust_tta.methods import gather_source_statistics
from trust_tta.methods.registry import create_method

Floats = NDArray[np.float64]
LR, DECAY, STEPS, NEW_STEPS, RHO, TAU, ALPHA = 0.1, 0.01, 1, 12, 0.8, 3.0, 0.999


class Dots(nn.Module):
    """A network of two matrices and a tanh that shows its maps as a VMamba does."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.first, self.second, self.head = (
            nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64))
            for shape in ((4, 3), (5, 4), (3, 5))
        )

    def embed(self, images: Tensor) -> Tensor:
        return torch.einsum("dc,nchw->ndhw", self.first, images)

    def forward_maps(self, x: Tensor) -> list[Tensor]:
        return [torch.einsum("dc,nchw->ndhw", self.second, x).tanh()]

    def pool(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))

    def forward_head(self, features: Tensor) -> Tensor:
        return features @ self.head.T

    def forward(self, images: Tensor) -> Tensor:
        return self.forward_head(self.pool(self.forward_maps(self.embed(images))[-1]))


class Reference:
    """The batches one after the other; `coreset` holds triples of mean, deviation and prompt."""

    def __init__(self, network: Dots, clean: Floats, predict: str) -> None:
        self.first, self.second, self.head = (p.detach().numpy() for p in (network.first, network.second, network.head))
        self.predict, self.coreset = predict, list[tuple[Floats, Floats, Floats]]()
        self.source = self.moments(self.features(clean, np.zeros(4)))

    def features(self, images: Floats, prompt: Floats) -> Floats:
        x = np.einsum("dc,nchw->ndhw", self.first, images) + prompt[:, None, None]
        result: Floats = np.tanh(np.einsum("dc,nchw->ndhw", self.second, x)).mean((2, 3))
        return result

    @staticmethod
    def moments(features: Floats) -> tuple[Floats, Floats]:
        return features.mean(0), features.std(0, ddof=1)

    def distance(self, images: Floats, prompt: Floats) -> float:
        mean, std = self.moments(self.features(images, prompt))
        return float(np.linalg.norm(mean - self.source[0]) + np.linalg.norm(std - self.source[1]))

    def slope(self, images: Floats, prompt: Floats) -> Floats:
        steps = 1e-6 * np.eye(len(prompt))
        return np.array([self.distance(images, prompt + s) - self.distance(images, prompt - s) for s in steps]) / 2e-6

    def learn(self, images: Floats, prompt: Floats, steps: int) -> tuple[Floats, Floats]:
        """AdamW from fresh moments; the prompt, and the logits of the last pass that was descended from."""
        first, second = np.zeros_like(prompt), np.zeros_like(prompt)
        for t in range(1, steps + 1):
            logits, slope = self.features(images, prompt) @ self.head.T, self.slope(images, prompt)
            first, second = 0.9 * first + 0.1 * slope, 0.999 * second + 0.001 * slope**2
            step = (first / (1 - 0.9**t)) / (np.sqrt(second / (1 - 0.999**t)) + 1e-8)
            prompt = prompt * (1 - LR * DECAY) - LR * step
        return prompt, logits if self.predict == "before" else self.features(images, prompt) @ self.head.T

    def adapt(self, images: Floats) -> Floats:
        mean, std = self.moments(self.features(images, np.zeros(4)))
        if self.coreset:
            apart = [np.linalg.norm(mean - m) + np.linalg.norm(std - s) for m, s, _ in self.coreset]
            weights = np.exp(-np.array(apart) / TAU)
            weights /= weights.sum()
            mixture = np.sum([w * p for w, (_, _, p) in zip(weights, self.coreset, strict=True)], axis=0)
            if self.distance(images, mixture) < RHO * self.distance(images, np.zeros(4)):
                learned, logits = self.learn(images, mixture, STEPS)
                self.coreset = [
                    (m + ALPHA * w * (mean - m), s + ALPHA * w * (std - s), p + ALPHA * w * (learned - p))
                    for w, (m, s, p) in zip(weights, self.coreset, strict=True)
                ]
                return logits
        learned, logits = self.learn(images, np.zeros(4), NEW_STEPS)
        self.coreset.append((mean, std, learned))
        return logits


def stream() -> list[Tensor]:
    """Two kinds of shift in turn, then a third."""
    generator = torch.Generator().manual_seed(5)
    shifts = torch.tensor([[2.0, 0, 0], [2.0, 0, 0], [0, -3.0, 1], [2.0, 0, 0], [0, -3.0, 1], [-2.0, 3, 4]])
    noise = [torch.randn(7, 3, 4, 4, generator=generator, dtype=torch.float64) for _ in shifts]
    return [0.3 * images + shift.view(1, 3, 1, 1) for images, shift in zip(noise, shifts, strict=True)]


@pytest.mark.parametrize("predict", ["before", "after"])
def test_logits_and_prompts_against_numpy(predict: Any) -> None:
    network = Dots()
    clean = torch.randn(40, 3, 4, 4, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    statistics = gather_source_statistics(network, [clean], statistics="source")
    method: Any = create_method(
        "dpcore", network, source_statistics=statistics, new_steps=NEW_STEPS, predict=predict, steps=STEPS
    )
    reference, sizes = Reference(network, clean.numpy(), predict), []
    for images in stream():
        expected = reference.adapt(images.numpy())
        np.testing.assert_allclose(method(images).numpy(), expected, rtol=1e-5, atol=1e-5)
        rows = np.stack([np.concatenate(triple) for triple in reference.coreset])
        np.testing.assert_allclose(method.coreset.numpy(), rows, rtol=1e-5, atol=1e-5)
        sizes.append(len(rows))
    assert sizes[0] == 1
    assert 1 < sizes[-1] < len(sizes)  # some shifts were new, and some known


def test_dpcore_brings_features_to_those_of_clean_images() -> None:
    """With a prompt that only a shift of the first map could need, the distance falls, and the shift is then known."""
    model = vmamba()
    statistics = gather_source_statistics(model, batches(4, seed=7), statistics="source")
    method = make("dpcore", model, source_statistics=statistics, new_steps=30, rho=0.9, lr=0.05)
    images = batches(1, seed=8)[0] + 2.0
    with torch.no_grad():
        first_map = method.model.embed(images)
        plain = method.distance(method.forward_stats(first_map, torch.zeros(8)))
        method.reset()
    method(images)
    with torch.no_grad():
        assert method.distance(method.forward_stats(first_map, method.coreset[0, -8:])) < 0.9 * plain
    method(images)
    assert len(method.coreset) == 1
    assert (method.counters.updates, method.counters.backwards) == (31, 31)


def test_dpcore_keeps_a_prompt_for_each_shift() -> None:
    method = make("dpcore", vmamba(), rho=0.0)
    run(method, batches(3))
    assert len(method.coreset) == 3


def test_dpcore_without_clean_images_names_the_way_out() -> None:
    with pytest.raises(ConfigError, match=r"gather_source_statistics\(model, clean_batches\)$"):
        create_method("dpcore", vmamba())
    with pytest.raises(ConfigError, match="1 clean images were given"):
        gather_source_statistics(vmamba(), batches(1, images=1))
