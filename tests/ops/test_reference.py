"""The definition itself: proved by numerical differentiation and by independent formulas."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.ops.cases import Scan, make_inputs
from trust_tta.ops import reference

scan_grouped: Scan = reference.scan_grouped


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize("softplus", [True, False], ids=["softplus", "plain"])
def test_gradients_equal_numerical_ones(m: int, n: int, softplus: bool) -> None:
    inputs = make_inputs(b=2, g=2, m=m, c=2, n=n, length=5)
    if not softplus:
        inputs[1], inputs[6] = inputs[1].abs(), inputs[6].abs()  # a negative step would let the state grow
    inputs = [t.requires_grad_() for t in inputs]
    assert torch.autograd.gradcheck(lambda *t: scan_grouped(*t, softplus), inputs)


@pytest.mark.parametrize("present", [(True, False), (False, True), (False, False)], ids=["D", "bias", "neither"])
def test_gradients_without_optional_inputs(present: tuple[bool, bool]) -> None:
    *rows, D, bias = [t.requires_grad_() for t in make_inputs(b=1, m=2, c=2, length=4)]

    def scan(*tensors: torch.Tensor) -> torch.Tensor:
        rest = list(tensors[5:])
        return scan_grouped(*tensors[:5], rest.pop(0) if present[0] else None, rest[0] if present[1] else None, True)

    used = rows + ([D] if present[0] else []) + ([bias] if present[1] else [])
    assert torch.autograd.gradcheck(scan, used)


def test_a_constant_scan_is_a_geometric_series() -> None:
    ones = torch.ones(1, 1, 1, 9, dtype=torch.float64)
    step, A = 0.3, torch.full((1, 1, 1, 1), -2.0, dtype=torch.float64)
    y = scan_grouped(ones, step * ones[:, :, None], A, ones[:, :, None], ones[:, :, None], None, None, False)
    decay = np.exp(step * -2.0)
    expected = step * (1 - decay ** np.arange(1, 10)) / (1 - decay)
    np.testing.assert_allclose(y.flatten().numpy(), expected, rtol=1e-14)


def test_each_direction_is_a_triangular_matrix() -> None:
    """y = M u with M[t, s] = sum_n C_t exp(A (d_{s+1} + ... + d_t)) d_s B_s, written out without a recurrence."""
    u, delta, A, B, C, D, bias = (t.numpy() for t in make_inputs(b=1, g=1, m=2, c=1, n=3, length=8))
    d = np.logaddexp(0, delta + bias[..., None])[0, 0, :, 0]
    expected = (D[0, :, 0].sum()) * u[0, 0, 0]
    for m in (0, 1):
        for t in range(8):
            for s in range(t + 1) if m == 0 else range(t, 8):
                passed = d[m, s + 1 : t + 1].sum() if m == 0 else d[m, t:s].sum()
                weight = (C[0, 0, m, :, t] * np.exp(A[0, m, 0] * passed) * B[0, 0, m, :, s]).sum()
                expected[t] += weight * d[m, s] * u[0, 0, 0, s]
    inputs = make_inputs(b=1, g=1, m=2, c=1, n=3, length=8)
    np.testing.assert_allclose(scan_grouped(*inputs, True).flatten().numpy(), expected, rtol=1e-12)


def test_direction_1_is_direction_0_of_the_reversed_sequence() -> None:
    u, delta, A, B, C, D, bias = make_inputs(m=2, n=3)
    both = scan_grouped(u, delta, A, B, C, None, bias, True)
    ahead = scan_grouped(u, delta[:, :, :1], A[:, :1], B[:, :, :1], C[:, :, :1], None, bias[:, :1], True)
    flipped = [t.flip(-1) for t in (u, delta[:, :, 1:], B[:, :, 1:], C[:, :, 1:])]
    back = scan_grouped(*flipped[:2], A[:, 1:], *flipped[2:], None, bias[:, 1:], True).flip(-1)
    torch.testing.assert_close(both, ahead + back, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_the_output_has_the_dtype_of_u(dtype: torch.dtype) -> None:
    inputs = [t.to(dtype) for t in make_inputs()]
    assert scan_grouped(*inputs, True).dtype == dtype
