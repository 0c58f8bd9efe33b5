"""Logits of pixels in bands of rows, against PyTorch's resize of whole maps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from trust_tta.methods import losses
from trust_tta.methods.ensembling import log_mean_probability, mean_log_probability
from trust_tta.ops import segmentation_logits as bands
from trust_tta.ops.segmentation_logits import CoarseLogits, Logits, apply_in_chunks, resized_chunks, upsample

SIZES = [((12, 15), (45, 60)), ((7, 9), (50, 31)), ((5, 5), (5, 5)), ((1, 1), (9, 8)), ((20, 20), (13, 11))]


def enlarged(coarse: Tensor, size: tuple[int, int]) -> Tensor:
    """All maps (..., h', w') at once."""
    maps = F.interpolate(coarse.flatten(0, -4), size, mode="bilinear", align_corners=False)
    return maps.view(*coarse.shape[:-2], *size)


def drawn(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return 3 * torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.fixture(params=[1, 200, 1 << 22])
def band(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(bands, "MAX_CHUNK_ELEMENTS", request.param)
    return int(request.param)


@pytest.mark.usefixtures("band")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("small", "large"), SIZES)
def test_chunks_are_rows_of_the_resized_map(small: tuple[int, int], large: tuple[int, int], dtype: torch.dtype) -> None:
    coarse = drawn(2, 3, *small, dtype=dtype)
    expected = enlarged(coarse, large)
    tolerance = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 0.04}[dtype]
    found = CoarseLogits(coarse, large).upsample()
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
    for rows, part in resized_chunks(expected, small):
        again = enlarged(expected, small)[:, :, rows]
        torch.testing.assert_close(part.to(dtype), again, rtol=0, atol=tolerance)


def test_a_second_resize_reads_the_first_in_chunks() -> None:
    coarse = drawn(2, 3, 6, 7)
    expected = enlarged(enlarged(coarse, (24, 28)), (31, 19))
    found = torch.cat([part for _, part in resized_chunks(CoarseLogits(coarse, (24, 28)), (31, 19))], 2)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


LOSSES: dict[str, Callable[[Logits], Tensor]] = {
    "entropy": lambda x: losses.entropy(x).square().mean(),
    "come": lambda x: losses.come_entropy(x).mean(),
    "own labels": losses.pseudo_label_loss,
    "mean": lambda x: losses.mean_entropy(x),
    "confusion": lambda x: losses.confusion_loss(losses.class_confusion(x, temperature=2.5)),
    "sure": lambda x: losses.chosen_label_loss(x, losses.own_labels(x)[1], losses.own_labels(x)[0] > 0.6),
}


@pytest.mark.usefixtures("band")
@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_coarse_logits_are_those_of_image_sized_ones(name: str) -> None:
    coarse = drawn(2, 4, 5, 6).requires_grad_()
    found = LOSSES[name](CoarseLogits(coarse, (19, 23)))
    expected = LOSSES[name](enlarged(coarse, (19, 23)))
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)
    gradients = [torch.autograd.grad(value, coarse)[0] for value in (found, expected)]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["entropy", "confusion"])
@pytest.mark.parametrize("views", [1, 2])
def test_losses_of_coarse_logits_are_gradchecked(name: str, views: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bands, "MAX_CHUNK_ELEMENTS", 40)
    coarse = drawn(1, views, 3, 3, 2).requires_grad_()
    if name == "confusion":  # whose weights are held fixed
        monkeypatch.setattr(losses, "_confidence", lambda p: torch.ones_like(p[:, 0]))
    assert torch.autograd.gradcheck(lambda x: LOSSES[name](mean_log_probability(CoarseLogits(x, (7, 5)))), (coarse,))


@pytest.mark.usefixtures("band")
def test_several_maps_become_one_in_each_chunk() -> None:
    coarse = drawn(2, 3, 4, 5, 6)
    full = enlarged(coarse, (20, 24))
    mean = full.softmax(2).mean(1).log()
    torch.testing.assert_close(
        upsample(log_mean_probability(CoarseLogits(coarse, (20, 24)))), mean, rtol=1e-10, atol=1e-10
    )
    pixels = mean_log_probability(CoarseLogits(coarse, (20, 24)))
    assert pixels.shape == mean.shape
    torch.testing.assert_close(upsample(pixels), full.log_softmax(2).mean(1), rtol=1e-10, atol=1e-10)


def test_whole_logits_pass_gradients_on() -> None:
    coarse = drawn(1, 2, 3, 4).requires_grad_()
    (found,) = torch.autograd.grad(CoarseLogits(coarse, (9, 8)).upsample().square().sum(), coarse)
    (expected,) = torch.autograd.grad(enlarged(coarse, (9, 8)).square().sum(), coarse)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.usefixtures("band")
def test_autocast_does_not_reach_into_chunks() -> None:
    coarse = drawn(2, 4, 5, 6, dtype=torch.float32).requires_grad_()
    plain = apply_in_chunks(lambda x: x.movedim(1, -1) @ x.new_ones(4), CoarseLogits(coarse, (19, 23)))
    (wanted,) = torch.autograd.grad(plain.square().mean(), coarse)
    with torch.autocast("cpu", torch.bfloat16):
        found = apply_in_chunks(lambda x: x.movedim(1, -1) @ x.new_ones(4), CoarseLogits(coarse, (19, 23)))
        (gradient,) = torch.autograd.grad(found.square().mean(), coarse)
    assert torch.equal(found, plain)
    assert torch.equal(gradient, wanted)
