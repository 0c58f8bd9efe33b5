"""The scan as an operator of torch.library: fake, autograd and compile rules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.cases import assert_close, make_inputs, run_scan
from trust_tta.models.config import VMambaConfig
from trust_tta.models.vmamba import VMamba
from trust_tta.ops.functional import grouped_scan, selective_scan
from trust_tta.ops.operators import scan, scan_backward

TINY = VMambaConfig(depths=(1, 1), dims=(8, 16), num_classes=3, d_state=2, drop_path=0.0)


def cpu_scan(*tensors: Tensor | bool | None) -> Tensor:
    y: Tensor = scan(*tensors, False)[0]
    return y


@pytest.mark.parametrize("optional", [True, False], ids=["all-inputs", "no-D-no-bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_opcheck(dtype: torch.dtype, optional: bool) -> None:
    inputs: list[Any] = [t.to(dtype).requires_grad_() for t in make_inputs(c=3, n=2)]
    if not optional:
        inputs[5:] = [None, None]
    torch.library.opcheck(scan, (*inputs, True, False))
    plain = [None if t is None else t.detach() for t in inputs]
    y, states = scan(*plain, True, False)
    torch.library.opcheck(scan_backward, (torch.ones_like(y), *plain, True, states, False))


def test_a_second_derivative_is_refused() -> None:
    inputs = [t.requires_grad_() for t in make_inputs(c=3)]
    (gradient,) = torch.autograd.grad(cpu_scan(*inputs, True).sum(), inputs[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="scan_backward"):
        gradient.sum().backward()


def test_compiled_scan_equals_eager() -> None:
    torch._dynamo.reset()

    def call(*inputs: Tensor | bool) -> Tensor:
        return grouped_scan(*inputs[:-1], delta_softplus=bool(inputs[-1]))  # type: ignore[arg-type]

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for length in (9, 14):  # the second length compiles with symbolic shapes
        inputs = [t.float() for t in make_inputs(c=3, n=2, length=length)]
        assert_close(run_scan(compiled, inputs), run_scan(call, inputs), 1e-6)


def _network_results(network: Any, model: VMamba, images: Tensor, order: str | None) -> list[Tensor]:
    logits: Tensor = network(images, order)
    gradients = torch.autograd.grad(logits.square().sum(), list(model.parameters()))
    return [logits.detach(), *gradients]


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # PyTorch's own, on loading inductor
@pytest.mark.parametrize("norm", ["layer", "batch"])
@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_network_equals_eager(norm: str, compiler: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = VMamba(TINY.override({"norm": norm})).eval()
    images = torch.randn(2, 3, 16, 24)
    compiled = torch.compile(model, fullgraph=True, backend=compiler)
    for order in (None, "bcda"):
        actual, expected = (_network_results(m, model, images, order) for m in (compiled, model))
        for got, want in zip(actual, expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("training", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["eval", "train"])
def test_a_network_on_the_gpu_kernels_compiles_whole(training: bool) -> None:
    """The GPU's code in Triton's interpreter: one graph, forward and backward, also with stochastic depth."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = VMamba(TINY.override({"norm": "batch", "drop_path": 0.1})).train(training)
    model.set_scan_backend("triton")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    gradients = torch.autograd.grad(compiled(torch.randn(2, 3, 8, 8)).square().sum(), list(model.parameters()))
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_the_public_scan_compiles() -> None:
    torch._dynamo.reset()
    u, delta, A, B, C, D, bias = (t.float() for t in make_inputs(g=3, m=1, c=2, n=2))
    inputs = (
        u.flatten(1, 2),
        delta.flatten(1, 3),
        A.flatten(0, 2),
        B[:, :, 0],
        C[:, :, 0],
        D.flatten(),
        bias.flatten(),
    )
    compiled = torch.compile(selective_scan, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*inputs), selective_scan(*inputs))
