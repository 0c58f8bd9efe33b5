"""Linear layers by kernels against PyTorch's in float64: values and every gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from trust_tta.models.layers import Linear2d, Mlp, PointwiseConv2d, linear_of_pixels  # noqa: E402
from trust_tta.ops import linear as linear_ops  # noqa: E402
from trust_tta.ops.triton import linear as triton_linear  # noqa: E402
from trust_tta.ops.triton import mlp as triton_mlp  # noqa: E402

TF32_BITS = -8192  # mask of the bits of a float32 that a tensor core reads
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 1e-2}  # of the norm; float32's own is near 1e-6 for such sums
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)


@pytest.fixture(params=[0, 132], ids=["usual-tiles", "small-tiles"])
def few(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Below how many tiles they are small."""
    monkeypatch.setattr(triton_linear, "NUM_PROCESSORS", request.param)


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32, device: str = DEVICE) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def check(ours: Callable[..., Tensor], plain: Callable[..., Tensor], inputs: list[Tensor]) -> None:
    """Value and gradients of `ours`, against `plain` in float64."""
    leaves, exact = [t.requires_grad_() for t in inputs], [t.detach().double().requires_grad_() for t in inputs]
    found, wanted = ours(*leaves), plain(*exact)
    dy = normal(*wanted.shape, seed=99, dtype=found.dtype, device=str(found.device))
    found_all = [found, *torch.autograd.grad(found, leaves, dy)]
    wanted_all = [wanted, *torch.autograd.grad(wanted, exact, dy.double())]
    for mine, theirs in zip(found_all, wanted_all, strict=True):
        assert mine.dtype == found.dtype
        assert (mine.double() - theirs).norm() <= TOLERANCES[found.dtype] * theirs.norm()


@DTYPES
@pytest.mark.parametrize(("rows", "inner", "columns"), [(3, 5, 7), (130, 40, 96), (64, 96, 20), (33, 600, 40)])
@pytest.mark.usefixtures("nan_empty", "few")
def test_a_layer_with_its_residual(rows: int, inner: int, columns: int, dtype: torch.dtype) -> None:
    x, residual = normal(1, rows, 1, inner, seed=0, dtype=dtype), normal(1, rows, 1, columns, seed=1, dtype=dtype)
    weight, bias = normal(columns, inner, seed=2, dtype=dtype) / inner**0.5, normal(columns, seed=3, dtype=dtype)
    check(linear_ops.fused_linear, linear_ops.linear, [x, weight.detach(), bias, residual])
    check(lambda x, w: linear_ops.fused_linear(x, w, None), lambda x, w: F.linear(x, w), [x.detach(), weight.detach()])


@DTYPES
@pytest.mark.parametrize(("rows", "channels", "hidden"), [(5, 3, 12), (130, 40, 160)])
@pytest.mark.usefixtures("nan_empty", "few")
def test_two_layers_with_gelu_between_them(
    rows: int, channels: int, hidden: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hidden map is made again for the backward."""
    monkeypatch.setattr(triton_mlp, "supports", lambda channels, hidden: False)
    x, residual = (normal(rows, 1, 1, channels, seed=seed, dtype=dtype) for seed in (0, 1))
    weight1, bias1 = normal(hidden, channels, seed=2, dtype=dtype) / channels**0.5, normal(hidden, seed=3, dtype=dtype)
    weight2, bias2 = normal(channels, hidden, seed=4, dtype=dtype) / hidden**0.5, normal(channels, seed=5, dtype=dtype)

    def plain(x: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor, residual: Tensor) -> Tensor:
        return residual + F.linear(F.gelu(F.linear(x, weight1, bias1)), weight2, bias2)

    check(linear_ops.fused_mlp, plain, [x, weight1.detach(), bias1, weight2.detach(), bias2, residual])


@pytest.mark.parametrize("rows", [1, 130])
@pytest.mark.parametrize("channels", [32, 48, 96, 192])
@pytest.mark.usefixtures("nan_empty")
def test_narrow_layers_in_one_kernel(channels: int, rows: int) -> None:
    """Value and the gradients of the map; where weights are trained, the hidden map is written out."""
    hidden, dtype = 2 * channels if channels > 100 else 4 * channels, torch.bfloat16
    x, residual = (normal(rows, 1, 1, channels, seed=seed, dtype=dtype) for seed in (0, 1))
    weight1, bias1 = normal(hidden, channels, seed=2, dtype=dtype) / channels**0.5, normal(hidden, seed=3, dtype=dtype)
    weight2, bias2 = normal(channels, hidden, seed=4, dtype=dtype) / hidden**0.5, normal(channels, seed=5, dtype=dtype)
    assert triton_mlp.supports(channels, hidden)
    weights = weight1, bias1, weight2, bias2
    exact = [w.double() for w in weights]

    def plain(x: Tensor, residual: Tensor) -> Tensor:
        return residual + F.linear(F.gelu(F.linear(x, *exact[:2])), *exact[2:])

    check(lambda x, residual: linear_ops.fused_mlp(x, *weights, residual), plain, [x, residual])
    check(lambda x: linear_ops.fused_mlp(x, *weights), lambda x: plain(x, torch.zeros_like(x)), [x.detach()])


@pytest.mark.parametrize(("channels", "hidden"), [(36, 144), (384, 1536), (16, 64), (96, 100), (160 + 8, 64)])
def test_other_layers_take_two_kernels(channels: int, hidden: int) -> None:
    assert not triton_mlp.supports(channels, hidden)


def test_frozen_weights_get_no_gradient_and_keep_nothing() -> None:
    x, weight = normal(1, 4, 1, 16, seed=0).requires_grad_(), normal(8, 16, seed=1)
    y = linear_ops.fused_linear(x, weight, None)
    assert y.grad_fn is not None
    (function,) = [f for f, _ in y.grad_fn.next_functions if f is not None]
    saved: Any = function
    assert saved.saved_tensors[0] is None
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], weight.sum(0).expand_as(x), rtol=1e-5, atol=1e-5)


def test_both_parts_of_a_weight_are_what_a_tensor_core_reads() -> None:
    """Of a float32 it reads the first 10 bits after the point: what is lost of the parts is below float32."""
    weight = normal(50, 30, seed=0, device="cpu") * torch.logspace(-20, 20, 30)
    high, low = triton_linear.prepare(weight, rows=1 << 20)
    read = [(part.view(torch.int32) & TF32_BITS).view(torch.float32) for part in (high, low)]
    assert torch.equal(read[0], high)
    assert torch.equal(high + low, weight)
    assert ((read[0].double() + read[1] - weight).abs() <= 2**-20 * weight.abs()).all()


@pytest.mark.parametrize("inner", [96, 384, 1536])
def test_three_products_of_parts_have_the_error_of_float32(inner: int) -> None:
    """The products as a tensor core makes them, summed exactly, beside a float32 product."""
    x, weight = normal(64, inner, seed=1, device="cpu"), normal(64, inner, seed=2, device="cpu")
    parts = []
    for given in (x, weight):
        high, low = triton_linear.prepare(given, rows=1 << 20)
        parts.append([(part.view(torch.int32) & TF32_BITS).view(torch.float32).double() for part in (high, low)])
    (x_high, x_low), (w_high, w_low) = parts
    split = x_high @ w_high.T + x_high @ w_low.T + x_low @ w_high.T
    exact = x.double() @ weight.double().T
    library = ((x @ weight.T).double() - exact).norm()
    assert (split - exact).norm() <= 4 * library
    assert (split - exact).norm() <= 5e-7 * exact.norm()


def test_on_a_cpu_layers_are_plain() -> None:
    mlp, x = Mlp(8, 32), torch.randn(2, 8, 3, 3).to(memory_format=torch.channels_last)
    assert not mlp.uses_kernels(x, None)
    layer = Linear2d(8, 4)
    expected = F.linear(x.permute(0, 2, 3, 1), layer.weight, layer.bias).permute(0, 3, 1, 2)
    assert torch.equal(layer(x), expected)
    assert torch.equal(layer(x, expected), expected + expected)


def test_a_pointwise_convolution_is_a_linear_layer() -> None:
    x, residual = (torch.randn(2, c, 3, 5, device=DEVICE).to(memory_format=torch.channels_last) for c in (8, 4))
    layer = PointwiseConv2d(8, 4).to(DEVICE)
    wanted = F.conv2d(x, layer.weight, layer.bias)
    torch.testing.assert_close(layer(x, residual), wanted + residual, rtol=1e-4, atol=1e-5)
    by_linear = linear_of_pixels(x, layer.weight.flatten(1), layer.bias, None, "auto")
    torch.testing.assert_close(by_linear, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize(("batch", "low"), [(64, False), (64, True), (1, False)], ids=["float32", "bf16", "one-image"])
@pytest.mark.parametrize("channels", [96, 192, 384, 768])
def test_layers_of_a_network(channels: int, batch: int, low: bool, frozen: bool) -> None:
    """At the sizes of VMamba-T, chosen by the layers themselves; PyTorch's own layers are as far from float64."""
    torch.manual_seed(0)
    side = 56 * 96 // channels
    mlp, out = Mlp(channels, 4 * channels).cuda(), Linear2d(channels, channels, bias=False).cuda()
    weights = [*mlp.parameters(), *out.parameters()]
    for weight in weights:
        weight.requires_grad_(not frozen)
    x, residual = (torch.randn(batch, channels, side, side, device="cuda") for _ in range(2))
    x, residual = (
        t.to(memory_format=torch.channels_last, dtype=torch.bfloat16 if low else None) for t in (x, residual)
    )
    dy = torch.randn_like(residual)
    results = []
    for backend in ("auto", "reference"):
        for module in (mlp, mlp.fc1, mlp.fc2, out):
            module.backend = backend
        leaf = x.detach().requires_grad_()
        with torch.autocast("cuda", torch.bfloat16, enabled=low), torch.backends.cudnn.flags(allow_tf32=False):
            assert mlp.uses_kernels(leaf, residual) == (backend == "auto")
            y = mlp(leaf, residual) + out(leaf, residual)
            gradients = torch.autograd.grad(y, [leaf] if frozen else [leaf, *weights], dy)
        results.append([y, *gradients])
    for ours, plain in zip(*results, strict=True):
        assert (ours.double() - plain.double()).norm() <= (2e-2 if low else 1e-5) * plain.double().norm()
