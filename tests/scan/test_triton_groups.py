"""The parameters moved by one kernel, and their gradients by one more, against plain indexing and its derivative."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from trust_tta.scan import groups

pytest.importorskip("triton")

from trust_tta.scan import triton_groups  # noqa: E402
from trust_tta.scan.triton_scan import Parts  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ORDERS = {
    "in-order": [0, 1, 2, 3],
    "permuted": [2, 0, 3, 1],
    "repeated": [1, 3, 1, 1],
    "own": [[3, 2, 1, 0], [0, 0, 0, 2], [2, 0, 3, 1]],
}


def make_parameters(c: int, rank: int, state: int, dtype: torch.dtype = torch.float32) -> groups.Five:
    draw = torch.Generator().manual_seed(c + rank)
    shapes = ((4, rank + 2 * state, c), (4, c, rank), (4, c), (4 * c, state), (4 * c,))
    return five(torch.randn(shape, generator=draw).to(DEVICE, dtype) for shape in shapes)


def five(tensors: Iterable[Tensor]) -> groups.Five:
    a, b, c, d, e = tensors
    return a, b, c, d, e


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("c", "rank", "state"), [(5, 3, 1), (96, 6, 1), (20, 12, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.usefixtures("nan_empty")
def test_take_equals_indexing(c: int, rank: int, state: int, order: str, dtype: torch.dtype) -> None:
    slots = torch.tensor(ORDERS[order], device=DEVICE)
    parameters = make_parameters(c, rank, state)
    taken = triton_groups.take(dtype, slots, parameters)
    for got, wanted in zip(taken, groups.take(dtype, slots, parameters), strict=True):
        assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
        # Triton's interpreter cuts off what bfloat16 does not hold instead of rounding it.
        torch.testing.assert_close(got, wanted, rtol=2**-7 if got.dtype == torch.bfloat16 else 2e-6, atol=0)


def test_take_widens_parameters_of_half_precision() -> None:
    slots = torch.tensor([1, 0, 3, 2], device=DEVICE)
    parameters = make_parameters(7, 3, 2, torch.bfloat16)
    for got, wanted in zip(
        triton_groups.take(torch.float32, slots, parameters),
        groups.take(torch.float32, slots, parameters),
        strict=True,
    ):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=0)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("c", "rank", "state"), [(5, 3, 1), (33, 6, 1), (4, 12, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("nan_empty")
def test_give_is_the_derivative_of_take(c: int, rank: int, state: int, order: str, dtype: torch.dtype) -> None:
    """Where images share an order their gradients come in any parts; a group that nobody names gets zeros."""
    slots = torch.tensor(ORDERS[order], device=DEVICE)
    counts = [3] * 5 if slots.dim() == 2 else [5, 17, 19, 19, 19]
    draw = torch.Generator().manual_seed(7)
    leaves = five(t.requires_grad_() for t in make_parameters(c, rank, state))
    taken = groups.take(torch.float32, slots, leaves)
    shapes = [(count, *t.shape[slots.dim() - 1 :]) for count, t in zip(counts, taken, strict=True)]
    parts = [torch.randn(s, generator=draw).to(DEVICE) for s in shapes]
    dproject, dwiden = (t.to(dtype) for t in parts[:2])
    # The scan has one gradient of D for both directions.
    dA, dD, dbias = parts[2], parts[3][:, :, :1].expand_as(parts[3]), parts[4]
    unused = torch.empty(0)
    scan = Parts(A=dA, B=unused, C=unused, D=dD[:, :, 0].contiguous(), bias=dbias)
    project, widen, A, D, bias = (t.detach() for t in taken)
    given = triton_groups.give(slots, (project, widen, A, D, bias), dproject, dwiden, scan)
    exact = [t.float() if slots.dim() == 2 else t.float().sum(0) for t in (dproject, dwiden, dA, dD, dbias)]
    for got, wanted in zip(given, torch.autograd.grad(taken, leaves, exact), strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("order", ORDERS)
def test_plain_give_is_the_derivative_of_take(order: str) -> None:
    slots = torch.tensor(ORDERS[order])
    leaves = five(t.cpu().double().requires_grad_() for t in make_parameters(5, 3, 2))
    taken = groups.take(torch.float64, slots, leaves)
    draw = torch.Generator().manual_seed(8)
    gradients = [torch.randn(t.shape, generator=draw, dtype=torch.float64) for t in taken]
    dproject, dwiden, dA, dD, dbias = gradients
    shapes = groups.parameter_shapes(*taken[:3])
    sources = (dproject, dwiden, dbias, dA * taken[2].detach(), dD)
    for leaf, source, shape, wanted in zip(
        leaves, sources, shapes, torch.autograd.grad(taken, leaves, gradients), strict=True
    ):
        assert leaf.shape == shape
        torch.testing.assert_close(groups.give(slots, source, shape, torch.float64), wanted)
