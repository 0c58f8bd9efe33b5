"""Tensors copied by one kernel, from a table of where they lie."""

# mypy: ignore-errors
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048  # numbers that a program copies


def make_table(targets: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """Rows (address to write to, address to read from, numbers) of blocks of float32 tensors."""
    rows = [
        (target.data_ptr() + 4 * first, value.data_ptr() + 4 * first, min(BLOCK, target.numel() - first))
        for target, value in zip(targets, values, strict=True)
        for first in range(0, target.numel(), BLOCK)
    ]
    return torch.tensor(rows, dtype=torch.int64, device=targets[0].device)


def copy(table: Tensor) -> None:
    """What the table says."""
    with torch.cuda.device_of(table):
        copy_kernel[(len(table),)](table, BLOCK=BLOCK, num_warps=4)


@triton.jit
def copy_kernel(p_table, BLOCK: tl.constexpr):
    """A row of the table."""
    p_row = p_table + tl.program_id(0) * 3
    p_to = tl.load(p_row).to(tl.pointer_type(tl.float32))
    p_from = tl.load(p_row + 1).to(tl.pointer_type(tl.float32))
    o = tl.arange(0, BLOCK)
    mask = o < tl.load(p_row + 2)
    tl.store(p_to + o, tl.load(p_from + o, mask=mask), mask=mask)
