"""SS2D's scan of a map as operators: values and every gradient against plain differentiable code, and torch's rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.conftest import SetThreads
from trust_tta.ops import operators, reference
from trust_tta.ops.cpu.threads import SMALL
from trust_tta.ops.functional import merge_norm, scan_map
from trust_tta.ops.tensors import Parameters
from trust_tta.ops.triton.cross_scan_merge import cross_merge
from trust_tta.ops.triton.matmul import matmul

BACKENDS = ["cpu", "triton"]
SHAPES = [(2, 5, 7, 9), (3, 8, 4, 3)]


SLOTS = {"in-order": [0, 1, 2, 3], "permuted": [2, 0, 3, 1], "repeated": [1, 3, 1, 1]}


def make_parameters(c: int, *, rank: int = 2, state: int = 2) -> list[Tensor]:
    """x_proj_weight, dt_projs_weight, dt_projs_bias, A_logs and Ds."""
    draw = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    x_proj, dt = normal(4, rank + 2 * state, c) / c**0.5, normal(4, c, rank) / rank**0.5
    return [x_proj, dt, normal(4, c) - 2, normal(4 * c, state) / 2, normal(4 * c)]


def make_case(shape: Sequence[int], *, directions: str = "permuted", rank: int = 2, state: int = 2) -> list[Tensor]:
    """x, directions, and the five parameters; directions "per-image": an order of its own for each image."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(memory_format=torch.channels_last)
    rows = list(SLOTS.values()) * shape[0]
    order = rows[: shape[0]] if directions == "per-image" else SLOTS[directions]
    return [x, torch.tensor(order), *make_parameters(shape[1], rank=rank, state=state)]


def scan_and_merge(x: Tensor, directions: Tensor, parameters: Sequence[Tensor], backend: str) -> Tensor:
    """The scanned map (b, h, w, c)."""
    y = scan_map(x, directions, Parameters(*parameters), backend=backend)
    return y if backend == "cpu" else reference.cross_merge(y, *x.shape[2:]).permute(0, 2, 3, 1)


def results(backend: str, case: list[Tensor], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """y and the gradients of the map in `dtype` and the parameters, under a fixed direction."""
    x, directions, *parameters = case
    leaves = [t.detach().clone().requires_grad_() for t in (x.to(dtype), *parameters)]
    y = scan_and_merge(leaves[0], directions, leaves[1:], backend)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def errors(got: list[Tensor], wanted: list[Tensor]) -> list[float]:
    """Relative, by norm."""
    return [float((g.double() - w.double()).norm() / w.double().norm()) for g, w in zip(got, wanted, strict=True)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("directions", ["permuted", "repeated", "per-image"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.usefixtures("nan_empty")
def test_scan_map_equals_plain_code(shape: tuple[int, ...], directions: str, backend: str) -> None:
    case = make_case(shape, directions=directions)
    for got, wanted in zip(results(backend, case), results("reference", case), strict=True):
        torch.testing.assert_close(got, wanted, rtol=2e-5, atol=2e-5 * float(wanted.abs().max()))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_map_of_several_chunks_and_states(backend: str) -> None:
    case = make_case((1, 3, 17, 11), state=3)
    assert max(errors(results(backend, case), results("reference", case))) < 2e-5


@pytest.mark.parametrize(
    ("shape", "rank"),
    [((2, 64, 3, 3), 8), ((3, 96, 2, 5), 6), ((2, 150, 1, 1), 3), ((35, 70, 2, 3), 4)],
    ids=["one-tile", "narrow-tiles", "a-tile-not-full", "images-in-groups"],
)
@pytest.mark.parametrize("directions", ["permuted", "per-image"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.usefixtures("nan_empty")
def test_tiles_of_channels_and_groups_of_images(
    shape: tuple[int, ...], rank: int, directions: str, dtype: torch.dtype
) -> None:
    case = [t if i == 1 else t.to(dtype) for i, t in enumerate(make_case(shape, directions=directions, rank=rank))]
    precise = [t if i == 1 else t.double() for i, t in enumerate(case)]
    found = errors(results("cpu", case, dtype), results("reference", precise, torch.float64))
    assert max(found) < (2e-5 if dtype == torch.float32 else 1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("directions", ["permuted", "per-image"])
@pytest.mark.usefixtures("nan_empty")
def test_half_precision_is_near_plain_float32(directions: str, dtype: torch.dtype, backend: str) -> None:
    case = make_case((2, 21, 3, 5), directions=directions, rank=3, state=1)
    got = results(backend, case, dtype)
    assert [t.dtype for t in got] == [dtype] * 2 + [torch.float32] * 5
    # Triton's interpreter cuts off what bfloat16 does not hold instead of rounding it.
    assert max(errors(got, results("reference", case))) < (5e-2 if dtype == torch.bfloat16 else 3e-3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_parameters_of_half_precision_get_such_gradients(backend: str) -> None:
    x, directions, *parameters = make_case((2, 5, 4, 3))
    case = [x, directions, *(t.bfloat16() for t in parameters)]
    got = results(backend, case)
    assert [t.dtype for t in got] == [torch.float32] * 2 + [torch.bfloat16] * 5
    wanted = results("reference", [x, directions, *(t.float() for t in case[2:])])
    assert max(errors(got, wanted)) < 1e-2


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "learned",
    [pytest.param((), marks=pytest.mark.slow), (1, 2), (3, 4, 5), pytest.param((4,), marks=pytest.mark.slow)],
    ids=["none", "products", "scan", "A-alone"],
)
def test_frozen_parameters_change_nothing_else(learned: tuple[int, ...], backend: str) -> None:
    case = make_case((2, 5, 3, 5))
    x, *parameters = (t.clone().requires_grad_(i in (0, *learned)) for i, t in enumerate((case[0], *case[2:])))
    y = scan_and_merge(x, case[1], parameters, backend)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(2))
    got = torch.autograd.grad(y, [x, *(parameters[i - 1] for i in learned)], dy)
    wanted = results("reference", case)[1:]
    assert max(errors(list(got), [wanted[0], *(wanted[i] for i in learned)])) < 2e-5


def test_frozen_parameters_cost_nothing() -> None:
    for triton in (True, False):
        x, directions, *parameters = make_case((2, 3, 2, 3))
        y, *kept = operators.scan_map(x, directions, *parameters, triton)
        _, *five = operators.scan_map_backward(torch.ones_like(y), x, directions, *kept, False, True, triton)
        assert [t.numel() for t in five] == [0, 0, *(t.numel() for t in parameters[2:])]
        _, *five = operators.scan_map_backward(torch.ones_like(y), x, directions, *kept, True, False, triton)
        assert [t.numel() for t in five] == [*(t.numel() for t in parameters[:2]), 0, 0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_two_runs_agree_bit_for_bit(dtype: torch.dtype) -> None:
    case = make_case((2, 3, 3, 5), directions="per-image")
    for first, second in zip(*(results("triton", case, dtype) for _ in range(2)), strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("train", [True, False], ids=["train", "frozen"])
def test_merge_norm_equals_plain_code(train: bool, backend: str) -> None:
    draw = torch.Generator().manual_seed(4)
    y = torch.randn(2, 2, 40, 35, generator=draw, requires_grad=True)
    merged = reference.cross_merge(y, 5, 7).permute(0, 2, 3, 1)
    weight, bias = (torch.randn(40, generator=draw, requires_grad=train) for _ in range(2))
    dnorm = torch.randn(2, 40, 5, 7, generator=draw)
    leaves = [y, weight, bias] if train else [y]
    found = []
    for name in (backend, "reference"):
        normal = merge_norm(merged if name == "cpu" else y, 5, 7, weight, bias, 1e-5, backend=name)
        found.append([normal.detach(), *torch.autograd.grad(normal, leaves, dnorm)])
    for got, wanted in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_opcheck(dtype: torch.dtype) -> None:
    x, directions, *parameters = make_case((2, 4, 3, 5))
    x = x.to(dtype)
    torch.library.opcheck(
        operators.scan_map, (*(t.requires_grad_(t is not directions) for t in (x, directions, *parameters)), False)
    )
    x, *parameters = (t.detach() for t in (x, *parameters))
    y, *kept = operators.scan_map(x, directions, *parameters, False)
    for flags in ((True, True), (False, True), (False, False)):
        torch.library.opcheck(operators.scan_map_backward, (torch.ones_like(y), x, directions, *kept, *flags, False))


WIDE = [(2, 96, 5, 4), (1, 200, 3, 3), (9, 20, 1, 7), (3, 17, 6, 1)]


@pytest.mark.parametrize("directions", ["permuted", "per-image"])
@pytest.mark.parametrize(("rank", "state"), [(1, 1), (4, 1), (7, 3), (12, 1)])
@pytest.mark.parametrize("shape", WIDE, ids=str)
@pytest.mark.usefixtures("nan_empty")
def test_blocks_of_channels_and_ranks_on_a_cpu(shape: tuple[int, ...], rank: int, state: int, directions: str) -> None:
    case = make_case(shape, directions=directions, rank=rank, state=state)
    assert max(errors(results("cpu", case), results("reference", case))) < 2e-6
    exact = [t if t is case[1] else t.double() for t in case]
    assert max(errors(*(results(name, exact, torch.float64) for name in ("cpu", "reference")))) < 1e-12


def test_threads_change_no_bit(threads: SetThreads, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of our loops; PyTorch's products may add up in another order."""
    threads(1)
    case = make_case((2, 96, 14, 14))
    assert 4 * case[0].numel() >= SMALL
    found = []
    for count in (1, 2, 5):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=count: count)
        found.append(results("cpu", case))
    assert all(torch.equal(got, wanted) for other in found[1:] for got, wanted in zip(other, found[0], strict=True))


@pytest.mark.parametrize("index", [0, 2, 3, 4, 5, 6], ids=["x", *Parameters._fields])
@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
def test_what_is_not_finite_stays_visible(index: int, value: float) -> None:
    """A method refuses an update by looking at the loss and the gradients."""
    case = make_case((2, 5, 3, 4))
    case[index] = case[index].clone()
    case[index][(0,) * case[index].dim()] = value
    y, *gradients = results("cpu", case)
    wanted, *their = results("reference", case)
    assert not wanted.isfinite().all() or not all(t.isfinite().all() for t in their)
    assert not y.isfinite().all() or not all(t.isfinite().all() for t in gradients)


class Names(TorchDispatchMode):
    """The names of the operations that are called."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def test_the_backward_is_the_two_operators_alone() -> None:
    """No gradients of zeros for what is kept, nothing around the operators: each would be a launch a block."""
    x, directions, *parameters = make_case((2, 5, 3, 4))
    leaves = [t.requires_grad_() for t in (x, *parameters)]
    y = scan_map(leaves[0], directions, Parameters(*leaves[1:]), backend="triton")
    normal = merge_norm(y, 3, 4, torch.ones(5), torch.zeros(5), 1e-5, backend="triton")
    with Names() as names:
        torch.autograd.grad(normal, leaves, torch.ones_like(normal))
    views = {"aten::permute", "aten::detach", "aten::ones_like"}
    assert set(names.seen) - views == {"trust_tta::merge_norm_backward", "trust_tta::scan_map_backward"}


def test_shapes_can_be_worked_out_without_values() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        x, directions, *parameters = (mode.from_tensor(t) for t in make_case((2, 5, 7, 9)))
        y = scan_map(x, directions, Parameters(*parameters))
        assert y.shape == (2, 7, 9, 5)
        assert merge_norm(y, 7, 9, torch.ones(5), torch.ones(5), 1e-5).shape == (2, 5, 7, 9)


def test_a_gpu_keeps_no_sequences() -> None:
    case = make_case((2, 5, 7, 9))
    for triton, kept in ((True, 0), (False, 2 * 5 * 63)):
        _, _, _, u, *_ = operators.scan_map(*case, triton)
        assert u.numel() == kept


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("directions", ["permuted", "repeated", "per-image"])
@pytest.mark.parametrize(
    ("shape", "rank"),
    [((4, 96, 56, 56), 6), ((4, 384, 14, 14), 24), ((2, 768, 7, 7), 48), ((3, 40, 7, 9), 3)],
    ids=["first-stage", "third-stage", "last-stage", "odd"],
)
def test_on_the_gpu(shape: tuple[int, ...], rank: int, directions: str, dtype: torch.dtype) -> None:
    case = [t.cuda() for t in make_case(shape, directions=directions, rank=rank, state=1)]
    found = []
    for backend, kind in (("triton", dtype), ("reference", torch.float32)):
        x, *parameters = (t.detach().requires_grad_() for t in (case[0].to(kind), *case[2:]))
        y = scan_map(x, case[1], Parameters(*parameters), backend=backend)
        weight = torch.ones(shape[1], device="cuda", requires_grad=True)
        normal = merge_norm(y, shape[2], shape[3], weight, weight, 1e-5, backend=backend)
        direction = torch.randn(normal.shape, generator=torch.Generator().manual_seed(2)).cuda()
        gradients = torch.autograd.grad(normal, [x, *parameters, weight], direction.to(normal.dtype))
        found.append([normal.detach(), *gradients])
    assert max(errors(*found)) < (1e-5 if dtype == torch.float32 else 3e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_two_runs_on_the_gpu_agree_bit_for_bit(dtype: torch.dtype) -> None:
    case = [t.cuda() for t in make_case((16, 96, 28, 28), directions="per-image", rank=6, state=1)]
    x, *parameters = (t.requires_grad_() for t in (case[0].to(dtype), *case[2:]))
    runs = []
    for _ in range(2):
        y = scan_map(x, case[1], Parameters(*parameters), backend="triton")
        runs.append([y, *torch.autograd.grad(y, [x, *parameters], torch.ones_like(y))])
    assert all(torch.equal(first, second) for first, second in zip(*runs, strict=True))


STAGES = [
    pytest.param((8, c, side, side), rows, "cuda", marks=pytest.mark.gpu)
    for c, side, rows in ((96, 56, 16), (192, 28, 28), (384, 14, 52), (768, 7, 100))
]


@pytest.mark.parametrize("per_image", [False, True], ids=["shared", "per-image"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("shape", "rows", "device"), [((2, 20, 5, 9), 6, "cpu"), ((1, 40, 18, 3), 17, "cpu"), *STAGES])
@pytest.mark.usefixtures("nan_empty")
def test_the_gradient_of_the_map(
    shape: tuple[int, ...], rows: int, device: str, dtype: torch.dtype, per_image: bool
) -> None:
    """Through SiLU, the layout of both sequences, and their projection, against autograd in float64."""
    (b, c, h, w), draw = shape, torch.Generator().manual_seed(7)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=draw).to(device, dtype)

    x, du, drows = normal(b, h, w, c).permute(0, 3, 1, 2), normal(b, 2, c, h * w), normal(b, 2, rows, h * w)
    weight = normal(b, 2, rows, c) if per_image else normal(2, rows, c)
    exact = x.double().requires_grad_()
    sequences = reference.cross_scan(torch.nn.functional.silu(exact))
    outputs = (sequences, weight.double() @ sequences)
    (wanted,) = torch.autograd.grad(outputs, exact, (du.double(), drows.double()))
    matmul(weight.mT, drows, du, add=True)
    got = cross_merge(du, h, w, silu_of=x)
    assert got.permute(0, 2, 3, 1).is_contiguous()
    tolerance = 1e-2 if dtype == torch.bfloat16 else 2e-3  # the interpreter cuts bfloat16 off
    assert (got.double() - wanted).norm() <= tolerance * wanted.norm()
