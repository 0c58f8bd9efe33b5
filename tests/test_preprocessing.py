"""Preprocessing as users call it, and bit for bit as benchmarks were run."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from trust_tta.errors import ConfigError, DataError, ShapeError
from trust_tta.preprocessing import PRESETS, Preprocessing

Pixels = NDArray[np.uint8]

# sha256 of the network input of the images below, by the code that the published results were measured with.
DIGESTS = {
    "imagenet": "b083de6509efab55",
    "squash224": "800821743f114387",
    "imagenet-c": "d921d0ae34515f38",
    "cifar32": "4b21d4bfb44b65c0",
    "pacs96": "b57a4f83f8c7e00f",
}


def make_images() -> tuple[list[Pixels], Pixels]:
    """Smooth pictures of four shapes, and thumbnails (5, 32, 32, 3)."""
    rng = np.random.default_rng(7)
    pictures = []
    for height, width in [(300, 260), (224, 224), (257, 400), (600, 333)]:
        small = Image.fromarray(rng.integers(0, 256, (9, 11, 3), dtype=np.uint8))
        pictures.append(np.asarray(small.resize((width, height), Image.Resampling.BICUBIC)))
    return pictures, rng.integers(0, 256, (5, 32, 32, 3), dtype=np.uint8)


@pytest.mark.parametrize("name", DIGESTS)
def test_network_input_is_what_it_was(name: str) -> None:
    pictures, thumbnails = make_images()
    first = PRESETS[name](pictures)
    second = first if name == "imagenet-c" else PRESETS[name](thumbnails)
    assert hashlib.sha256(first.numpy().tobytes() + second.numpy().tobytes()).hexdigest()[:16] == DIGESTS[name]


@pytest.mark.parametrize("name", ["imagenet", "squash224", "pacs96"])
def test_pictures_arrays_and_tensors_give_the_same(name: str) -> None:
    preprocessing, pixels = PRESETS[name], make_images()[0][1]
    expected = preprocessing([pixels])
    forms: list[Any] = [
        pixels,
        pixels[None],
        torch.tensor(pixels),
        torch.tensor(pixels)[None],
        Image.fromarray(pixels),
        [Image.fromarray(pixels)],
        (torch.tensor(pixels),),
    ]
    for images in forms:
        assert torch.equal(preprocessing(images), expected)


def test_gray_and_transparent_pictures_become_rgb() -> None:
    gray = Image.fromarray(np.arange(1024, dtype=np.uint8).reshape(32, 32))
    batch = PRESETS["cifar32"]([gray, gray.convert("RGBA"), gray.convert("P")])
    assert batch.shape == (3, 3, 32, 32)
    assert torch.equal(batch[0], batch[1])


@pytest.mark.parametrize(
    ("images", "words"),
    [
        (torch.zeros(2, 3, 8, 8), "dtype float32; .*floats are taken to be preprocessed already"),
        (torch.zeros(2, 3, 8, 8, dtype=torch.uint8), r"channels come last: use \.permute\(0, 2, 3, 1\)"),
        (np.zeros((8, 8), np.uint8), r"shape \(8, 8\)"),
        (np.zeros((0, 8, 3), np.uint8), r"shape \(0, 8, 3\)"),
        ([np.zeros((2, 8, 8, 3), np.uint8)], r"shape \(2, 8, 8, 3\)"),
        (["cat.jpg"], "an image is a str"),
        ("cat.jpg", "an image is a str"),
        (7, "an image is a int"),
        (None, "an image is a NoneType"),
    ],
)
def test_what_is_no_image_is_refused(images: Any, words: str) -> None:
    with pytest.raises(ShapeError, match=words):
        PRESETS["cifar32"](images)


@pytest.mark.parametrize("mode", ["I;16", "I", "F"])
def test_pictures_of_unknown_range_are_refused(mode: str) -> None:
    with pytest.raises(DataError, match=f"mode {mode} .* scale it to 0..255"):
        PRESETS["cifar32"](Image.new(mode, (8, 8)))


def test_a_sliver_does_not_eat_the_machine() -> None:
    with pytest.raises(DataError, match="30000x1 pixels would be resized to 7680000x256"):
        PRESETS["imagenet"](np.zeros((30000, 1, 3), np.uint8))


@pytest.mark.parametrize("name", PRESETS)
def test_text_round_trip(name: str) -> None:
    assert Preprocessing.from_mapping(json.loads(PRESETS[name].to_json())) == PRESETS[name]


@pytest.mark.parametrize(
    ("stated", "words"),
    [
        ({"size": float("inf")}, "size is inf; give an integer"),
        ({"size": 10**9}, "size is 1000000000; give a value <= 8192"),
        ({"mean": [float("nan"), 0, 0]}, "mean.0 is nan"),
        ({"std": [1, 1]}, "std"),
        ({"sise": 32}, "did you mean 'size'"),
    ],
)
def test_impossible_values_are_refused(stated: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        Preprocessing.from_mapping(stated)
    assert "\n" not in str(caught.value)


def test_the_text_form_is_part_of_stored_keys() -> None:
    assert repr(PRESETS["cifar32"]) == (
        "Preprocessing(size=32, resize=None, crop=True, mean=(0.4914, 0.4822, 0.4465), "
        "std=(0.247, 0.2435, 0.2616), interpolation='bicubic')"
    )
