"""tide on the shipped networks, one with BatchNorm and one with LayerNorm: real images, corrupted and clean."""

from __future__ import annotations

import numpy as np
import pytest
from torch import Tensor

import trust_tta as tt
from trust_tta.data.sample import load_sample
from trust_tta.methods import Method
from trust_tta.preprocessing import PRESETS

NETWORKS = ("vmamba_nano_cifar10", "vmamba_nano_layernorm_cifar10")
SAMPLE = load_sample()
IMAGES, LABELS = SAMPLE[0][:256], SAMPLE[1][:256]


def accuracy(method: Method, batches: tuple[Tensor, ...]) -> float:
    predicted = np.concatenate([method(batch).argmax(1).numpy() for batch in batches])
    return float((predicted == LABELS).mean())


@pytest.mark.parametrize("name", NETWORKS)
def test_tide_gains_on_noise_and_hardly_loses_on_clean_images(name: str) -> None:
    for pixels, least in ((tt.corrupt(IMAGES, "gaussian_noise", severity=5, seed=0), 0.1), (IMAGES, -0.01)):
        batches = PRESETS["cifar32"](pixels).split(32)
        source, tide = (accuracy(tt.create_method(method, tt.load(name)), batches) for method in ("source", "tide"))
        assert tide >= source + least
