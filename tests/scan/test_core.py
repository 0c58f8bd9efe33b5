"""The heart of SS2D as operators: values and every gradient against plain differentiable code, and torch's rules."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from trust_tta.scan import core
from trust_tta.scan.selective_scan import join_norm, scan_map

BACKENDS = ["cpu", "triton"]
SHAPES = [(2, 5, 7, 9), (3, 8, 4, 4), (1, 3, 17, 11)]


def make_weights(b: int, c: int, *, rank: int = 2, state: int = 2, own: bool = False) -> list[Tensor]:
    """project, widen, A, D, bias; `own`: one set for each of the b images."""
    draw = torch.Generator().manual_seed(1)
    lead = (b,) if own else ()

    def normal(*shape: int) -> Tensor:
        return torch.randn(*lead, *shape, generator=draw)

    project, widen = normal(2, 2 * (rank + 2 * state), c) / c**0.5, normal(2, 2, c, rank)
    A = -torch.rand(*lead, 2, 2, c, state, generator=draw) - 0.1
    return [project, widen, A, normal(2, 2, c), normal(2, 2, c) - 2]


def make_case(shape: Sequence[int], *, own: bool = False, state: int = 2) -> list[Tensor]:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(memory_format=torch.channels_last)
    return [x, *make_weights(shape[0], shape[1], own=own, state=state)]


def results(backend: str, case: list[Tensor]) -> list[Tensor]:
    """y and the gradients of all inputs under a fixed direction."""
    leaves = [t.detach().clone().requires_grad_() for t in case]
    y = scan_map(*leaves, backend=backend)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(2))
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("own", [False, True], ids=["shared", "own-weights"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.usefixtures("nan_empty")
def test_scan_map_equals_plain_code(shape: tuple[int, ...], own: bool, backend: str) -> None:
    case = make_case(shape, own=own)
    for got, wanted in zip(results(backend, case), results("reference", case), strict=True):
        torch.testing.assert_close(got, wanted, rtol=2e-5, atol=2e-5 * float(wanted.abs().max()))


@pytest.mark.parametrize("backend", BACKENDS)
def test_frozen_weights_change_nothing_else(backend: str) -> None:
    case = make_case((2, 5, 7, 9))
    x = case[0].clone().requires_grad_()
    y = scan_map(x, *case[1:], backend=backend)
    (dx,) = torch.autograd.grad(y, x, torch.randn(y.shape, generator=torch.Generator().manual_seed(2)))
    torch.testing.assert_close(dx, results("reference", case)[1], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("learning", [True, False], ids=["learning", "frozen"])
def test_join_norm_equals_plain_code(learning: bool, backend: str) -> None:
    draw = torch.Generator().manual_seed(4)
    y = torch.randn(2, 2, 40, 35, generator=draw, requires_grad=True)
    weight, bias = (torch.randn(40, generator=draw, requires_grad=learning) for _ in range(2))
    dnorm = torch.randn(2, 40, 5, 7, generator=draw)
    leaves = [y, weight, bias] if learning else [y]
    found = []
    for name in (backend, "reference"):
        normal = join_norm(y, 5, 7, weight, bias, 1e-5, backend=name)
        found.append([normal.detach(), *torch.autograd.grad(normal, leaves, dnorm)])
    for got, wanted in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_opcheck(dtype: torch.dtype) -> None:
    x, project, widen, *rest = make_case((2, 4, 3, 5))
    inputs = [t.to(dtype).requires_grad_() for t in (x, project, widen)] + [t.requires_grad_() for t in rest]
    torch.library.opcheck(core.scan_map, (*inputs, False))
    plain = [t.detach() for t in inputs]
    y, *kept = core.scan_map(*plain, False)
    for learning in (True, False):
        torch.library.opcheck(core.scan_map_backward, (torch.ones_like(y), *plain, *kept, learning, False))
    weight, bias = (torch.randn(4).to(dtype).requires_grad_() for _ in range(2))
    torch.library.opcheck(core.join_norm, (y.requires_grad_(), 3, 5, weight, bias, 1e-5, False))
    normal, *kept = core.join_norm(y.detach(), 3, 5, weight.detach(), bias.detach(), 1e-5, False)
    for learning in (True, False):
        inputs = [torch.ones_like(normal), *kept, weight.detach(), bias.detach()]
        torch.library.opcheck(core.join_norm_backward, (*inputs, learning, False))


def test_shapes_can_be_worked_out_without_values() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        case = [mode.from_tensor(t) for t in make_case((2, 5, 7, 9))]
        y = scan_map(*case)
        assert y.shape == (2, 2, 5, 63)
        assert join_norm(y, 7, 9, torch.ones(5), torch.ones(5), 1e-5).shape == (2, 5, 7, 9)


def test_a_gpu_keeps_neither_sequences_nor_steps() -> None:
    case = make_case((2, 5, 7, 9))
    for triton, kept in ((True, 0), (False, 2 * 2 * 5 * 63)):
        _, _, _, u, delta = core.scan_map(*case, triton)
        assert u.numel() == kept
        assert delta.numel() == 2 * kept


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("own", [False, True], ids=["shared", "own-weights"])
@pytest.mark.parametrize("shape", [(4, 96, 56, 56), (3, 40, 7, 9)], ids=str)
def test_on_the_gpu(shape: tuple[int, ...], own: bool, dtype: torch.dtype) -> None:
    case = [t.cuda() for t in make_case(shape, own=own, state=1)]
    found = []
    for backend, kind in (("triton", dtype), ("reference", torch.float32)):
        leaves = [t.detach().to(kind if i < 3 else torch.float32).requires_grad_() for i, t in enumerate(case)]
        y = scan_map(*leaves, backend=backend)
        weight = torch.ones(shape[1], device="cuda", requires_grad=True)
        normal = join_norm(y, shape[2], shape[3], weight, weight, 1e-5, backend=backend)
        direction = torch.randn(normal.shape, generator=torch.Generator().manual_seed(2)).cuda()
        gradients = torch.autograd.grad(normal, [*leaves, weight], direction.to(normal.dtype))
        found.append([t.float() for t in (normal.detach(), *gradients)])
    for got, wanted in zip(*found, strict=True):
        error = (got - wanted).norm() / wanted.norm()
        assert error < (1e-5 if dtype == torch.float32 else 3e-2)
