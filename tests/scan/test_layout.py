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
        u = layout.spread(x, triton)
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
    joined = layout.join(y, h, w, triton)
    assert torch.equal(joined, layout.join_reference(y, h, w))
    assert joined.permute(0, 2, 3, 1).is_contiguous()


@pytest.mark.parametrize("triton", BACKENDS)
def test_each_is_the_adjoint_of_the_other(triton: bool) -> None:
    x, y = make_map((2, 6, 5, 3)), torch.randn(2, 2, 6, 15)
    forwards = (layout.spread(x, triton).double() * y.double()).sum()
    backwards = (x.double() * layout.join(y, 5, 3, triton).double()).sum()
    torch.testing.assert_close(forwards, backwards)
    x.requires_grad_()
    y.requires_grad_()
    (dx,) = torch.autograd.grad(layout.spread(x, triton), x, y.detach())
    (dy,) = torch.autograd.grad(layout.join(y, 5, 3, triton), y, x.detach())
    torch.testing.assert_close(dx, layout.join_reference(y.detach(), 5, 3))
    torch.testing.assert_close(dy, layout.spread_reference(x.detach()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes_keep_their_values(dtype: torch.dtype) -> None:
    x = make_map((2, 6, 4, 5), dtype)
    assert torch.equal(layout.spread(x, False), layout.spread_reference(x))
    y = layout.spread_reference(x)
    torch.testing.assert_close(layout.join(y, 4, 5, False), layout.join_reference(y, 4, 5))


def test_the_operators_keep_torch_librarys_rules() -> None:
    x = make_map((2, 4, 3, 5)).requires_grad_()
    torch.library.opcheck(layout.spread, (x, False))
    torch.library.opcheck(layout.join, (torch.randn(2, 2, 4, 15, requires_grad=True), 3, 5, False))


def test_large_maps_on_several_threads(threads: Callable[[int], None]) -> None:
    x = make_map((4, 48, 20, 24))
    threads(2)
    assert torch.equal(layout.spread(x, False), layout.spread_reference(x))
    y = layout.spread_reference(x)
    assert torch.equal(layout.join(y, 20, 24, False), layout.join_reference(y, 20, 24))
