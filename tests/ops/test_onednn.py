"""Linear layers by oneDNN against PyTorch's in float64: values and every gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from trust_tta.models.layers import Linear2d, Mlp
from trust_tta.ops.cpu import onednn
from trust_tta.ops.cpu.onednn import SPAN, gelu_and_slope


@pytest.mark.skipif(not onednn.AVAILABLE, reason="PyTorch was built without oneDNN")
@pytest.mark.parametrize("learned", [range(6), (0, 5), (0,), (1, 2), (3, 4)], ids=str)
@pytest.mark.usefixtures("nan_empty")
def test_layers_by_onednn(learned: Sequence[int]) -> None:
    """Value and gradients of a layer and of an MLP, each with its residual, of those that are learned."""
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw)

    x, residual = normal(3, 4, 5, 24), normal(3, 4, 5, 24)
    given = [x, *(normal(*shape) / 5 for shape in ((40, 24), (40,), (24, 40), (24,))), residual]
    for i, tensor in enumerate(given):
        tensor.requires_grad_(i in learned)

    def plain(x: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor, residual: Tensor) -> Tensor:
        return residual + F.linear(F.gelu(F.linear(x, weight1, bias1)), weight2, bias2)

    def square(x: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor, residual: Tensor) -> Tensor:
        return onednn.linear(F.gelu(onednn.linear(x, weight1, bias1)), weight2, bias2, residual)

    leaves = [given[i] for i in learned]
    exact = [t.detach().double().requires_grad_(t.requires_grad) for t in given]
    wanted = plain(*exact)
    theirs = torch.autograd.grad(wanted, [exact[i] for i in learned], torch.cos(wanted.detach()))
    for ours in (onednn.mlp, square):
        found = ours(*given)
        mine = torch.autograd.grad(found, leaves, torch.cos(wanted.detach()).float())
        for one, other in zip([found, *mine], [wanted, *theirs], strict=True):
            assert (one.double() - other).norm() <= 1e-6 * other.norm()
        with torch.no_grad():
            torch.testing.assert_close(ours(*given), found)


@pytest.mark.parametrize("size", [1, 1000, 3 * SPAN + 5])
def test_gelu_and_its_slope(size: int) -> None:
    """No farther from GELU in float64 than PyTorch's own; the tails as well, and what is not a number."""
    x = torch.linspace(-16, 16, size)
    exact = x.double().requires_grad_()
    wanted = F.gelu(exact)
    (slope,) = torch.autograd.grad(wanted.sum(), exact)
    wanted = wanted.detach()
    given, found = x.clone(), torch.empty_like(x)
    gelu_and_slope(given, found)
    allowed = max(float((F.gelu(x) - wanted).abs().max()), 1e-6)
    assert float((found - wanted).abs().max()) <= allowed
    assert float((given - slope).abs().max()) <= 1e-6
    given = torch.tensor([torch.nan])
    gelu_and_slope(given, found := torch.zeros(1))
    assert given.isnan().all()
    assert found.isnan().all()


def test_large_float32_products_alone_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.randn(2, 3, 3, 8), torch.randn(4, 8)
    assert not onednn.takes(x, weight)
    monkeypatch.setattr(onednn, "MIN_ELEMENTS", 1)
    assert onednn.takes(x, weight) == onednn.AVAILABLE
    assert not onednn.takes(x.double(), weight.double())
    assert not onednn.takes(x.transpose(1, 3), torch.randn(4, 3))
    with torch.autocast("cpu", torch.bfloat16):
        assert not onednn.takes(x, weight)
    monkeypatch.setattr(torch._C, "_get_mkldnn_enabled", lambda: False)  # as the caller's flag says
    assert not onednn.takes(x, weight)


@pytest.mark.parametrize("make", [lambda: Linear2d(8, 8), lambda: Mlp(8, 32)], ids=["linear", "mlp"])
def test_layers_of_a_network(make: Callable[[], Linear2d | Mlp], monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain with the reference's backend and where the inside is watched."""
    monkeypatch.setattr(onednn, "MIN_ELEMENTS", 1)
    calls: list[int] = []
    product = onednn._product
    monkeypatch.setattr(onednn, "_product", lambda *given: calls.append(1) or product(*given))  # type: ignore[func-returns-value]
    layer, x = make(), torch.randn(2, 8, 3, 3).to(memory_format=torch.channels_last)
    found = layer(x, x)
    assert bool(calls) == onednn.AVAILABLE
    for module in layer.modules():
        module.backend = "reference"  # type: ignore[assignment]
    calls.clear()
    torch.testing.assert_close(found, layer(x, x))
    assert not calls
