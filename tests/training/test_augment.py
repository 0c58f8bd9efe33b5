from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from tests.training.samples import noisy_images
from trust_tta.training import tasks as augment


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def crop(images: NDArray[np.uint8], *, padding: int, flip: bool, seed: int = 0) -> NDArray[np.uint8]:
    pixels = torch.from_numpy(images)
    chosen = torch.arange(len(images)).flip(0)
    return augment.crop_and_flip(pixels, chosen, padding=padding, flip=flip, generator=generator(seed)).numpy()


def test_each_output_is_a_crop_of_the_reflected_image_mirrored_or_not() -> None:
    images, padding = noisy_images(300, height=7, width=9), 3
    cropped = crop(images, padding=padding, flip=True)
    padded = np.pad(images[::-1], ((0, 0), (padding,) * 2, (padding,) * 2, (0, 0)), mode="reflect")
    found = []
    for image, result in zip(padded, cropped, strict=True):
        windows = [
            (top, left, mirrored)
            for top in range(2 * padding + 1)
            for left in range(2 * padding + 1)
            for mirrored in (False, True)
            if np.array_equal(result[:, ::-1] if mirrored else result, image[top : top + 7, left : left + 9])
        ]
        assert len(windows) == 1
        found += windows
    tops, lefts, mirrored = zip(*found, strict=True)
    assert set(tops) == set(lefts) == set(range(7))  # every offset occurs, none beyond the padding
    assert 0.4 < np.mean(mirrored) < 0.6


def test_without_padding_and_flip_images_are_only_chosen() -> None:
    images = noisy_images(5, height=3, width=4)
    np.testing.assert_array_equal(crop(images, padding=0, flip=False), images[::-1])


def test_the_seed_decides() -> None:
    images = noisy_images(20)
    first, again, other = (crop(images, padding=3, flip=True, seed=seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


def test_pixels_are_normalized_by_mean_and_deviation() -> None:
    images = noisy_images(3, height=5, width=4)
    mean, std = (0.1, 0.5, 0.6), (0.2, 0.3, 0.25)
    scale, shift = augment.channel_constants(mean, std, torch.device("cpu"))
    found = augment.normalize(torch.from_numpy(images), scale, shift)
    expected = ((images / 255 - mean) / std).transpose(0, 3, 1, 2)
    np.testing.assert_allclose(found.numpy(), expected, rtol=0, atol=1e-6)
    assert found.is_contiguous(memory_format=torch.channels_last)


def test_cutout_clears_one_square() -> None:
    inputs = torch.ones(400, 3, 9, 11)
    holes = augment.cut_out(inputs, side=4, generator=generator()) == 0
    assert torch.equal(holes[:, 0], holes[:, 1])
    rows, columns = holes[:, 0].any(2), holes[:, 0].any(1)
    assert torch.equal(holes[:, 0], rows[:, :, None] & columns[:, None, :])  # rectangles
    heights, widths = rows.sum(1), columns.sum(1)
    assert set(heights.tolist()) == set(widths.tolist()) == {2, 3, 4}  # whole, or cut at a border
    whole = heights == 4
    assert whole.any()
    assert bool((rows[whole].int().diff(dim=1).abs().sum(1) <= 2).all())  # one piece
    assert holes[:, 0].any(0).all()  # every pixel may be hit


def labeled(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Image i is filled with i; the target is the identity's row."""
    return torch.arange(float(n)).view(n, 1, 1, 1).expand(n, 3, 10, 8).clone(), torch.eye(n)


def test_cutmix_targets_are_the_shares_of_pixels() -> None:
    n = 200
    inputs, targets = labeled(n)
    mixed, shares = augment.cutmix(inputs, targets, share=0.6, generator=generator())
    counted = torch.stack([(mixed[:, 0] == i).float().mean((1, 2)) for i in range(n)], dim=1)
    torch.testing.assert_close(shares, counted, rtol=0, atol=1e-6)
    kept = shares.diagonal()
    assert 0.45 < float((kept < 1).float().mean()) < 0.65
    neighbours = shares.roll(1, 1).diagonal()  # nothing comes from anywhere else
    torch.testing.assert_close(kept + neighbours, torch.ones(n))


def test_no_share_changes_no_bit() -> None:
    inputs, targets = torch.randn(7, 3, 5, 5, generator=generator()), torch.eye(7)
    mixed, shares = augment.cutmix(inputs, targets, share=0.0, generator=generator())
    assert torch.equal(mixed, inputs)
    assert torch.equal(shares, targets)
