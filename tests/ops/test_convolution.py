"""Strided convolutions as a matrix product, against PyTorch's own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from trust_tta.bench.timing import float32_only
from trust_tta.ops import convolution
from trust_tta.ops.convolution import (
    DepthwiseConv2d,
    FirstConv2d,
    StridedConv2d,
    _Depthwise,
    _PatchMatmul,
    convolve,
    extract_patches,
    input_gradient,
)

CASES = {
    "stem": (2, 16, 12, 12, 24, 3, 2, 1),
    "odd map": (3, 17, 9, 7, 5, 3, 2, 1),
    "one row": (1, 4, 1, 6, 3, 3, 2, 1),
    "patches": (2, 5, 8, 8, 7, 4, 4, 0),
    "wide": (1, 3, 11, 10, 4, 5, 3, 2),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("channels_last", [True, False])
def test_as_conv2d(case: tuple[int, ...], with_bias: bool, channels_last: bool) -> None:
    b, c, h, w, out, size, stride, padding = case
    torch.manual_seed(0)
    x = torch.randn(b, c, h, w, dtype=torch.float64)
    x = (x.to(memory_format=torch.channels_last) if channels_last else x).requires_grad_()
    weight = torch.randn(out, c, size, size, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(out, dtype=torch.float64, requires_grad=True) if with_bias else None
    leaves = [t for t in (x, weight, bias) if t is not None]
    expected = F.conv2d(x, weight, bias, stride, padding)
    ours = _PatchMatmul.apply(x, weight, bias, stride, padding)  # type: ignore[no-untyped-call]
    torch.testing.assert_close(ours, expected)
    assert ours.is_contiguous(memory_format=torch.channels_last)
    dy = torch.randn_like(expected)
    for mine, theirs in zip(
        torch.autograd.grad(ours, leaves, dy), torch.autograd.grad(expected, leaves, dy), strict=True
    ):
        torch.testing.assert_close(mine, theirs)


def test_a_frozen_layer_passes_the_gradient_on() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(2, 16, 6, 6, requires_grad=True), torch.randn(4, 16, 3, 3)
    call: Any = _PatchMatmul.apply
    assert torch.autograd.gradcheck(lambda t: call(t, weight.double(), None, 2, 1), x.double())


def test_on_a_cpu_it_is_the_plain_layer() -> None:
    layer = StridedConv2d(16, 4, 3, stride=2, padding=1)
    x = torch.randn(1, 16, 6, 6)
    assert not layer.uses_matmul(x)
    assert torch.equal(layer(x), F.conv2d(x, layer.weight, layer.bias, 2, 1))


@pytest.mark.gpu
@pytest.mark.parametrize("precise", [True, False])
def test_on_a_gpu_only_full_precision_uses_the_product(precise: bool) -> None:
    torch.manual_seed(0)
    layer = StridedConv2d(96, 192, 3, stride=2, padding=1).cuda()
    x = torch.randn(4, 96, 28, 28, device="cuda").to(memory_format=torch.channels_last)
    with torch.backends.cudnn.flags(allow_tf32=not precise):
        assert layer.uses_matmul(x) == precise
        assert not layer.uses_matmul(x.half())
        with torch.autocast("cuda", torch.bfloat16):
            assert not layer.uses_matmul(x)
        exact = F.conv2d(x.double(), layer.weight.double(), layer.bias.double(), 2, 1)  # type: ignore[union-attr]
        torch.testing.assert_close(layer(x).double(), exact, rtol=1e-4, atol=1e-4 if precise else 1e-2)
        leaf, dy = x.detach().requires_grad_(), torch.randn_like(exact).float()
        (found,) = torch.autograd.grad(layer(leaf), leaf, dy)
        wanted = torch.nn.grad.conv2d_input(x.shape, layer.weight.double(), dy.double(), 2, 1)
        assert (found.double() - wanted).norm() <= (5e-6 if precise else 5e-3) * wanted.norm()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.usefixtures("nan_empty")
def test_the_kernel_extracts_the_same_patches(case: tuple[int, ...], channels_last: bool) -> None:
    pytest.importorskip("triton")
    from trust_tta.ops.triton import convolution as triton_convolution

    b, c, h, w, _, size, stride, padding = case
    x = torch.randn(b, c, h, w, generator=torch.Generator().manual_seed(0))
    x = x.to("cuda" if torch.cuda.is_available() else "cpu")
    x = x.to(memory_format=torch.channels_last) if channels_last else x
    ours = triton_convolution.extract_patches(x, size, stride, padding)
    assert torch.equal(ours, extract_patches(x, size, stride, padding))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.usefixtures("nan_empty")
def test_the_gradient_is_the_sum_of_those_of_the_patches(case: tuple[int, ...]) -> None:
    pytest.importorskip("triton")
    b, c, h, w, out, size, stride, padding = case
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(b, c, h, w, generator=draw, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(out, c, size, size, generator=draw)
    y = F.conv2d(x, weight.double(), None, stride, padding)
    dy = torch.randn(y.shape, generator=draw)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ours = input_gradient(dy.to(device), weight.to(device), x.shape, stride, padding)
    assert ours.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(ours.cpu().double(), torch.autograd.grad(y, x, dy.double())[0], rtol=1e-4, atol=1e-4)


def test_nothing_is_read_outside_the_map() -> None:
    """Memory around the map is not a number; what lies outside counts as zero."""
    whole = torch.full((3, 10, 10, 4), torch.nan)
    whole[1, 2:8, 2:8] = 1.0
    x = whole[1:2, 2:8, 2:8].permute(0, 3, 1, 2)
    weight = torch.ones(2, 4, 3, 3)
    torch.testing.assert_close(convolve(x, weight, None, 2, 1), F.conv2d(x.contiguous(), weight, None, 2, 1))


@pytest.mark.parametrize(("size", "stride", "padding"), [(3, 2, 1), (5, 4, 1), (3, 1, 1), (2, 1, 1)])
@pytest.mark.parametrize("with_bias", [True, False])
def test_a_channel_of_ones_brings_the_bias(size: int, stride: int, padding: int, with_bias: bool) -> None:
    """(2, 1, 1): no place of the kernel is always inside the image."""
    layer = FirstConv2d(3, 6, size, stride=stride, padding=padding, bias=with_bias).double()
    for shape in ((2, 3, 9, 8), (1, 3, 5, 5), (1, 3, 6, 7)):
        x = torch.randn(shape, dtype=torch.float64).to(memory_format=torch.channels_last).requires_grad_()
        leaves = [x, *layer.parameters()]
        padded, plain = layer.convolve_padded(x, layer.weight, 5), layer(x)
        assert padded.is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(padded, plain)
        dy = torch.randn_like(plain)
        for found, wanted in zip(
            torch.autograd.grad(padded, leaves, dy), torch.autograd.grad(plain, leaves, dy), strict=True
        ):
            torch.testing.assert_close(found, wanted)


@pytest.mark.gpu
def test_padding_of_channels_changes_nothing() -> None:
    torch.manual_seed(0)
    layer = FirstConv2d(3, 48, 3, stride=2, padding=1).cuda()
    x = torch.randn(4, 3, 32, 32, device="cuda").to(memory_format=torch.channels_last)
    with torch.autocast("cuda", torch.bfloat16):
        y = layer(x)
    exact = F.conv2d(x.double(), layer.weight.double(), layer.bias.double(), 2, 1)  # type: ignore[union-attr]
    assert y.dtype == torch.bfloat16
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert (y.double() - exact).norm() <= 1e-2 * exact.norm()
    torch.testing.assert_close(layer(x), F.conv2d(x, layer.weight, layer.bias, 2, 1))


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("size", [1, 3, 5])
def test_a_depthwise_gradient_is_a_convolution(size: int, with_bias: bool) -> None:
    conv = DepthwiseConv2d(6, size, bias=with_bias).double()
    x = torch.randn(2, 6, 7, 4, dtype=torch.float64).to(memory_format=torch.channels_last).requires_grad_()
    leaves = [x, *conv.parameters()]
    plain, ours = conv(x), _Depthwise.apply(x, conv.weight, conv.bias)  # type: ignore[no-untyped-call]
    dy = torch.randn_like(plain)
    for found, wanted in zip(
        torch.autograd.grad(ours, leaves, dy), torch.autograd.grad(plain, leaves, dy), strict=True
    ):
        torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(ours, plain)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_depthwise_gradient_on_a_gpu(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    conv = DepthwiseConv2d(32, 3, bias=False).cuda()
    x = torch.randn(3, 32, 14, 14, device="cuda").to(memory_format=torch.channels_last).requires_grad_()
    dy, found = torch.randn(3, 32, 14, 14, device="cuda"), []
    for least in (0, 1 << 30):  # by the convolution with the turned weight, by the library
        monkeypatch.setattr(convolution, "MIN_ELEMENTS", least)
        with float32_only(torch.device("cuda")), torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
            y = conv(x)
            found.append(torch.autograd.grad(y, [x, conv.weight], dy.to(y.dtype)))
    for mine, theirs in zip(*found, strict=True):
        assert mine.dtype == theirs.dtype
        assert (mine - theirs).norm() <= (1e-5 if dtype == torch.float32 else 1e-2) * theirs.norm()


STAGES = [
    pytest.param((16, c, side, side), 3, marks=pytest.mark.gpu)
    for c, side in ((384, 56), (768, 28), (1536, 14), (3072, 7))
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize(("shape", "size"), [((2, 5, 3, 7), 3), ((1, 70, 5, 18), 3), ((2, 3, 9, 2), 5), *STAGES])
@pytest.mark.usefixtures("nan_empty")
def test_a_shortcut_and_gelu_in_one_kernel(
    shape: tuple[int, ...], size: int, with_bias: bool, dtype: torch.dtype
) -> None:
    device, draw = "cuda" if torch.cuda.is_available() else "cpu", torch.Generator().manual_seed(0)
    conv = DepthwiseConv2d(shape[1], size, bias=with_bias).to(device)
    with torch.no_grad():
        for parameter in conv.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=draw))
    x, dy = (torch.randn(shape, generator=draw).to(device, dtype, memory_format=torch.channels_last) for _ in range(2))
    results = []
    for layer, backend, wanted in ((conv, "triton", x), (copy.deepcopy(conv).double(), "reference", x.double())):
        leaf = wanted.detach().requires_grad_()
        y = layer.with_shortcut_and_gelu(leaf, backend)
        results.append([y, *torch.autograd.grad(y, [leaf, *layer.parameters()], dy.to(y.dtype))])
    for ours, plain in zip(*results, strict=True):
        assert (ours.double() - plain).norm() <= (3e-6 if dtype == torch.float32 else 2e-2) * plain.norm()
    assert results[0][0].dtype == dtype
    assert results[0][0].permute(0, 2, 3, 1).is_contiguous()
