"""SS2D's scan of a feature map on a CPU: channel-last throughout; directions are summed as they are computed."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from trust_tta.ops import reference
from trust_tta.ops.cpu.native import array_fields, load_kernel
from trust_tta.ops.cpu.threads import run_tasks
from trust_tta.ops.cpu.tiling import TILE, scratch_size
from trust_tta.ops.reference import scatter_add
from trust_tta.ops.tensors import Gathered, Parameters, Saved

MIN_TASKS = 8  # blocks of channels divide the work of few images
MIN_TILE_CHANNELS = 48  # where more tiles make more tasks
MAX_IMAGE_GROUPS = 16  # each has one buffer for the parameters' gradients
VECTOR_CHANNELS = 16  # channels of a tile are a multiple of this


def scan_map_forward(x: Tensor, directions: Tensor, parameters: Parameters) -> tuple[Tensor, Saved]:
    """See `operators.Backend`; the sequences are merged, y (b, h, w, c)."""
    b, c, height, width = x.shape
    gathered = reference.gather(parameters, directions, x.dtype)
    u = F.silu(x.detach().permute(0, 2, 3, 1).contiguous()).view(b, height * width, c)
    projected = _rows(u, gathered) @ _flat_x_proj(gathered).mT
    projected = projected.view(b, height * width, 4, -1)
    dtype = torch.promote_types(x.dtype, torch.float32)
    y = u.new_empty(u.shape, dtype=dtype)
    partition = _Partition.of(x, gathered)
    given = [t.to(dtype) for t in (u, projected, _parameter_rows(gathered, dtype, partition.wide).flatten(2), y)]
    kernel, arrays = load_kernel("ss2d_forward", dtype), array_fields(*given)

    def work(first: int, last: int) -> None:
        scratch = torch.empty(scratch_size(height * width), dtype=dtype)
        kernel(*array_fields(scratch), *arrays, width, gathered.rank, *partition[2:], first, last)

    run_tasks(work, partition.groups * partition.blocks, 4 * u.numel())
    states = x.new_empty(0, dtype=torch.float32)
    return y.to(x.dtype).view(b, height, width, c), Saved(projected, states, u, gathered)


def scan_map_backward(
    dy: Tensor, x: Tensor, directions: Tensor, saved: Saved, *, train_projections: bool, train_scan: bool
) -> tuple[Tensor, Parameters]:
    """See `operators.Backend`."""
    (b, c, height, width), u, projected, gathered = x.shape, saved.u, saved.projected, saved.gathered
    dtype = torch.promote_types(x.dtype, torch.float32)
    partition = _Partition.of(x, gathered)
    arranged = _parameter_rows(gathered, dtype, partition.wide)
    du = u.new_empty(u.shape, dtype=dtype)
    # One partial sum for each group of images or block of channels, added up in a fixed order.
    dprojected = du.new_empty(partition.blocks, *projected.shape)
    sums = du.new_empty(partition.groups, *arranged.shape[1:])
    tensors = (dy.reshape(u.shape), u, projected, arranged.flatten(2), du, dprojected, sums.flatten(2))
    given = [t.to(dtype).contiguous() for t in tensors]
    kernel, arrays, wanted = load_kernel("ss2d_backward", dtype), array_fields(*given), (train_projections, train_scan)

    def work(first: int, last: int) -> None:
        scratch = torch.empty(scratch_size(height * width), dtype=dtype)
        kernel(*array_fields(scratch), *arrays, width, gathered.rank, *partition[2:], *wanted, first, last)

    run_tasks(work, partition.groups * partition.blocks, 4 * u.numel())
    x_proj = _flat_x_proj(gathered)
    down = (dprojected[0] if len(dprojected) == 1 else dprojected.sum(0)).to(u.dtype)
    rows = down.view(*_rows(u, gathered).shape[:-1], -1)
    du = du.to(u.dtype).view(*rows.shape[:-1], c)
    (du.addmm_ if rows.dim() == 2 else du.baddbmm_)(rows, x_proj)
    dx = torch.ops.aten.silu_backward(du.view(b, height, width, c).permute(0, 3, 1, 2), x)

    sources: list[Tensor | None] = [None] * 5
    if train_projections or train_scan:
        rank, A = gathered.rank, gathered.A
        n = A.shape[-1]
        sums = sums if len(arranged) > 1 else sums.sum(0, keepdim=True)
        merged = sums[..., : partition.wide].transpose(1, 2).flatten(2)[..., :c]  # the tiles side by side, (p, m, c)
        dD, dbias, dA, dweight = merged.split((1, 4, 4 * n, 4 * rank), dim=1)
        if train_projections:
            sources[:2] = [rows.mT @ _rows(u, gathered), dweight.unflatten(1, (4, rank)).mT]
        if train_scan:
            sources[2:] = [dbias, dA.unflatten(1, (4, n)).mT * A.reshape(-1, 4, c, n), dD.expand(-1, 4, -1)]
    shapes = zip(sources, gathered.parameter_shapes(), strict=True)
    like = gathered.A
    return dx, Parameters(
        *(like.new_empty(0) if t is None else scatter_add(t, directions, s, like.dtype) for t, s in shapes)
    )


class _Partition(NamedTuple):
    """Partition of the work into tasks, independent of the number of threads: sums are bit-identical."""

    groups: int
    blocks: int
    images: int  # of a group
    tiles: int  # of a block
    wide: int  # channels of a tile

    @classmethod
    def of(cls, x: Tensor, gathered: Gathered) -> _Partition:
        b, c = x.shape[:2]
        wanted = -(-MIN_TASKS // b)  # tasks of an image
        tiles = max(-(-c // TILE), min(wanted, c // MIN_TILE_CHANNELS))
        wide = -(-c // (tiles * VECTOR_CHANNELS)) * VECTOR_CHANNELS
        tiles = -(-c // wide)
        block = -(-tiles // min(tiles, wanted))
        shared = gathered.A.dim() == 4
        images = max(1, b // MAX_IMAGE_GROUPS) if shared else 1
        return cls(-(-b // images), -(-tiles // block), images, block, wide)


def _parameter_rows(gathered: Gathered, dtype: torch.dtype, wide: int) -> Tensor:
    """The parameters of the four directions as the kernels read them; p = b where each image has its own, else 1."""
    _, dt_proj, A, D, bias = (t.to(dtype) for t in gathered)
    c = D.shape[-1]
    A, weight = (t.reshape(-1, 4, c, t.shape[-1]).mT.flatten(1, 2) for t in (A, dt_proj))
    D, bias = D.reshape(-1, 4, c).sum(1, keepdim=True), bias.reshape(-1, 4, c)
    rows = F.pad(torch.cat((D, bias, A, weight), dim=1), (0, -c % wide)).unflatten(-1, (-1, wide))
    return F.pad(rows.transpose(1, 2), (0, TILE - wide)).contiguous()


def _flat_x_proj(gathered: Gathered) -> Tensor:
    """(4(r+2n), c), or (b, 4(r+2n), c) where every image has its own."""
    return gathered.x_proj.flatten(-3, -2)


def _rows(u: Tensor, gathered: Gathered) -> Tensor:
    """u (b, l, c) as `_flat_x_proj` takes it: the pixels of all images in one matrix, unless each has its own."""
    return u.flatten(0, 1) if gathered.x_proj.dim() == 3 else u
