"""Sequences out of maps and back, by kernels, against PyTorch's gather: values and every gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from trust_tta.models import efficientvmamba, msvmamba  # noqa: E402
from trust_tta.models.sequences import Route, visit  # noqa: E402
from trust_tta.ops.map_sequences import Paths, merge_map, read_map  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 1e-2}  # of the norm; the interpreter cuts bfloat16 off
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
SHAPES = [(2, 5, 3, 7), (3, 40, 9, 10), (1, 1, 1, 1), (2, 65, 17, 4)]
STAGES = [
    pytest.param((8, c, side, side), marks=pytest.mark.gpu) for c, side in ((96, 56), (192, 28), (384, 14), (768, 7))
]


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)
    return x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)


def make_paths(kind: str, shape: tuple[int, ...], *, per_image: bool) -> Paths:
    """The paths of a stage of MSVMamba ("joined") or EfficientVMamba ("quarters"), or four directions by windows."""
    batch, (height, width) = shape[0], shape[2:]
    rows = torch.tensor([[2, 0, 3, 1], [1, 2, 3, 0], [3, 3, 0, 1]], device=DEVICE)
    directions = rows[torch.arange(batch) % 3] if per_image else rows[0]
    x = torch.empty(shape, device=DEVICE)
    if kind == "joined":
        return msvmamba.MultiScaleStage([], None).paths(torch.empty(1, 1, 2 * height, 2 * width), directions.cpu())[1]
    if kind == "quarters":
        if per_image:
            directions = rows[:2][torch.arange(batch) % 2]  # each quarter once
        return efficientvmamba.AtrousStage([], None).paths(x, directions)
    visits = visit(("h_flip", "w2", "v", "w3_flip"), height, width, x.device)
    return Route.along(visits[directions], height * width).paths()


def check(found: list[Tensor], wanted: list[Tensor], dtype: torch.dtype) -> None:
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine.dtype == dtype
        assert mine.shape == theirs.shape
        assert (mine.double() - theirs).norm() <= TOLERANCES[dtype] * theirs.norm()


@DTYPES
@pytest.mark.parametrize("silu", [False, True], ids=["plain", "silu"])
@pytest.mark.parametrize("per_image", [False, True], ids=["shared", "per-image"])
@pytest.mark.parametrize("kind", ["joined", "quarters", "windows"])
@pytest.mark.parametrize("shape", [*SHAPES, *STAGES], ids=str)
@pytest.mark.usefixtures("nan_empty")
def test_reading(shape: tuple[int, ...], kind: str, per_image: bool, silu: bool, dtype: torch.dtype) -> None:
    paths = Paths(*(t.to(DEVICE) for t in make_paths(kind, shape, per_image=per_image)))
    x = draw(*shape, dtype=dtype).requires_grad_()
    exact = x.detach().double().requires_grad_()
    u, wanted = read_map(x, paths, silu=silu, backend="triton"), read_map(exact, paths, silu=silu, backend="reference")
    du = torch.randn(u.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    gradients = torch.autograd.grad(u, x, du), torch.autograd.grad(wanted, exact, du.double())
    check([u, gradients[0][0]], [wanted, gradients[1][0]], dtype)
    assert u.is_contiguous()
    assert gradients[0][0].permute(0, 2, 3, 1).is_contiguous()


@DTYPES
@pytest.mark.parametrize("upsampled", [False, True], ids=["alone", "half"])
@pytest.mark.parametrize("per_image", [False, True], ids=["shared", "per-image"])
@pytest.mark.parametrize("kind", ["joined", "quarters", "windows"])
@pytest.mark.parametrize("shape", [*SHAPES, *STAGES], ids=str)
@pytest.mark.usefixtures("nan_empty")
def test_merging(shape: tuple[int, ...], kind: str, per_image: bool, upsampled: bool, dtype: torch.dtype) -> None:
    b, c, height, width = shape
    paths = Paths(*(t.to(DEVICE) for t in make_paths(kind, shape, per_image=per_image)))
    sequences, steps = paths.visits.shape[-2:]
    y = torch.randn(b, sequences, c, steps, generator=torch.Generator().manual_seed(2)).to(DEVICE, dtype)
    leaves = [y] + ([draw(b, c, (height + 1) // 2, (width + 1) // 2, dtype=dtype, seed=3)] if upsampled else [])
    exact = [t.double().requires_grad_() for t in leaves]
    for leaf in leaves:
        leaf.requires_grad_()
    results = []
    for given, backend in ((leaves, "triton"), (exact, "reference")):
        half = given[1] if upsampled else None
        x = merge_map(given[0], paths, height, width, half=half, backend=backend)
        dx = draw(*shape, dtype=dtype, seed=4).to(x.dtype)
        results.append([x, *torch.autograd.grad(x, given, dx)])
    check(results[0], results[1], dtype)
    assert results[0][0].permute(0, 2, 3, 1).is_contiguous()


def test_joined_parts_follow_each_other() -> None:
    """By hand: the columns backwards, then the rows."""
    x = torch.arange(6.0).view(1, 1, 2, 3)
    paths = Route.along(visit(("v_flip", "h"), 2, 3, x.device), 6).paths(joined=True)
    u = read_map(x, paths)
    assert u.flatten().tolist() == [5, 2, 4, 1, 3, 0, 0, 1, 2, 3, 4, 5]
    assert torch.equal(merge_map(u, paths, 2, 3), 2 * x)
