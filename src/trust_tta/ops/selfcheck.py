"""Each backend of the scan against the reference on this machine: output and every gradient."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trust_tta.ops.functional import grouped_scan, is_interpreted
from trust_tta.optional import available

TOLERANCE = 1e-4  # of float32 against float64, relative to the largest entry
NAMES = ("y", "du", "ddelta", "dA", "dB", "dC", "dD", "ddelta_bias")


@dataclass(frozen=True)
class BackendCheck:
    """The largest relative error of a backend against the reference, and where it was found."""

    error: float
    where: str

    @property
    def passed(self) -> bool:
        return self.error <= TOLERANCE  # False for NaN


def usable_backends() -> dict[str, str]:
    """The backends that run here, each with the device to check it on."""
    interpreted = available("triton") and is_interpreted()
    usable = {"reference": "cpu", "cpu": "cpu"}
    if available("triton") and (interpreted or torch.cuda.is_available()):
        usable["triton"] = "cpu" if interpreted else "cuda"
    return usable


def unusable_backends() -> dict[str, str]:
    """The backends that do not run here, each with the reason."""
    reason = "no CUDA device (TRITON_INTERPRET=1 checks it in the interpreter)"
    if not available("triton"):
        reason = "the package triton is missing; pip install 'trust-tta[triton]'"
    return {} if "triton" in usable_backends() else {"triton": f"not usable: {reason}"}


def check_backend(name: str, device: str) -> BackendCheck:
    """Output and every gradient of one backend against the reference, with one and with three states per channel."""
    worst = BackendCheck(0.0, "y")
    for state in (1, 3):
        inputs = _inputs(state)
        expected = _outputs(inputs, "reference")
        actual = _outputs([t.float().to(device) for t in inputs], name)
        for where, got, want in zip(NAMES, actual, expected, strict=True):
            error = ((got.double().cpu() - want).abs().max() / want.abs().max()).item()
            if not error <= worst.error:
                worst = BackendCheck(error, where)
    return worst


def _inputs(state: int) -> list[torch.Tensor]:
    """Two images, two groups, both directions, an odd number of channels, positions over more than one chunk."""
    generator = torch.Generator().manual_seed(0)
    b, g, m, c, n, length = 2, 2, 2, 5, state, 300
    row, weight = (b, g, m, n, length), (g, m, c)
    shapes = ((b, g, c, length), (b, g, m, c, length), (g, m, c, n), row, row, weight, weight)
    u, delta, A, B, C, D, bias = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    return [u, delta - 3, -A.exp(), B, C, D, bias]


def _outputs(inputs: list[torch.Tensor], backend: str) -> list[torch.Tensor]:
    """y and the gradients of the seven inputs, for an upstream gradient of cos(y's positions)."""
    leaves = [t.clone().requires_grad_() for t in inputs]
    y = grouped_scan(*leaves, backend=backend)
    dy = torch.arange(y.numel(), dtype=torch.float64).cos().view(y.shape).to(y)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]
