"""Batch normalization by kernels against PyTorch's in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("triton")

from trust_tta.methods.statistics import Statistics  # noqa: E402
from trust_tta.methods.stream_norm import StreamNorm  # noqa: E402
from trust_tta.ops import batch_norm as batch_norm_ops  # noqa: E402
from trust_tta.ops.batch_norm import BatchNorm2d, batch_norm, moments, norm_with_residual  # noqa: E402
from trust_tta.ops.triton import batch_norm as triton_norm  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 1e-2}
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
SHAPES = [(1, 3, 1, 1), (2, 20, 5, 3), (3, 48, 9, 9), (2, 96, 14, 14)]


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def maps(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return (3 * normal(*shape, seed=seed) + 5).to(dtype).to(memory_format=torch.channels_last)


def differ(ours: Tensor, exact: Tensor, dtype: torch.dtype) -> bool:
    return bool((ours.double() - exact).norm() > TOLERANCES[dtype] * exact.norm() + 1e-6)


@DTYPES
@pytest.mark.parametrize("shape", SHAPES[1:], ids=str)
@pytest.mark.parametrize("programs", [1, 1056])
@pytest.mark.parametrize("way", ["several-kernels", "one-kernel"])
@pytest.mark.usefixtures("nan_empty")
def test_by_the_statistics_of_the_batch(
    shape: tuple[int, ...], programs: int, dtype: torch.dtype, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The values, both gradients of the map at once, and those of the weights; over several blocks and over one."""
    monkeypatch.setattr(batch_norm_ops, "is_small", lambda x: way == "one-kernel")
    monkeypatch.setattr(triton_norm, "PROGRAMS", programs)
    monkeypatch.setattr(triton_norm, "ELEMENTS", 512)
    x, weight, bias = maps(*shape, seed=0, dtype=dtype), normal(shape[1], seed=1), normal(shape[1], seed=2)
    dx, dy = (maps(*shape, seed=seed, dtype=dtype) - 5 for seed in (3, 4))
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    same, y = batch_norm(x, weight, bias, 1e-5)
    wanted = F.batch_norm(exact[0], None, None, exact[1], exact[2], training=True)
    assert torch.equal(same, x)
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert not differ(y, wanted, dtype)
    found = torch.autograd.grad((same, y), leaves, (dx, dy))
    for mine, theirs in zip(
        found, torch.autograd.grad((exact[0] * 1, wanted), exact, (dx.double(), dy.double())), strict=True
    ):
        assert not differ(mine, theirs, dtype)


@DTYPES
def test_one_of_the_two_outputs_is_enough(dtype: torch.dtype) -> None:
    x, weight, bias = maps(2, 16, 3, 3, seed=0, dtype=dtype).requires_grad_(), normal(16, seed=1), normal(16, seed=2)
    dy = maps(2, 16, 3, 3, seed=3, dtype=dtype)
    same, _ = batch_norm(x, weight, bias, 1e-5)
    assert torch.equal(torch.autograd.grad(same, x, dy)[0], dy)
    exact = x.detach().double().requires_grad_()
    wanted = torch.autograd.grad(
        F.batch_norm(exact, None, None, weight.double(), bias.double(), training=True), exact, dy.double()
    )
    assert not differ(torch.autograd.grad(batch_norm(x, weight, bias, 1e-5)[1], x, dy)[0], wanted[0], dtype)


@pytest.mark.parametrize("shape", [(2, 16, 6, 6), (1, 16, 1, 1)], ids=str)
def test_a_gradient_that_repeats_its_numbers(shape: tuple[int, ...]) -> None:
    """As that of a sum does: its rows are not where their strides would be in a map."""
    x = maps(*shape, seed=0, dtype=torch.float32).requires_grad_()
    weight, bias = normal(16, seed=1).requires_grad_(), normal(16, seed=2).requires_grad_()
    dx, dy = (normal(*size, seed=seed).expand(shape) for seed, size in ((3, (1, 16, 1, 1)), (4, (1, 1, 1, 1))))
    found = torch.autograd.grad(batch_norm(x, weight, bias, 1e-5), [x, weight, bias], (dx, dy))
    wanted = torch.autograd.grad(batch_norm(x, weight, bias, 1e-5), [x, weight, bias], (dx.clone(), dy.clone()))
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[2], dy.sum((0, 2, 3)))


def test_moments_far_from_zero_do_not_cancel() -> None:
    x = (normal(4, 32, 8, 8, seed=0) + 1e4).to(memory_format=torch.channels_last)
    mean, variance = triton_norm.moments(x.permute(0, 2, 3, 1).reshape(-1, 32))
    exact = x.double().var(dim=(0, 2, 3), correction=0)
    torch.testing.assert_close(variance.double(), exact, rtol=1e-4, atol=0)
    torch.testing.assert_close(moments(x)[1].double(), exact, rtol=1e-4, atol=0)
    torch.testing.assert_close(mean.double(), x.double().mean((0, 2, 3)), rtol=1e-6, atol=0)


def test_on_a_cpu_it_is_the_plain_layer() -> None:
    ours, plain = BatchNorm2d(4), nn.BatchNorm2d(4)
    x = torch.randn(3, 4, 5, 5)
    for norm in (ours, plain):
        norm.running_mean = torch.arange(4.0)
    for mode in (True, False):
        assert torch.equal(ours.train(mode)(x), plain.train(mode)(x))
    same, normal_x = norm_with_residual(ours, x)
    assert same is x
    assert torch.equal(normal_x, plain(x))


@pytest.mark.gpu
@pytest.mark.parametrize("low", [False, True], ids=["float32", "bf16"])
@pytest.mark.parametrize("channels", [48, 96, 384, 768])
def test_norms_of_a_network(channels: int, low: bool) -> None:
    """As PyTorch's on the device, under statistics of the batch and under fixed ones."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if low else torch.float32
    norm, side = BatchNorm2d(channels).cuda(), max(7, 56 * 96 // channels)
    x = torch.randn(32, channels, side, side, device="cuda", dtype=dtype).to(memory_format=torch.channels_last) * 2 + 1
    norm.running_mean, norm.running_var = torch.randn(channels).cuda(), torch.rand(channels).cuda() + 0.5
    with torch.no_grad():
        norm.weight.normal_()
        norm.bias.normal_()
        norm.eval()
        assert norm.uses_kernels(x)
        wanted = F.batch_norm(
            x.double(), norm.running_mean.double(), norm.running_var.double(), norm.weight.double(), norm.bias.double()
        )
        assert not differ(norm(x), wanted, dtype)
    norm.running_mean = norm.running_var = None
    exact = [t.detach().double().requires_grad_() for t in (x, norm.weight, norm.bias)]
    wanted = F.batch_norm(exact[0], None, None, exact[1], exact[2], training=True)
    leaf, dy = x.detach().requires_grad_(), torch.randn_like(x)
    same, y = norm_with_residual(norm, leaf)
    assert norm.uses_kernels(leaf)
    assert not differ(y, wanted, dtype)
    found = torch.autograd.grad((same, y), (leaf, norm.weight, norm.bias), (dy, dy))
    for mine, theirs in zip(
        found, torch.autograd.grad((exact[0] * 1, wanted), exact, (dy.double(), dy.double())), strict=True
    ):
        assert not differ(mine, theirs, dtype)


@pytest.mark.parametrize("mix_source", [False, True], ids=["alone", "with-the-source"])
@pytest.mark.usefixtures("nan_empty")
def test_statistics_of_a_stream(mix_source: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values, memory, and the gradients of the map and the weights, against the plain formulas."""
    x = maps(6, 20, 5, 3, seed=0, dtype=torch.float32)
    dy, found = normal(*x.shape, seed=1), []
    for by_kernels in (False, True):
        model = nn.Sequential(*(BatchNorm2d(20) for _ in range(3))).to(DEVICE)
        with torch.no_grad():
            for place, tensor in enumerate((*model.parameters(), *(b for b in model.buffers() if b.dim()))):
                tensor.copy_(normal(20, seed=place).abs() + 0.1)
        statistics = Statistics(model, "stream", mix_source=mix_source)
        norm = statistics.norms["1"]
        monkeypatch.setattr(StreamNorm, "uses_kernels", lambda self, x, used=by_kernels: used)
        statistics.start_batch(x)
        norm(1 + x / 2)
        statistics.start_batch(x)
        image = x.clone().requires_grad_()
        same, y = norm_with_residual(norm, image)
        state = [getattr(norm, name).clone() for name in norm.STATE]
        norm(x * 2)  # another pass before the backward
        gradients = torch.autograd.grad((same * 1, y), [image, norm.weight, norm.bias], (dy, dy))
        found.append([y, *state, norm.mean, norm.variance, norm.images, *gradients])
    assert 0.2 < float(found[0][5]) < 0.98 or not mix_source
    for plain, mine in zip(*found, strict=True):
        torch.testing.assert_close(mine, plain, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("way", ["several-kernels", "one-kernel"])
def test_output_may_be_modified_in_place(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Residual networks do `out = norm(x); out += identity; relu_(out)`."""
    monkeypatch.setattr(batch_norm_ops, "is_small", lambda x: way == "one-kernel")
    x, identity = (maps(2, 20, 5, 3, seed=seed, dtype=torch.float32) - 5 for seed in (0, 1))
    weight, bias = normal(20, seed=2), normal(20, seed=3)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    out = batch_norm(x, weight, bias, 1e-5)[1]
    out += identity
    out.relu_()
    wanted = F.relu(F.batch_norm(exact[0], None, None, exact[1], exact[2], training=True) + identity.double())
    assert not differ(out.detach(), wanted.detach(), torch.float32)
    upstream = normal(*out.shape, seed=4)
    for mine, theirs in zip(
        torch.autograd.grad(out, leaves, upstream), torch.autograd.grad(wanted, exact, upstream.double()), strict=True
    ):
        assert not differ(mine, theirs, torch.float32)
