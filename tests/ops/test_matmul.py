"""The products with a small weight against float64, in the shapes in which the scan of a map needs them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from trust_tta.ops.triton.backward import PartialSums, sum_rows  # noqa: E402
from trust_tta.ops.triton.matmul import choose_tile, matmul, weight_gradient  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# bfloat16 leaves Triton's interpreter cut off, not rounded.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
SIZES = [(5, 3, 1), (96, 6, 63), (70, 48, 49), (20, 24, 196), (33, 100, 130)]


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def check(weight: Tensor, x: Tensor, y: Tensor, *, add: bool) -> None:
    wanted = weight.double() @ x.double() + (y.double() if add else 0)
    matmul(weight, x, y, add=add)
    torch.testing.assert_close(
        y.double(), wanted, rtol=TOLERANCES[y.dtype], atol=TOLERANCES[y.dtype] * float(wanted.abs().max()) / 10
    )


@DTYPES
@pytest.mark.parametrize("per_image", [False, True], ids=["shared", "per-image"])
@pytest.mark.parametrize(("channels", "rank", "length"), SIZES)
def test_products_with_the_weight_and_with_its_transpose(
    channels: int, rank: int, length: int, per_image: bool, dtype: torch.dtype
) -> None:
    """Few rows to many and many to few, from and into the first rows of a larger tensor."""
    batch, directions, rows = 2, 2, rank + 2
    weight = normal(*((batch,) if per_image else ()), directions, channels, rank, seed=0).to(dtype)
    projected = normal(batch, directions, rows, length, seed=1).to(dtype)
    wide = torch.full((batch, directions, channels, length), float("nan"), dtype=dtype, device=DEVICE)
    check(weight, projected[:, :, :rank], wide, add=False)
    narrow = torch.full_like(projected, float("nan"))
    check(weight.mT, wide / channels**0.5, narrow[:, :, :rank], add=False)
    assert narrow[:, :, rank:].isnan().all()


@DTYPES
def test_products_add_to_what_is_there(dtype: torch.dtype) -> None:
    weight, x, y = normal(2, 20, 40, seed=2), normal(3, 2, 20, 63, seed=3), normal(3, 2, 40, 63, seed=4)
    check(weight.mT.to(dtype), x.to(dtype), y.to(dtype), add=True)


@DTYPES
@pytest.mark.parametrize("per_image", [False, True], ids=["shared", "per-image"])
@pytest.mark.parametrize(("rows", "columns", "length"), [(5, 3, 1), (16, 40, 49), (140, 12, 63), (33, 70, 300)])
@pytest.mark.usefixtures("nan_empty")
def test_weight_gradients_over_all_positions(
    rows: int, columns: int, length: int, per_image: bool, dtype: torch.dtype
) -> None:
    y = normal(3, 4, rows, length, seed=6).to(dtype)
    x = normal(3, 4, columns + 2, length, seed=7).to(dtype)[:, :, :columns]
    partial = weight_gradient(y, x, per_image=per_image).double()
    wanted = y.double() @ x.double().mT
    if not per_image:
        partial, wanted = partial.sum(0), wanted.sum(0)
    torch.testing.assert_close(partial, wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("channels", "rank"), [(96, 6), (192, 12), (384, 24), (768, 48)])
def test_few_rows_are_one_tile(channels: int, rank: int) -> None:
    """Then the large map is read once."""
    assert choose_tile(rank, channels, 196, 512)[0] >= rank
    assert choose_tile(channels, rank, 196, 512)[1] >= rank


def test_a_single_image_has_small_tiles() -> None:
    assert choose_tile(100, 768, 49, 2)[2] < choose_tile(100, 768, 49, 256)[2]


@DTYPES
@pytest.mark.parametrize(("blocks", "state", "length"), [(1, 1, 1), (17, 2, 130), (5, 16, 49)])
def test_rows_are_summed_into_the_last_rows(blocks: int, state: int, length: int, dtype: torch.dtype) -> None:
    B, C = (normal(1, 2, 2, blocks, state, length, seed=seed) for seed in (5, 6))
    unused = torch.empty(0)
    dprojected = torch.full((1, 2, 2, 3 + 2 * state, length), float("nan"), dtype=dtype, device=DEVICE)
    sum_rows(PartialSums(A=unused, B=B, C=C, D=unused, delta_bias=unused), dprojected)
    assert dprojected[:, :, :, :3].isnan().all()
    wanted = torch.cat([rows.double().sum(3) for rows in (B, C)], 3)
    torch.testing.assert_close(dprojected[:, :, :, 3:].double(), wanted, rtol=TOLERANCES[dtype], atol=1e-5)


@pytest.mark.gpu
@DTYPES
@pytest.mark.parametrize(("channels", "rank", "length"), [(96, 6, 3136), (192, 12, 784), (384, 24, 196), (768, 48, 49)])
def test_products_of_a_network(channels: int, rank: int, length: int, dtype: torch.dtype) -> None:
    """All four of a block, as many images as make several waves of programs."""
    draw = torch.Generator(device="cuda").manual_seed(0)
    rows = 2 * (rank + 2)
    for directions, m, k in ((2, rows, channels), (4, channels, rank), (4, rank, channels), (2, channels, rows)):
        weight = (torch.randn(directions, m, k, generator=draw, device="cuda") / k**0.5).to(dtype)
        x, y = (torch.randn(32, directions, n, length, generator=draw, device="cuda").to(dtype) for n in (k, m))
        check(weight, x, y, add=m == channels)
        got = weight_gradient(y, x, per_image=False).double().sum(0)
        wanted = (y.double() @ x.double().mT).sum(0)
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))
