"""The augmentations and the ablation built on them."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from scipy import ndimage
from torch import Tensor

from tests.methods.networks import batches, make, run, same, vmamba
from trust_tta.errors import ConfigError
from trust_tta.methods.ablations import ANGLE, CROP, JITTER, KINDS, crop, jitter, rotation

Augment = Callable[[Tensor, torch.Generator, float], Tensor]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def smooth(height: int = 24, width: int = 24) -> Tensor:
    """A low wave, so that interpolation hardly matters."""
    y, x = torch.meshgrid(torch.linspace(0, 3, height), torch.linspace(0, 3, width), indexing="ij")
    return torch.stack([torch.sin(x + c) * torch.cos(0.7 * y) for c in range(3)])[None]


@pytest.mark.parametrize("kind", KINDS)
def test_shape_and_draws(kind: str) -> None:
    augment, (images,) = KINDS[kind], batches(1, images=5)
    images = images[..., :11]
    changed = augment(images, generator(), 1.0)
    assert changed.shape == images.shape
    assert changed.dtype == images.dtype
    assert torch.equal(changed, augment(images, generator(), 1.0))
    assert not torch.equal(changed, augment(images, generator(1), 1.0))
    torch.testing.assert_close(augment(images, generator(), 0.0), images, rtol=1e-4, atol=1e-4)
    same_image = augment(images[:1].expand(2, -1, -1, -1), generator(), 1.0)
    assert not torch.equal(same_image[0], same_image[1])  # every image its own


@pytest.mark.parametrize("shape", [(24, 24), (20, 28)])
def test_rotation_turns_about_the_center(shape: tuple[int, int]) -> None:
    image = smooth(*shape)
    draw = float(2 * torch.rand(1, generator=generator(7)) - 1)
    assert abs(draw) > 0.05
    strength = 0.8 / abs(draw)  # 12 degrees, whichever way
    ours = rotation(image, generator(7), strength)[0, 0].numpy()
    middle = slice(7, -7)
    expected = ndimage.rotate(image[0, 0].numpy(), math.degrees(strength * draw * ANGLE), reshape=False, order=1)
    assert abs(ours - expected)[middle, middle].max() < 0.02
    assert abs(ours - image[0, 0].numpy())[middle, middle].max() > 0.05


def test_crop_enlarges_a_window_inside_the_image() -> None:
    ramp = torch.linspace(-1, 1, 40).expand(1, 1, 40, 40)
    for seed in range(5):
        window = crop(ramp, generator(seed))[0, 0, 0]
        assert window.min() >= -1
        assert window.max() <= 1
        side = float(window[-2] - window[1]) / float(ramp[0, 0, 0, -2] - ramp[0, 0, 0, 1])
        assert 1 - CROP - 1e-3 <= side <= 1 + 1e-3


def test_jitter_by_hand() -> None:
    image = torch.randn(1, 3, 4, 5, generator=generator(8))
    draws = generator(3)
    saturation, contrast, brightness = (float(2 * torch.rand(1, generator=draws) - 1) * JITTER for _ in range(3))
    gray = image.mean(1, keepdim=True)
    expected = gray + (1 + saturation) * (image - gray)
    expected = expected.mean() + (1 + contrast) * (expected - expected.mean()) + brightness
    torch.testing.assert_close(jitter(image, generator(3)), expected)


def test_per_batch_draws_once_a_batch_and_anew_for_the_next() -> None:
    seen: list[Tensor] = []
    for per in ("batch", "view"):
        method = make("augmentation", vmamba(), per=per, k=3)
        seen.clear()
        method.model.patch_embed.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
        (images,) = batches(1)
        run(method, [images, images])
        views = [seen[0:3], seen[4:7]]
        for shown in views:
            assert same(shown[0], shown[1]) == same(shown[1], shown[2]) == (per == "batch")
        assert not same(views[0][0], views[1][0])
        assert same(seen[3], images)  # the prediction is of the images as they came
        assert same(seen[7], images)


def test_seeds_decide() -> None:
    stream = batches(2)
    first = run(make("augmentation", vmamba(), seed=1), stream)
    assert same(run(make("augmentation", vmamba(), seed=1), stream), first)
    assert not same(run(make("augmentation", vmamba(), seed=2), stream), first)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "blur"}, "choose one of rotation, crop, jitter"),
        ({"per": "image"}, "choose one of view, batch"),
        ({"k": 0}, "k is 0; give a value >= 1"),
        ({"strength": -0.1}, "strength is -0.1; give a value >= 0"),
    ],
    ids=str,
)
def test_wrong_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make("augmentation", vmamba(), **options)
