"""LayerNorm of maps by kernels against PyTorch's in float64: values and every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from trust_tta.models.layers import LayerNorm2d  # noqa: E402
from trust_tta.ops import layer_norm as ops  # noqa: E402
from trust_tta.ops.triton import layer_norm as kernels  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 1e-2}  # of the norm; the interpreter cuts bfloat16 off
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
SHAPES = [(2, 5, 3, 7), (3, 96, 9, 5), (1, 1, 2, 2), (2, 33, 16, 4), (1, 640, 3, 3)]
STAGES = [
    pytest.param((64, c, side, side), marks=pytest.mark.gpu)
    for c, side in ((96, 56), (192, 28), (384, 14), (768, 7), (1536, 7))
]


def draw(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, *, seed: int = 0) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return x.to(DEVICE, dtype, memory_format=torch.channels_last) if len(shape) == 4 else x.to(DEVICE, dtype)


def plain(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    return residual + F.layer_norm(x.permute(0, 2, 3, 1), weight.shape, weight, bias, 1e-5).permute(0, 3, 1, 2)


@DTYPES
@pytest.mark.parametrize("offset", [0.0, 100.0])
@pytest.mark.parametrize("shape", [*SHAPES, *STAGES], ids=str)
@pytest.mark.usefixtures("nan_empty")
def test_value_and_every_gradient(
    shape: tuple[int, ...], offset: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With both outputs in use, so that the gradients of x are added."""
    monkeypatch.setattr(kernels, "PROGRAMS", 3)
    x, residual = draw(shape, dtype) + offset, draw(shape, dtype, seed=1)
    weight, bias = draw(shape[1:2], seed=2), draw(shape[1:2], seed=3)
    leaves = [t.requires_grad_() for t in (x, weight, bias, residual)]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    dx, dy = draw(shape, dtype, seed=4), draw(shape, dtype, seed=5)
    same, y = ops.layer_norm(leaves[0], leaves[1], leaves[2], 1e-5, leaves[3])
    wanted = plain(*exact)
    found_all = [y, *torch.autograd.grad([same, y], leaves, [dx, dy])]
    wanted_all = [wanted, *torch.autograd.grad([exact[0], wanted], exact, [dx.double(), dy.double()])]
    assert y.dtype == dtype
    assert y.permute(0, 2, 3, 1).is_contiguous()
    for mine, theirs, leaf in zip(found_all, wanted_all, [y, *leaves], strict=True):
        assert mine.dtype == leaf.dtype
        tolerance = TOLERANCES[dtype] * (1 if offset == 0 else 100)
        assert (mine.double() - theirs).norm() <= tolerance * theirs.norm().clamp(min=1e-3)


@pytest.mark.usefixtures("nan_empty")
def test_without_residual_and_with_frozen_parameters() -> None:
    x, weight, bias = draw((2, 6, 5, 3)).contiguous().requires_grad_(), draw((6,), seed=1), draw((6,), seed=2)
    y, wanted = ops.layer_norm(x, weight, bias, 1e-5)[1], plain(x, weight, bias, torch.zeros_like(x))
    torch.testing.assert_close(y, wanted)
    mine, theirs = (torch.autograd.grad(t.mean((2, 3)).square().sum(), x)[0] for t in (y, wanted))
    torch.testing.assert_close(mine, theirs)
    with torch.no_grad():
        torch.testing.assert_close(ops.layer_norm(x, weight, bias, 1e-5)[1], wanted)


def test_the_layer_takes_the_kernels_where_they_fit() -> None:
    layer, x = LayerNorm2d(6).to(DEVICE), draw((2, 6, 5, 3))
    layer.backend = "triton"
    assert layer.uses_kernels(x)
    assert not layer.uses_kernels(x.double())
    assert not LayerNorm2d(6, elementwise_affine=False).uses_kernels(x)
    kernels_used = layer(x, x)
    layer.backend = "reference"
    assert not layer.uses_kernels(x)
    torch.testing.assert_close(kernels_used, layer(x, x))

    def uses(x: Tensor) -> Any:
        layer.backend = "triton"
        assert not layer.uses_kernels(x)
        return layer(x)

    torch.testing.assert_close(torch.func.vmap(uses)(x[None])[0], layer(x))


def test_gradients_repeat_bit_for_bit() -> None:
    x, weight, bias = draw((4, 40, 9, 9)), draw((40,), seed=1).requires_grad_(), draw((40,), seed=2)
    runs = [torch.autograd.grad(ops.layer_norm(x, weight, bias, 1e-5)[1].square().sum(), weight) for _ in range(2)]
    assert torch.equal(runs[0][0], runs[1][0])
