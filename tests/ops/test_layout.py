"""Rows and columns of a map, and back, on a GPU: against the definition, values and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from trust_tta.ops import operators, reference
from trust_tta.ops import triton as backend
from trust_tta.ops.triton import cross_scan_merge, merge_norm_backward

SHAPES = [(2, 5, 7, 9), (1, 40, 1, 3), (3, 33, 16, 16), (2, 64, 17, 4), (1, 1, 1, 1)]


def make_map(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, *, channel_last: bool = True) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    return x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2) if channel_last else x


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.usefixtures("nan_empty")
def test_cross_scan_is_the_rows_and_the_columns(shape: tuple[int, ...]) -> None:
    for channel_last in (True, False):
        x = make_map(shape, channel_last=channel_last)
        u = backend.cross_scan(x, silu=False)
        b, c, h, w = shape
        for i in range(h):
            for j in range(w):
                assert torch.equal(u[:, 0, :, i * w + j], x[:, :, i, j])
                assert torch.equal(u[:, 1, :, j * h + i], x[:, :, i, j])
        assert torch.equal(u, reference.cross_scan(x))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.usefixtures("nan_empty")
def test_cross_merge_sums_both_sequences_in_place(shape: tuple[int, ...]) -> None:
    b, c, h, w = shape
    y = torch.randn(b, 2, c, h * w, generator=torch.Generator().manual_seed(1))
    merged = backend.cross_merge(y, h, w)
    assert torch.equal(merged, reference.cross_merge(y, h, w))
    assert merged.permute(0, 2, 3, 1).is_contiguous()


def test_each_is_the_adjoint_of_the_other() -> None:
    x, y = make_map((2, 6, 5, 3)), torch.randn(2, 2, 6, 15, generator=torch.Generator().manual_seed(5))
    forwards = (backend.cross_scan(x, silu=False).double() * y.double()).sum()
    backwards = (x.double() * backend.cross_merge(y, 5, 3).double()).sum()
    torch.testing.assert_close(forwards, backwards, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.usefixtures("nan_empty")
def test_silu_and_its_derivative_on_the_way(shape: tuple[int, ...]) -> None:
    for channel_last in (True, False):
        x = make_map(shape, channel_last=channel_last).requires_grad_()
        u = reference.cross_scan(torch.nn.functional.silu(x))
        du = torch.randn(u.shape, generator=torch.Generator().manual_seed(2))
        torch.testing.assert_close(backend.cross_scan(x.detach(), silu=True), u)
        (dx,) = torch.autograd.grad(u, x, du)
        merged = backend.cross_merge(du, *shape[2:], silu_of=x.detach())
        torch.testing.assert_close(merged, dx, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("offset", [0.0, 1000.0], ids=["centred", "far-from-zero"])
@pytest.mark.usefixtures("nan_empty")
def test_merge_norm(shape: tuple[int, ...], offset: float) -> None:
    b, c, h, w = shape
    draw = torch.Generator().manual_seed(3)
    y = torch.randn(b, 2, c, h * w, generator=draw) + offset
    weight, bias = torch.randn(c, generator=draw), torch.randn(c, generator=draw)
    norm, x, mean, scale = backend.merge_norm(y, h, w, weight, bias, 1e-5)
    exact = reference.cross_merge(y, h, w).permute(0, 2, 3, 1)
    wanted = exact.double()
    deviation = wanted.var(3, keepdim=True, correction=0).add(1e-5).sqrt()
    assert torch.equal(x, exact)
    torch.testing.assert_close(mean.double(), wanted.mean(3, keepdim=True), rtol=1e-6, atol=1e-6)
    tolerance = 1e-5 if offset == 0 else 2e-3
    torch.testing.assert_close(scale.double(), 1 / deviation, rtol=tolerance, atol=tolerance)
    expected = (wanted - wanted.mean(3, keepdim=True)) / deviation * weight.double() + bias.double()
    torch.testing.assert_close(norm.double(), expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(operators.run_merge_norm(y, h, w, weight, bias, 1e-5, keep=False)[0], norm)


STAGES = [
    pytest.param((8, c, side, side), "cuda", marks=pytest.mark.gpu) for c, side in ((96, 56), (192, 28), (384, 14))
]


@pytest.mark.parametrize(
    ("shape", "device"), [((2, 6, 18, 22), "cpu"), ((1, 34, 18, 12), "cpu"), ((2, 96, 28, 28), "cpu"), *STAGES], ids=str
)
@pytest.mark.usefixtures("nan_empty")
def test_two_numbers_at_a_time_or_one(shape: tuple[int, ...], device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit the same, infinities and what is no number included."""
    x = 3 * make_map(shape, torch.bfloat16).to(device)
    x[0, 0, 0, 0], x[0, 1, 0, 1] = float("nan"), float("inf")
    found = []
    for takes_pairs in (True, False):
        monkeypatch.setattr(cross_scan_merge, "_can_move_pairs", lambda x, taken=takes_pairs: taken)
        found.append([backend.cross_scan(x, silu=silu) for silu in (False, True)])
    for pairs, plain in zip(*found, strict=True):
        assert torch.equal(pairs.view(torch.int16), plain.view(torch.int16))
    x = x.nan_to_num(0, 0, 0)
    assert torch.equal(backend.cross_scan(x, silu=False), reference.cross_scan(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("shape", "device"), [((2, 6, 10, 14), "cpu"), ((1, 96, 20, 10), "cpu"), *STAGES], ids=str)
@pytest.mark.usefixtures("nan_empty")
def test_the_gradient_of_the_norm(shape: tuple[int, ...], device: str, dtype: torch.dtype) -> None:
    b, c, h, w = shape
    draw = torch.Generator().manual_seed(6)
    x, dnorm = (torch.randn(b, h, w, c, generator=draw).to(device, dtype) for _ in range(2))
    weight = torch.randn(c, generator=draw).to(device)
    exact = x.double().requires_grad_()
    normal = torch.nn.functional.layer_norm(exact, (c,), weight.double(), None, 1e-5)
    (dx,) = torch.autograd.grad(normal, exact, dnorm.double())
    wide = x.float()
    mean, scale = wide.mean(3, keepdim=True), (wide.var(3, keepdim=True, correction=0) + 1e-5).rsqrt()
    found, *_ = merge_norm_backward(dnorm, x, mean, scale, weight)
    wanted = reference.cross_scan(dx.permute(0, 3, 1, 2))
    tolerance = 1e-6 if dtype == torch.float32 else 6e-3  # the interpreter cuts bfloat16 off
    assert (found.double() - wanted).norm() <= tolerance * wanted.norm()
