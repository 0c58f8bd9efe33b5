"""Strided convolutions as a matrix product, against PyTorch's own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from trust_tta.bench.timing import float32_only
from trust_tta.methods.statistics import use_batch_statistics
from trust_tta.models import layers
from trust_tta.models.layers import make_stem
from trust_tta.ops import batch_norm as batch_norm_ops
from trust_tta.ops import convolution, functional
from trust_tta.ops.batch_norm import moments
from trust_tta.ops.convolution import (
    DepthwiseConv2d,
    FirstConv2d,
    StridedConv2d,
    _Depthwise,
    _Frozen,
    _PatchMatmul,
    bias_can_wait,
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


@pytest.mark.gpu
def test_channels_of_zeros_change_nothing() -> None:
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


@pytest.mark.parametrize("batch", [True, False], ids=["statistics-of-the-batch", "fixed"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_norm_takes_the_bias_before_it_along(device: str, batch: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In half precision, against the same layers in float64; on a CPU by Triton's interpreter."""
    if device == "cpu":
        pytest.importorskip("triton")
        for module, name in ((layers, "bias_can_wait"), (batch_norm_ops, "can_use_kernels")):
            monkeypatch.setattr(module, name, lambda *given: True)
    torch.manual_seed(0)
    stem: Any = make_stem(3, 32, 4, overlapping=True, norm="batch").to(device).eval().requires_grad_(False)
    for layer in (stem[2], stem[7]):
        layer.running_mean.normal_()
        layer.running_var.uniform_(0.5, 2)
        layer.weight.normal_()
        layer.bias.normal_()
        layer.weight.requires_grad_(batch)
    stem[0].bias.normal_(std=3)
    stem[5].bias.normal_(std=3)
    if batch:
        use_batch_statistics(stem)
    images = torch.randn(16 if device == "cuda" else 2, 3, *(2 * [224 if device == "cuda" else 16]), device=device)
    images = images.to(torch.bfloat16).to(memory_format=torch.channels_last)
    exact = copy.deepcopy(stem).double()
    added: list[int] = []
    monkeypatch.setattr(layers, "_add_bias", lambda x, bias: added.append(1))
    with torch.set_grad_enabled(batch):
        given = images if device == "cuda" else images.float()
        with torch.autocast("cuda", torch.bfloat16, enabled=device == "cuda"):
            found = stem(given)
        wanted = nn.Sequential(*exact)(images.double())
    assert not added
    error = 1e-5 if device == "cpu" else 2e-2
    assert (found.double() - wanted).norm() <= error * wanted.norm()
    if batch:
        dy = torch.randn_like(found)
        mine = torch.autograd.grad(found, [stem[2].weight, stem[7].weight], dy)
        theirs = torch.autograd.grad(wanted, [exact[2].weight, exact[7].weight], dy.double())
        for one, other in zip(mine, theirs, strict=True):
            assert (one.double() - other).norm() <= 3 * error * other.norm()


@pytest.mark.parametrize("batch", [True, False], ids=["statistics-of-the-batch", "fixed"])
def test_layers_go_on_from_the_first_convolution(batch: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the moments of its map where the norm after it needs them, which are then not taken again."""
    pytest.importorskip("triton")
    for module, name in ((layers, "bias_can_wait"), (batch_norm_ops, "can_use_kernels")):
        monkeypatch.setattr(module, name, lambda *given: True)
    torch.manual_seed(0)
    stem: Any = make_stem(3, 32, 4, overlapping=True, norm="batch").eval().requires_grad_(False)
    stem[0].bias.normal_(std=3)
    stem[2].running_mean.normal_()
    if batch:
        use_batch_statistics(stem)
    images = torch.randn(2, 3, 16, 16)
    wanted = stem(images)
    monkeypatch.setattr(stem[0], "before_bias", lambda x: F.conv2d(x, stem[0].weight, None, 2, 1))
    first, known = stem.forward_stem(images)
    if batch:
        variance, mean = torch.var_mean(first.double(), (0, 2, 3), correction=0)
        torch.testing.assert_close(known, (mean.float(), variance.float()), rtol=1e-5, atol=1e-6)
        monkeypatch.setattr(
            batch_norm_ops, "moments", lambda x: pytest.fail("taken again") if x is first else moments(x)
        )
    else:
        assert known is None
    torch.testing.assert_close(stem.finish(first, known), wanted, rtol=1e-4, atol=1e-4)


def test_a_bias_whose_gradient_is_wanted_is_added() -> None:
    conv = StridedConv2d(16, 8, 3, stride=2, padding=1)
    assert not bias_can_wait(conv, torch.randn(1, 16, 4, 4))  # on a CPU
    stem = make_stem(3, 32, 4, overlapping=True, norm="batch").eval()
    images = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(stem(images), nn.Sequential(*stem)(images))


@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.usefixtures("nan_empty")
def test_images_are_cast_and_padded_in_one_pass(dtype: torch.dtype, channels_last: bool) -> None:
    patches = pytest.importorskip("trust_tta.ops.triton.convolution")
    x = torch.randn(3, 3, 10, 14, generator=torch.Generator().manual_seed(0))
    x = x.to(memory_format=torch.channels_last) if channels_last else x[:, :, 1:, ::2]
    found = patches.pad_channels(x, 8, dtype)
    assert found.shape == (3, 8, *x.shape[2:])
    assert found.dtype == dtype
    assert found.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(found[:, :3].float(), x, rtol=2**-7, atol=0)  # the interpreter cuts bfloat16 off
    assert not found[:, 3:].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("shape", "size", "stride", "padding", "device"),
    [
        ((2, 3, 9, 13), 3, 2, 1, "cpu"),
        ((1, 1, 8, 8), 4, 4, 0, "cpu"),
        ((3, 2, 5, 7), 3, 1, 1, "cpu"),
        pytest.param((8, 3, 224, 224), 3, 2, 1, "cuda", marks=pytest.mark.gpu),
    ],
)
@pytest.mark.usefixtures("nan_empty")
def test_images_convolved_as_they_lie(
    shape: tuple[int, ...], size: int, stride: int, padding: int, device: str, dtype: torch.dtype
) -> None:
    patches = pytest.importorskip("trust_tta.ops.triton.convolution")
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=draw).to(device)
    weight = torch.randn(20, shape[1], size, size, generator=draw).to(device)
    exact = F.conv2d(x.double(), weight.double(), None, stride, padding)
    for each in (x, x.to(memory_format=torch.channels_last)):
        found = patches.convolve(each, weight, dtype, stride, padding)
        assert found.dtype == dtype
        assert found.is_contiguous(memory_format=torch.channels_last)
        assert (found.double() - exact).norm() <= 1e-2 * exact.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("shape", "out", "size", "stride", "padding", "device"),
    [
        ((2, 48, 9, 13), 96, 3, 2, 1, "cpu"),
        ((3, 16, 6, 6), 48, 2, 2, 0, "cpu"),
        ((1, 64, 5, 4), 32, 5, 3, 2, "cpu"),
        pytest.param((16, 48, 112, 112), 96, 3, 2, 1, "cuda", marks=pytest.mark.gpu),
        pytest.param((3, 32, 61, 58), 64, 3, 2, 1, "cuda", marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("narrow", [True, False], ids=["kernel", "library"])
@pytest.mark.usefixtures("nan_empty")
def test_a_map_convolved_by_a_frozen_weight(
    shape: tuple[int, ...],
    out: int,
    size: int,
    stride: int,
    padding: int,
    device: str,
    dtype: torch.dtype,
    narrow: bool,
) -> None:
    patches = pytest.importorskip("trust_tta.ops.triton.convolution")
    assert patches.takes_narrow(shape[1], out)
    draw, last = torch.Generator().manual_seed(0), torch.channels_last
    x = torch.randn(shape, generator=draw).to(device, dtype).to(memory_format=last).requires_grad_()
    weight = torch.randn(out, shape[1], size, size, generator=draw).to(device, dtype).to(memory_format=last)
    found = _Frozen.apply(x, weight, stride, padding, narrow)  # type: ignore[no-untyped-call]
    assert found.dtype == dtype
    assert found.is_contiguous(memory_format=last)
    leaf = x.detach().double().requires_grad_()
    exact = F.conv2d(leaf, weight.double(), None, stride, padding)
    assert (found.double() - exact).norm() <= 1e-2 * exact.norm()
    dy = torch.randn_like(found)
    (mine,), (wanted,) = torch.autograd.grad(found, x, dy), torch.autograd.grad(exact, leaf, dy.double())
    assert mine.is_contiguous(memory_format=last)
    assert (mine.double() - wanted).norm() <= 1e-2 * wanted.norm()


@pytest.mark.parametrize(
    ("channels", "out", "taken"),
    [
        (48, 96, True),
        (48, 80, True),
        (40, 96, False),
        (96, 192, False),
        (3, 48, False),
        (48, 16, False),
        (48, 88, False),
    ],
)
def test_which_maps_the_kernel_takes(channels: int, out: int, taken: bool) -> None:
    patches = pytest.importorskip("trust_tta.ops.triton.convolution")
    assert patches.takes_narrow(channels, out) == taken


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
    monkeypatch.setattr(convolution, "MIN_ELEMENTS", 0)
    conv = DepthwiseConv2d(32, 3, bias=False).cuda()
    x = torch.randn(3, 32, 14, 14, device="cuda").to(memory_format=torch.channels_last).requires_grad_()
    dy, found = torch.randn(3, 32, 14, 14, device="cuda"), []
    for used in (functional.USED, frozenset()):
        monkeypatch.setattr(functional, "USED", used)
        with float32_only(torch.device("cuda")), torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
            y = conv(x)
            found.append(torch.autograd.grad(y, [x, conv.weight], dy.to(y.dtype)))
    for mine, theirs in zip(*found, strict=True):
        assert mine.dtype == theirs.dtype
        assert (mine - theirs).norm() <= (1e-5 if dtype == torch.float32 else 1e-2) * theirs.norm()
