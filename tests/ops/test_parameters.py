"""Parameters gathered by one kernel, and their gradients by one more, against plain indexing and its derivative."""

from __future__ import annotations

import pytest
import torch

from trust_tta.ops import reference
from trust_tta.ops.tensors import Gathered, Parameters

pytest.importorskip("triton")

from trust_tta.ops.triton import ss2d_parameters as kernels  # noqa: E402
from trust_tta.ops.triton.backward import PartialSums  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ORDERS = {
    "in-order": [0, 1, 2, 3],
    "permuted": [2, 0, 3, 1],
    "repeated": [1, 3, 1, 1],
    "per-image": [[3, 2, 1, 0], [0, 0, 0, 2], [2, 0, 3, 1]],
}


def make_parameters(c: int, rank: int, state: int, dtype: torch.dtype = torch.float32) -> Parameters:
    draw = torch.Generator().manual_seed(c + rank)
    shapes = ((4, rank + 2 * state, c), (4, c, rank), (4, c), (4 * c, state), (4 * c,))
    return Parameters(*(torch.randn(shape, generator=draw).to(DEVICE, dtype) for shape in shapes))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("c", "rank", "state"), [(5, 3, 1), (96, 6, 1), (20, 12, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.usefixtures("nan_empty")
def test_gather_equals_indexing(c: int, rank: int, state: int, order: str, dtype: torch.dtype) -> None:
    directions = torch.tensor(ORDERS[order], device=DEVICE)
    parameters = make_parameters(c, rank, state)
    gathered = kernels.gather(parameters, directions, dtype)
    for got, wanted in zip(gathered, reference.gather(parameters, directions, dtype), strict=True):
        assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
        # Triton's interpreter cuts off what bfloat16 does not hold instead of rounding it.
        torch.testing.assert_close(got, wanted, rtol=2**-7 if got.dtype == torch.bfloat16 else 2e-6, atol=0)


def test_gather_casts_parameters_of_half_precision_to_float32() -> None:
    directions = torch.tensor([1, 0, 3, 2], device=DEVICE)
    parameters = make_parameters(7, 3, 2, torch.bfloat16)
    for got, wanted in zip(
        kernels.gather(parameters, directions, torch.float32),
        reference.gather(parameters, directions, torch.float32),
        strict=True,
    ):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=0)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("c", "rank", "state"), [(5, 3, 1), (33, 6, 1), (4, 12, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("nan_empty")
def test_scatter_add_is_the_derivative_of_gather(c: int, rank: int, state: int, order: str, dtype: torch.dtype) -> None:
    """Images that share an order give any number of partial sums; a group that reads nothing gets zeros."""
    directions = torch.tensor(ORDERS[order], device=DEVICE)
    counts = [3] * 5 if directions.dim() == 2 else [5, 17, 19, 19, 19]
    draw = torch.Generator().manual_seed(7)
    leaves = Parameters(*(t.requires_grad_() for t in make_parameters(c, rank, state)))
    gathered = reference.gather(leaves, directions, torch.float32)
    shapes = [(count, *t.shape[directions.dim() - 1 :]) for count, t in zip(counts, gathered, strict=True)]
    partial = [torch.randn(s, generator=draw).to(DEVICE) for s in shapes]
    dx_proj, ddt_proj = (t.to(dtype) for t in partial[:2])
    # The scan has one gradient of D for both directions.
    dA, dD, dbias = partial[2], partial[3][:, :, :1].expand_as(partial[3]), partial[4]
    unused = torch.empty(0)
    scan = PartialSums(A=dA, B=unused, C=unused, D=dD[:, :, 0].contiguous(), delta_bias=dbias)
    detached = Gathered(*(t.detach() for t in gathered))
    scattered = kernels.scatter_add(directions, detached, dx_proj, ddt_proj, scan)
    exact = [t.float() if directions.dim() == 2 else t.float().sum(0) for t in (dx_proj, ddt_proj, dA, dD, dbias)]
    for got, wanted in zip(scattered, torch.autograd.grad(gathered, leaves, exact), strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("order", ORDERS)
def test_plain_scatter_add_is_the_derivative_of_gather(order: str) -> None:
    directions = torch.tensor(ORDERS[order])
    leaves = Parameters(*(t.cpu().double().requires_grad_() for t in make_parameters(5, 3, 2)))
    gathered = reference.gather(leaves, directions, torch.float64)
    draw = torch.Generator().manual_seed(8)
    gradients = [torch.randn(t.shape, generator=draw, dtype=torch.float64) for t in gathered]
    dx_proj, ddt_proj, dA, dD, dbias = gradients
    shapes = gathered.parameter_shapes()
    sources = (dx_proj, ddt_proj, dbias, dA * gathered[2].detach(), dD)
    for leaf, source, shape, wanted in zip(
        leaves, sources, shapes, torch.autograd.grad(gathered, leaves, gradients), strict=True
    ):
        assert leaf.shape == shape
        torch.testing.assert_close(reference.scatter_add(source, directions, shape, torch.float64), wanted)
