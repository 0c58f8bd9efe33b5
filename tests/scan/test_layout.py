"""Rows and columns of a map, and back: every backend against the definition, values and gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from trust_tta.scan import layout

SHAPES = [(2, 5, 7, 9), (1, 40, 1, 3), (3, 33, 16, 16), (2, 64, 17, 4), (1, 1, 1, 1)]
BACKENDS = [pytest.param(False, id="cpu"), pytest.param(True, id="triton")]


def make_map(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, *, channel_last: bool = True) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    return x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2) if channel_last else x


@pytest.mark.parametrize("triton", BACKENDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.usefixtures("nan_empty")
def test_spread_is_the_rows_and_the_columns(shape: tuple[int, ...], triton: bool) -> None:
    for channel_last in (True, False):
        x = make_map(shape, channel_last=channel_last)
        u = layout.spread(x, silu=False, triton=triton)
        b, c, h, w = shape
        for i in range(h):
            for j in range(w):
                assert torch.equal(u[:, 0, :, i * w + j], x[:, :, i, j])
                assert torch.equal(u[:, 1, :, j * h + i], x[:, :, i, j])
        assert torch.equal(u, layout.spread_reference(x))


@pytest.mark.parametrize("triton", BACKENDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.usefixtures("nan_empty")
def test_join_sums_both_sequences_in_place(shape: tuple[int, ...], triton: bool) -> None:
    b, c, h, w = shape
    y = torch.randn(b, 2, c, h * w, generator=torch.Generator().manual_seed(1))
    joined = layout.join(y, h, w, silu_of=None, triton=triton)
    assert torch.equal(joined, layout.join_reference(y, h, w))
    assert joined.permute(0, 2, 3, 1).is_contiguous()


@pytest.mark.parametrize("triton", BACKENDS)
def test_each_is_the_adjoint_of_the_other(triton: bool) -> None:
    x, y = make_map((2, 6, 5, 3)), torch.randn(2, 2, 6, 15, generator=torch.Generator().manual_seed(5))
    forwards = (layout.spread(x, silu=False, triton=triton).double() * y.double()).sum()
    backwards = (x.double() * layout.join(y, 5, 3, silu_of=None, triton=triton).double()).sum()
    torch.testing.assert_close(forwards, backwards, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("triton", BACKENDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.usefixtures("nan_empty")
def test_silu_and_its_slope_on_the_way(shape: tuple[int, ...], triton: bool) -> None:
    for channel_last in (True, False):
        x = make_map(shape, channel_last=channel_last).requires_grad_()
        u = layout.spread_reference(torch.nn.functional.silu(x))
        du = torch.randn(u.shape, generator=torch.Generator().manual_seed(2))
        torch.testing.assert_close(layout.spread(x.detach(), silu=True, triton=triton), u)
        (dx,) = torch.autograd.grad(u, x, du)
        joined = layout.join(du, *shape[2:], silu_of=x.detach(), triton=triton)
        torch.testing.assert_close(joined, dx, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("triton", BACKENDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("offset", [0.0, 1000.0], ids=["centred", "far-from-zero"])
@pytest.mark.usefixtures("nan_empty")
def test_join_and_normalise(shape: tuple[int, ...], offset: float, triton: bool) -> None:
    b, c, h, w = shape
    draw = torch.Generator().manual_seed(3)
    y = torch.randn(b, 2, c, h * w, generator=draw) + offset
    weight, bias = torch.randn(c, generator=draw), torch.randn(c, generator=draw)
    normal, x, mean, scale = layout.join_and_normalise(y, h, w, weight, bias, 1e-5, triton=triton)
    exact = layout.join_reference(y, h, w).permute(0, 2, 3, 1)
    wanted = exact.double()
    deviation = wanted.var(3, keepdim=True, correction=0).add(1e-5).sqrt()
    assert torch.equal(x, exact)
    torch.testing.assert_close(mean.double(), wanted.mean(3, keepdim=True), rtol=1e-6, atol=1e-6)
    tolerance = 1e-5 if offset == 0 else 2e-3
    torch.testing.assert_close(scale.double(), 1 / deviation, rtol=tolerance, atol=tolerance)
    expected = (wanted - wanted.mean(3, keepdim=True)) / deviation * weight.double() + bias.double()
    torch.testing.assert_close(normal.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes_keep_their_values(dtype: torch.dtype) -> None:
    x = make_map((2, 6, 4, 5), dtype)
    assert torch.equal(layout.spread(x, silu=False, triton=False), layout.spread_reference(x))
    y = layout.spread_reference(x)
    torch.testing.assert_close(layout.join(y, 4, 5, silu_of=None, triton=False), layout.join_reference(y, 4, 5))


def test_large_maps_on_several_threads(threads: Callable[[int], None]) -> None:
    x = make_map((4, 48, 20, 24))
    threads(2)
    assert torch.equal(layout.spread(x, silu=False, triton=False), layout.spread_reference(x))
    y = layout.spread_reference(x)
    assert torch.equal(layout.join(y, 20, 24, silu_of=None, triton=False), layout.join_reference(y, 20, 24))
