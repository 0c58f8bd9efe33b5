"""Network input: pixels are preprocessed, and float batches of a wrong range or size are reported once."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import trust_tta as tt
from trust_tta.data.sample import load_sample
from trust_tta.errors import TrustWarning
from trust_tta.preprocessing import PRESETS, Preprocessing, network_input


@pytest.fixture
def shipped() -> tt.VMamba:
    return tt.create_model("vmamba_nano", checkpoint="vmamba_nano_cifar10")


IMAGES = load_sample()[0][:8]


def test_pixels_and_pictures_are_preprocessed(shipped: tt.VMamba) -> None:
    assert shipped.preprocessing is not None
    with torch.no_grad():
        expected = shipped(shipped.preprocessing(IMAGES))
        pictures = [Image.fromarray(image) for image in IMAGES]
        for given in (IMAGES, torch.from_numpy(IMAGES), pictures, list(IMAGES)):
            assert torch.equal(shipped(given), expected)
        assert torch.equal(shipped(pictures, order="badc"), shipped(shipped.preprocessing(IMAGES), order="badc"))
        assert torch.equal(shipped(pictures[0])[0], shipped(shipped.preprocessing(IMAGES[:1]))[0])


def test_pixels_take_the_dtype_of_the_network(shipped: tt.VMamba) -> None:
    with torch.no_grad():
        assert shipped.double()(IMAGES).dtype == torch.float64


def scaled(factor: float, *, size: int = 32) -> Tensor:
    planes = torch.from_numpy(IMAGES).permute(0, 3, 1, 2).float() * factor
    return torch.nn.functional.interpolate(planes, (size, size))


@pytest.mark.parametrize(
    ("images", "words"),
    [
        (scaled(1.0), "images have values from 0 to 255, and this network was trained on values from -1.99 to 2.13"),
        (scaled(1 / 255), "images have values from 0 to 1, and this network"),
        (scaled(1 / 255**2), "images have values from 0 to 0.0039"),
        (scaled(1 / 127.5, size=80) - 1, "images are 80x80 pixels, and this network was trained on 32x32"),
        (scaled(1 / 127.5, size=12) - 1, "images are 12x12 pixels, and this network was trained on 32x32"),
    ],
    ids=["0..255", "0..1", "twice", "large", "small"],
)
def test_unpreprocessed_floats_warn_once(shipped: tt.VMamba, images: Tensor, words: str) -> None:
    with torch.no_grad():
        with pytest.warns(TrustWarning, match=words) as caught:
            shipped(images)
        assert "model.preprocessing(pixels)" in str(caught[0].message)
        assert caught[0].filename == __file__
        shipped(images)


def test_methods_warn_about_unpreprocessed_floats(shipped: tt.VMamba) -> None:
    with pytest.warns(TrustWarning, match="0 to 255"):
        tt.create_method("bn", shipped)(scaled(1.0))


@pytest.mark.filterwarnings("ignore:.*poor for a batch")
def test_methods_take_pixels_and_pictures() -> None:
    outputs = []
    for given in (IMAGES, [Image.fromarray(image) for image in IMAGES]):
        model = tt.create_model("vmamba_nano", checkpoint="vmamba_nano_cifar10")
        outputs.append(tt.create_method("tent", model)(given))  # type: ignore[arg-type]
    assert outputs[0].shape == (8, 10)
    assert torch.equal(*outputs)


def test_preprocessed_images_never_mismatch() -> None:
    rng = np.random.default_rng(0)
    black, white = np.zeros((2, 64, 64, 3), np.uint8), np.full((2, 64, 64, 3), 255, np.uint8)
    noise = rng.integers(0, 256, (2, 64, 64, 3), dtype=np.uint8)
    for preprocessing in (
        *(p for p in PRESETS.values() if p.size <= 64 or not p.crop or p.resize),
        Preprocessing(size=64, mean=(0, 0, 0), std=(1, 1, 1)),
        Preprocessing(size=64, mean=(0, 0, 0), std=(1 / 255,) * 3),
        Preprocessing(size=64, mean=(0.5,) * 3, std=(0.5,) * 3),
    ):
        for images in (black, white, noise, noise // 8, 255 - noise // 8):
            assert preprocessing.mismatch(preprocessing(images)) == ""


def test_random_normal_and_zero_images_raise_no_warning(shipped: tt.VMamba) -> None:
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        for images in (torch.randn(64, 3, 32, 32), torch.zeros(4, 3, 32, 32)):
            assert shipped(images).isfinite().all()
    assert not [str(w.message) for w in caught]
    assert shipped.unchecked_batches == 1  # both were among the three that are checked


def test_an_untrained_network_is_not_checked() -> None:
    model = tt.create_model("vmamba_nano", depths=(1, 1), dims=(8, 16)).eval()
    with torch.no_grad():
        model(scaled(1.0))
        assert model(IMAGES).shape == (8, 10)


def test_only_the_first_batches_are_checked(shipped: tt.VMamba) -> None:
    good = torch.randn(2, 3, 32, 32)
    for _ in range(3):
        network_input(shipped, good)
    assert shipped.unchecked_batches == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        network_input(shipped, scaled(1.0))


def test_the_check_does_not_recompile_a_compiled_network(shipped: tt.VMamba) -> None:
    torch.compiler.reset()
    passes = 0

    def count(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        nonlocal passes
        passes += 1
        return graph.forward

    take = torch.compile(lambda images: network_input(shipped, images) * 2, backend=count, fullgraph=True)
    images = torch.randn(2, 3, 32, 32)
    for _ in range(4):
        assert torch.equal(take(images), images * 2)
        network_input(shipped, images)  # outside, where the network counts down
    assert passes == 1


def test_transforms_without_values_are_left_alone(shipped: tt.VMamba) -> None:
    images = torch.randn(3, 2, 3, 32, 32)
    found = torch.func.vmap(lambda one: network_input(shipped, one) * 2)(images)
    assert torch.equal(found, images * 2)
