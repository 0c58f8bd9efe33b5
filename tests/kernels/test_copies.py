"""Many tensors copied at once, against copies one by one."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from trust_tta.kernels import triton_copies  # noqa: E402
from trust_tta.kernels.copies import Copies  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = (5, 3 * triton_copies.BLOCK, triton_copies.BLOCK + 1, 1, 0)


def some_tensors(seed: int, device: str) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=draw).to(device) for size in SIZES]


def test_a_table_copies_all_and_nothing_else() -> None:
    values, room = some_tensors(0, DEVICE), [torch.zeros(size + 2, device=DEVICE) for size in SIZES]
    triton_copies.copy(triton_copies.make_table([t[1:-1] for t in room], values))
    for found, wanted in zip(room, values, strict=True):
        assert torch.equal(found[1:-1], wanted)
        assert found[0] == found[-1] == 0


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_values_of_now_are_copied_each_time(device: str) -> None:
    targets, values = some_tensors(0, device), some_tensors(1, device)
    copies = Copies(targets, values)
    for seed in range(3):
        for value, drawn in zip(values, some_tensors(seed, device), strict=True):
            value.copy_(drawn)
        if seed == 2:  # they move
            targets[0].data, values[1].data = torch.zeros_like(targets[0]), values[1].clone()
        versions = [t._version for t in targets]
        copies()
        assert all(torch.equal(t, v) for t, v in zip(targets, values, strict=True))
        assert all(t._version > before for t, before in zip(targets, versions, strict=True))
        assert (copies.table is not None) == (device == "cuda")


@pytest.mark.gpu
def test_other_dtypes_are_copied_as_well() -> None:
    targets, values = some_tensors(0, "cuda"), some_tensors(1, "cuda")
    copies = Copies(targets, [v.double() for v in values])
    for _ in range(2):
        copies()
        assert all(torch.equal(t, v) for t, v in zip(targets, values, strict=True))
        assert copies.table is None
