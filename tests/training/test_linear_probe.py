from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests.training.samples import colored_images, tiny_network
from trust_tta.errors import ConfigError, DataError
from trust_tta.models.vmamba import VMamba
from trust_tta.training.linear_probe import extract_features, fit_head
from trust_tta.training.recipe import FinetuneRecipe


def preprocess(images: NDArray[np.uint8]) -> Tensor:
    return torch.from_numpy(images).permute(0, 3, 1, 2) / 127.5 - 1


def features_of(model: VMamba, images: NDArray[np.uint8]) -> Tensor:
    return extract_features(model, [preprocess(images)])


def test_only_the_head_is_trained() -> None:
    images, labels = colored_images(75)
    model = tiny_network().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    recipe = FinetuneRecipe(epochs=60, lr=2e-2, batch_size=32)
    result = fit_head(model, features_of(model, images), labels, recipe)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"classifier.head.weight", "classifier.head.bias"}
    assert all(p.grad is None for p in model.parameters())
    assert len(result.losses) == 60
    assert result.losses[-1] < 0.2 < result.losses[0]
    assert result.accuracy == 1.0
    with torch.no_grad():
        assert torch.equal(model(preprocess(images)).argmax(1), torch.from_numpy(labels))


def test_the_losses_equal_those_of_a_loop_by_hand() -> None:
    images, labels = colored_images(24)
    model, reference = tiny_network(), tiny_network().eval()
    recipe = FinetuneRecipe(epochs=5, lr=1e-2, batch_size=24)
    result = fit_head(model, features_of(model, images), labels, recipe)
    optimizer = torch.optim.Adam(reference.classifier.head.parameters(), lr=1e-2)
    for expected in result.losses:  # whole batches through the whole network
        loss = torch.nn.functional.cross_entropy(reference(preprocess(images)), torch.from_numpy(labels))
        assert loss.item() == pytest.approx(expected, abs=1e-5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def test_deterministic_by_seed() -> None:
    images, labels = colored_images(20)
    recipe, features = FinetuneRecipe(epochs=3, batch_size=7), features_of(tiny_network(), images)
    first = fit_head(tiny_network(), features, labels, recipe)
    assert fit_head(tiny_network(), features, labels, recipe) == first
    assert fit_head(tiny_network(), features, labels, recipe.changed(seed=1)) != first


def test_features_are_those_of_evaluation_mode() -> None:
    images, _ = colored_images(11)
    model = tiny_network().train()
    found = extract_features(model, preprocess(images).split(4))
    with torch.no_grad():
        expected = tiny_network().eval().forward_features(preprocess(images))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_mistakes_are_named() -> None:
    images, labels = colored_images(6)
    recipe, features = FinetuneRecipe(epochs=9), features_of(tiny_network(), images)
    with pytest.raises(DataError, match="num_classes=9"):
        fit_head(tiny_network(), features, labels + 6, recipe)
    with pytest.raises(DataError, match="one per image"):
        fit_head(tiny_network(), features, labels[:5], recipe)
    with pytest.raises(ConfigError, match=r"epochs is 0; .*lr is -1.0; "):
        FinetuneRecipe(epochs=0, lr=-1.0)
    with pytest.raises(ConfigError, match="the loss is nan in epoch 0 with lr 0.0005"):
        fit_head(tiny_network(), features / 0, labels, recipe)
