"""The scan for export: the reference's output and gradients, whatever the length and the steps."""

from __future__ import annotations

import pytest
import torch

from tests.ops.cases import Scan, assert_close, make_inputs, reference_in_float64, run_scan
from trust_tta.ops import portable, reference
from trust_tta.ops.tensors import Parameters

scan: Scan = portable.scan_grouped
define: Scan = reference.scan_grouped


@pytest.mark.parametrize("length", [2, 7, 8, 9, 65, 130])
@pytest.mark.parametrize(("m", "n"), [(1, 1), (2, 1), (1, 3), (2, 3)])
def test_output_and_gradients(length: int, m: int, n: int) -> None:
    inputs = make_inputs(m=m, n=n, length=length)
    assert_close(run_scan(scan, inputs), reference_in_float64(inputs), 1e-12)


def test_a_single_step() -> None:
    inputs = make_inputs(length=1)
    torch.testing.assert_close(scan(*inputs, True), define(*inputs, True))


@pytest.mark.parametrize("step", [1e-6, 80.0, 1e4])
def test_tiny_and_huge_steps_stay_finite(step: float) -> None:
    """Sums of logarithms of these decays would overflow when they are taken back."""
    inputs = [t.float() for t in make_inputs(n=3, length=200)]
    inputs[1], inputs[6] = torch.full_like(inputs[1], step), torch.zeros_like(inputs[6])
    y = scan(*inputs, False)
    assert bool(y.isfinite().all())
    torch.testing.assert_close(y, define(*inputs, False), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [(0, 2, 1, 3), ((0, 1, 2, 3), (3, 2, 0, 1))], ids=["one order", "one per image"])
@pytest.mark.parametrize("n", [1, 2])
def test_a_map_and_its_merge(rows: tuple[int, ...], n: int) -> None:
    generator = torch.Generator().manual_seed(0)
    c, rank, directions = 6, 2, torch.tensor(rows)
    shapes = ((4, rank + 2 * n, c), (4, c, rank), (4, c), (4 * c, n), (4 * c,))
    parameters = Parameters(*(torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes))
    x = torch.randn(2, c, 3, 5, generator=generator, dtype=torch.float64)
    y = portable.scan_map(x, directions, parameters)
    torch.testing.assert_close(y, reference.scan_map(x, directions, parameters))
    weight, bias = torch.randn(2, c, generator=generator, dtype=torch.float64)
    norm = portable.merge_norm(y, 3, 5, weight, bias, 1e-5)
    torch.testing.assert_close(norm, reference.merge_norm(y, 3, 5, weight, bias, 1e-5))
