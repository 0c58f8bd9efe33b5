"""Inputs of the scan, and its output with every gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from trust_tta.ops.reference import scan_grouped

NAMES = ("u", "delta", "A", "B", "C", "D", "delta_bias")

Scan = Callable[..., Tensor]


def make_inputs(
    *, b: int = 2, g: int = 2, m: int = 2, c: int = 5, n: int = 1, length: int = 7, seed: int = 0
) -> list[Tensor]:
    """u, delta, A, B, C, D and delta_bias in float64, of the sizes that a trained network has."""
    generator = torch.Generator().manual_seed(seed)
    row, weight = (b, g, m, n, length), (g, m, c)
    shapes = ((b, g, c, length), (b, g, m, c, length), (g, m, c, n), row, row, weight, weight)
    u, delta, A, B, C, D, bias = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    return [u, delta - 2, -A.exp(), B, C, D, bias]


def run_scan(
    scan: Scan, inputs: Sequence[Tensor | None], *, softplus: bool = True, dy: Tensor | None = None
) -> dict[str, Tensor]:
    """y and the gradient of every input that is given, by name."""
    leaves = [None if t is None else t.detach().requires_grad_() for t in inputs]
    y = scan(*leaves, softplus)
    if dy is None:
        dy = torch.arange(1, y.numel() + 1, dtype=torch.float64).cos().view(y.shape)
    present = [t for t in leaves if t is not None]
    gradients = torch.autograd.grad(y, present, dy.to(y.dtype))
    names = [name for name, t in zip(NAMES, leaves, strict=True) if t is not None]
    return {"y": y.detach(), **{f"grad_{k}": v for k, v in zip(names, gradients, strict=True)}}


def reference_in_float64(
    inputs: Sequence[Tensor | None], *, softplus: bool = True, dy: Tensor | None = None
) -> dict[str, Tensor]:
    exact = [None if t is None else t.double() for t in inputs]
    return run_scan(scan_grouped, exact, softplus=softplus, dy=dy)


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """Every entry within `tolerance` of the largest expected value of its tensor; NaN is never close."""
    assert actual.keys() == expected.keys()
    errors = {
        name: ((actual[name].double() - want).abs().max() / want.abs().max().clamp(min=1e-30)).item()
        for name, want in expected.items()
    }
    assert all(error <= tolerance for error in errors.values()), errors
